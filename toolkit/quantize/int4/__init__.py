"""Weights of large products -> 4 bits in blocks of the depth, for `tandem build --int4-weights`.

model     the driver: which products get INT4, by what they and the outputs lose
products  products with large weights, their weights in INT4 and their errors, by samples
rounding  a weight -> 4 bits, to nearest or by GPTQ
graph     writes weights and factors into a graph
"""
