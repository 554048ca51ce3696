"""Segments for the GPU: an ONNX segment -> cubins, launches and packed weights.

`lower.py` is the numbered driver; read it first. Nothing here needs a GPU, and Triton is imported
only by the processes that compile (`codegen/worker.py`).
"""
