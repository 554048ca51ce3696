"""Run a model or an engine on inputs: `inputs.py` makes feeds of files or random numbers,
`onnx_runner.py` and `engine_runner.py` run them, `saved.py` reads and writes arrays, `traces.py`
shows each tensor inside the segments of an engine.

What runs an engine loads no onnx, so that it also runs on a board; a trace of the DLA does.
"""
