"""LoRA fine-tuning: settings, base weights of a run, merging, and the adapter in PEFT's format."""
