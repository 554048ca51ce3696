"""Q/DQ of FP8 for the products of a float model, for `tandem build --precision fp8`.

products  which products kernels multiply in FP8, and the rounding of weights
graph     writes the Q/DQ into a graph
table     calibration tables for FP8
model     the driver: which products get FP8, by what they and the outputs lose
"""
