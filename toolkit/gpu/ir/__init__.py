"""A GPU segment as values."""
