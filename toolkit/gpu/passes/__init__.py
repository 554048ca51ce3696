"""A segment as operations on tensors, rewritten until kernels compute it."""
