"""INT8 on the graph: ranges from data, Q/DQ along a plan, what helps, and the forms of others.

data, observe, ranges    samples -> every activation -> a table
trial, metrics, effect   INT8 tried without building; what it costs, and whether a change helps
scale_rules, quantize    ranges as the DLA wants them -> Q/DQ graph (weights: the integers)
equalise, bias_correction  what may make INT8 better
qdq_*                    Q/DQ models written for TensorRT, checked, and read
"""
