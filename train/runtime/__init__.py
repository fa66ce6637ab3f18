"""Process and machine: devices, memory, allocator, XLA flags, signals and out-of-memory errors."""
