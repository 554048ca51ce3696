"""Optional changes of weights before quantization.

corrections    tries equalisation and bias correction, and keeps them if they help
equalise       cross-layer equalisation of channel ranges
channel_links  pairs of layers between which channels can be rescaled
channel_groups the same for channels that several layers write and read
bias           bias correction from measured means
adjust         applies the adjustments of a calibration table to a model
effect         figures before and after a change
"""
