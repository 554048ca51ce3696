"""Model files -> graphs."""
