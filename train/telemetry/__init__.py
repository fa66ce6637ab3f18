"""Report a run's progress: metrics, events, TensorBoard, progress bar, loss plot and goodput."""
