"""The motion of tracks: a Kalman filter with constant velocity, of all tracks at once.

The state of a track is the centre and size of its box and their velocities, with the noise of
SORT's descendants (Wojke et al. 2017; Aharon et al. 2022): proportional to the size of the box. All
noise is independent per coordinate, so the 8 x 8 covariance falls apart into four of 2 x 2, of
which three numbers each are kept. Time is in steps of 1/30 s, for which those noises were chosen; a
gap of any length is one prediction.
"""

import numpy as np
from numpy.typing import NDArray

STEP_S = 1.0 / 30.0
POSITION_NOISE = 1.0 / 20.0  # of the size of the box
VELOCITY_NOISE = 1.0 / 160.0
# States are float64 [5, N, 4], a plane for each of these: a step is then a few operations on whole
# planes. The columns are centre x, centre y, width, height.
POSITION, VELOCITY, VAR_P, COV_PV, VAR_V = range(5)

States = NDArray[np.float64]


def start(measured: NDArray[np.float64]) -> States:
    """Return states [5, N, 4] at rest for boxes [N, 4] as centre x, centre y, width, height."""
    states = np.zeros((5, len(measured), 4))
    size = _sizes(measured)
    states[POSITION] = measured
    states[VAR_P] = (2.0 * POSITION_NOISE * size) ** 2
    states[VAR_V] = (10.0 * VELOCITY_NOISE * size) ** 2
    return states


def predict(states: States, seconds: float) -> States:
    """Return the states so much later; their uncertainty grows."""
    steps = seconds / STEP_S
    size = _sizes(states[POSITION])
    later: States = states.copy()
    later[POSITION] += steps * states[VELOCITY]
    later[VAR_P] += steps * (2.0 * states[COV_PV] + steps * states[VAR_V])
    later[VAR_P] += steps * (POSITION_NOISE * size) ** 2
    later[COV_PV] += steps * states[VAR_V]
    later[VAR_V] += steps * (VELOCITY_NOISE * size) ** 2
    return later


def update(states: States, measured: NDArray[np.float64]) -> States:
    """Return the states after one measurement [N, 4] each."""
    variance = states[VAR_P] + (POSITION_NOISE * _sizes(states[POSITION])) ** 2
    gain_p = states[VAR_P] / variance
    gain_v = states[COV_PV] / variance
    error = measured - states[POSITION]
    known = np.empty_like(states)
    known[POSITION] = states[POSITION] + gain_p * error
    known[VELOCITY] = states[VELOCITY] + gain_v * error
    known[VAR_P] = states[VAR_P] - gain_p * states[VAR_P]
    known[COV_PV] = states[COV_PV] - gain_p * states[COV_PV]
    known[VAR_V] = states[VAR_V] - gain_v * states[COV_PV]
    return known


def centres(boxes: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return boxes x1, y1, x2, y2 as centre x, centre y, width, height."""
    measured = np.empty((len(boxes), 4))
    np.subtract(boxes[:, 2:], boxes[:, :2], out=measured[:, 2:])
    np.add(boxes[:, :2], 0.5 * measured[:, 2:], out=measured[:, :2])
    return measured


def corners(states: States) -> NDArray[np.float32]:
    """Return the boxes of states as x1, y1, x2, y2."""
    place = states[POSITION]
    half = 0.5 * np.maximum(place[:, 2:], 1.0)
    boxes = np.empty((len(place), 4), np.float32)
    boxes[:, :2] = place[:, :2] - half
    boxes[:, 2:] = place[:, :2] + half
    return boxes


def _sizes(measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return width, height, width, height, at least a pixel: a box keeps some noise."""
    return np.maximum(measured[:, [2, 3, 2, 3]], 1.0)
