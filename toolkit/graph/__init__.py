"""The ONNX graph as the toolkit reads and changes it: node views, windows, passes."""
