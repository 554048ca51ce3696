"""What is known of the TensorRT of this board: the only way to its DLA, and one to its GPU.

releases        which TensorRT takes which form of a segment, with which flags
board           what a finished plan depends on: versions, cores, power mode
messages        TensorRT's known refusals, as one sentence and a fix
layout          arrays to and from the DLA's memory formats
request         one segment to be finished: the values that pass to the child process
plans           finished plans on disk, under everything that they depend on
"""
