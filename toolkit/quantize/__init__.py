"""INT8 quantization of a graph: ranges from data, corrections of weights, Q/DQ along a plan.

quantize      ranges + placement -> Q/DQ graph; which operators are quantized
observe       runs a graph with every activation as an output
weights       weights and biases -> integers
int4/         weights of large products -> 4 bits in blocks, beside FP16
float8/       products of FP8, beside FP16
gpu_operands  which operands the GPU reads in INT8
ranges/       calibration data -> calibration table
corrections/  optional changes of weights: equalisation, bias correction
trials/       INT8 accuracy without a build; accuracy budgets
scales/       ranges unified for the scale rules of the DLA
qdq/          Q/DQ models: write, check, import
"""
