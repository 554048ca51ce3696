"""Kernels -> cubins, in worker processes, without a GPU."""
