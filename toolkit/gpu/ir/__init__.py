"""A GPU segment as values.

network          a segment as operations, shapes and constants
parameters       constant parameters of operations
patterns         patterns of operations, and their rewriting
builder          networks under construction
expressions      fused element-wise expressions
elementwise_ops  expression ops of each element-wise operator
dtypes           element types of kernels
view             strided views of allocations
launch           kernel launches, tactics, tunable ops
"""
