"""INT8 on the graph: ranges from data, Q/DQ along a plan, what helps, and the forms of others.

data, split, observe       samples -> every activation
fit, steps, ranges         -> ranges, optional steps -> a table
trial, metrics, effect     INT8 tried without building; what it costs, and whether a change helps
equalise, bias_correction  what may make INT8 better; adjust does it again from a table
scale_rules, quantize      ranges as the DLA wants them -> Q/DQ graph (weights: the integers)
qdq_*                      Q/DQ models written for TensorRT, checked, and read
"""
