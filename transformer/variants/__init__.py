"""Variants of attention, one a file beside the paper that it is from; helpers stand beside them."""
