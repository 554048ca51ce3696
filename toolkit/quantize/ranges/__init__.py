"""Calibration data -> activation ranges -> calibration table.

measure      the driver, and its result
options      what may be asked of it
steps        observe, fit, equalise, choose, keep, correct, judge
data         images, arrays, videos or iterables -> samples of the model inputs
split        samples that measure ranges and samples that judge them
table_file   reads tables, TensorRT caches and Q/DQ models; fits them to a graph
kept_text    the nodes kept in floating point, as text and JSON
report_text  the report as text and JSON
report_html  the report as a page with histograms
"""
