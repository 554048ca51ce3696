"""Q/DQ models: written for TensorRT, checked against its rules, imported.

nodes         quantization parameters of Q and DQ nodes
writer        adds Q and DQ nodes to a graph, or their meaning as metadata
export        float model + ranges -> Q/DQ model
check         violations of TensorRT's rules
blocks        weights of 4 bits in blocks -> constants that keep their integers
importer      Q/DQ model -> float model + ranges
float_segment segment of a build -> float model + ranges, as an import of its Q/DQ would give
symmetric     checks for symmetric INT8, quantizes constants
infer_ranges  ranges that a Q/DQ model omits
"""
