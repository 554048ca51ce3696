"""What nodes take on each processor, in time and energy, fitted to published measurements."""
