"""Rewrites whose results only kernels for sm_90 compute."""
