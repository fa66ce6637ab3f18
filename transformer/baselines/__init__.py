"""Models that preceded the transformer, and simple baselines, as mixers and configurations."""
