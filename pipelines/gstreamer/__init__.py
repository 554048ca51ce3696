"""The element `tandeminfer`: an engine in any GStreamer pipeline.

`python/tandeminfer.py` is loaded by GStreamer's Python, which need not be Tandem's, nor have its
packages; `worker.py` runs the engine in a process of Tandem's Python.
"""
