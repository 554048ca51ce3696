"""Sizes of tensors as formulas over dynamic dimensions.

formulas     polynomials with floors, in canonical form
sizes        an int that remembers its formula
shape_rules  shapes of operators that compute with sizes
size_values  values of operators that compute sizes
inference    shapes of all tensors of a segment, at a point
"""
