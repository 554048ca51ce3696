"""The DLA's integer arithmetic in software, stage by stage, on numpy arrays alone.

In the order of the data:

    convert         pixels to INT8 on the way in, 32 bits to INT8 or INT16 on the way out
    accumulator     34-bit (INT16: 48-bit) saturating sums of products, and what leaves them
    convolution     the products: exact through BLAS where no partial sum leaves its exact range
    planes          how an image is laid out, so that each tap of a kernel reads one run of memory
    tiles           3x3 convolutions with fewer products, where they give the same whole numbers
    output_stages   the per-channel stages X and the element-wise stage Y: add, multiply, rectify
    lookup          two tables with interpolation: sigmoid, tanh and normalization
    pooling         maximum, minimum and the average that rounds twice
    normalization   LRN: sums of squares across channels, looked up
    scales          real factors as a 16-bit multiplier and a shift
    layers          whole layers, as a compiler sets the stages up

`rounding` holds the one rule of rounding that all of them share, `checks` what they refuse, and
`library` has the names for users, shown in examples/dla_arithmetic.py. Registers are frozen
dataclasses that raise DlaError for what the hardware's cannot hold.

The rules are those of the open NVDLA, the ancestor of Xavier's DLA (hardware sources:
github.com/nvdla/hw, branches nvdlav1 and master; compiler: github.com/nvdla/sw). Silicon of Xavier
and Orin may differ: see docs/emulator.md.
"""
