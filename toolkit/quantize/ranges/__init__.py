"""Calibration data -> activation ranges -> calibration table.

measure      the driver: observe, fit, equalise, choose, budget, correct
data         images, arrays, videos or iterables -> samples of the model inputs
split        samples that measure ranges and samples that judge them
observe      runs the graph with every activation as an output
fit          histograms -> ranges, and INT8 error at the outputs
table_file   reads tables, TensorRT caches and Q/DQ models; fits them to a graph
report_text  the report as text and JSON
report_html  the report as a page with histograms
"""
