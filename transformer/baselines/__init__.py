"""Models from before the transformer, and simple baselines, as mixers and configurations."""
