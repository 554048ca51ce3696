"""Equal scales for the tensors that DLA layers require to share one.

rules   the rules and the unified ranges
effect  what the rules cost in SQNR
"""
