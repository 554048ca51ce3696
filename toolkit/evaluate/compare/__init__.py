"""FP32, GPU INT8 and DLA INT8 side by side: what the DLA's arithmetic costs, where, and why."""
