"""The host process and its devices: hardware, allocator, XLA flags, signals, memory errors."""
