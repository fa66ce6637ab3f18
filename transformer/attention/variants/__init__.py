"""Attention variants, one file per paper."""
