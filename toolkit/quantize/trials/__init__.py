"""INT8 accuracy without a build.

trial        a session whose ranges and INT8 nodes are chosen at every run
trial_graph  its graph: a switch at each Q/DQ pair
fit          histograms -> ranges, and INT8 error at the outputs
metrics      SQNR, cosine and mAP50 of a trial
score        mAP50 on the held-out scenes
budget       the nodes that an accuracy budget keeps in floating point
keep         the nodes that stay in floating point where an output has scores or misses its target
"""
