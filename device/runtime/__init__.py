"""Engines being run: the session, its executors, the CUDA driver, the emulated DLA."""
