"""Rewrites of a segment until kernels compute it, and its fusion into groups of one kernel each."""
