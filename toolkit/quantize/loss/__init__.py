"""What INT8 loses at the outputs, in terms of what the outputs are for.

parts    the parts of the outputs: scores, boxes, class probabilities and other values
metrics  metrics that fit each kind of part, with the limits that they are judged by
judge    the parts of all outputs, judged; the error where a limit is broken
"""
