"""Sizes of tensors as formulas over dynamic dimensions."""
