"""Attention: the mixer interface, full attention, masks, caches and positions."""
