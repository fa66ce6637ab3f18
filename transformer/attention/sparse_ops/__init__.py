"""Weight-free operations on selected tokens that several mixers share."""
