"""Kernels -> cubins, in processes of their own, without a GPU."""
