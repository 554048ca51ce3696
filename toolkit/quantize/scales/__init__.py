"""One scale for the tensors that DLA layers tie together, and what that costs."""
