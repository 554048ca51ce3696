"""What INT8 loses at the outputs, in terms of what the outputs are for.

parts       the parts of the outputs: scores, boxes, class probabilities and other values
varying     outputs whose size depends on the data, and the detections among them
detections  rows of two runs that have no order in common, compared by place and class
metrics     metrics that fit each kind of part, with the limits that they are judged by
judge       the parts of all outputs, judged; the error where a limit is broken
"""
