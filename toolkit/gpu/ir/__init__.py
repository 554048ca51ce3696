"""A GPU segment as values: operations, element-wise expressions, tensor views, kernel launches."""
