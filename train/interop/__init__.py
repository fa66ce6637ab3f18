"""Import, export and conversion of trained runs."""
