"""Fine-tuning with the INT8 arithmetic of an engine: `tandem.fake_quantize`.

    fake_quantize.py      a model, its ranges and a profile -> a PyTorch network of the plan
    trainable_network.py  that network: its parameters, and how they are quantized anew
    segment.py            one segment: values as the engine has them, gradients straight through
    operators.py          a row for each ONNX operator: its PyTorch function

Gradients are those of the Q/DQ graph in floating point, where rounding counts as the identity. The
numbers of a DLA segment come from `device/dla_emulator`, so that they are those of
`open_session(engine, dla="fast")`, bit for bit. Only this folder imports torch at its top.
"""
