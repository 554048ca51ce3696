"""Which processor runs what: the exact placement solver and the simulator of what it predicts.

Nothing here knows of ONNX: values come in (`problem.py`) and values go out.
"""
