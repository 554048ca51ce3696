"""Figures of the error between two tensors, from sums over their elements.

r: reference, t: test. signal = sum r^2, power = sum t^2, noise = sum (r - t)^2, product = sum r t,
each as large as a float64 holds.
"""

import math


def sqnr_db(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise), the signal to quantisation noise ratio, in dB.

    inf without noise, also where there is no signal; -inf without signal, or for infinite noise.
    """
    if noise == 0.0:
        return math.inf
    if signal == 0.0 or noise == math.inf:
        return -math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise))  # the quotient may be too small


def cosine(signal: float, power: float, product: float) -> float:
    """Return product / sqrt(signal * power), in [-1, 1]; of zeros alone 1 for two, 0 for one."""
    if signal == 0.0 or power == 0.0:
        return float(signal == power)
    # In this form equal tensors give exactly 1 and opposite ones exactly -1.
    return max(-1.0, min(1.0, product / signal * math.sqrt(signal / power)))
