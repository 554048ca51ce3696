"""Q/DQ models: written for TensorRT, checked against its rules, read back."""
