"""Optional changes of weights before quantization: equalisation and bias correction."""
