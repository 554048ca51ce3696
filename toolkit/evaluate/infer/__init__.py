"""Run a model or an engine on inputs: `inputs.py` makes feeds of files or random numbers,
`onnx_runner.py` and `engine_runner.py` run them, `saved.py` reads and writes arrays.

What runs an engine loads no onnx, so that it also runs on a board.
"""
