"""The NVIDIA driver, called through ctypes: no CUDA toolkit and no package is needed on a board."""
