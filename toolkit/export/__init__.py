"""An engine as files for NVIDIA's own tools, for people who stay with trtexec.

releases        the releases of TensorRT, and which trtexec has which flag
joined_network  engine -> the whole network, float, with its ranges and placements
half            a network typed in FP16, for strongly typed TensorRT
trtexec         network + release -> trtexec's arguments, or why there are none
folder          all of it, written as one folder
"""
