"""CenterNet: the peaks of a heat map for each class are centres of objects."""

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import Centernet
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Indices,
    Outputs,
    best_of,
    corners_of,
    detections_of,
    output_of,
    sigmoid,
)
from pipelines.stages.decoders.expected import CLASSES, MAP_HEIGHT, MAP_WIDTH, Expected
from pipelines.stages.view import View


def centernet_outputs(config: Centernet, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `centernet`."""
    return (
        Expected("heatmap", config.heatmap, (1, CLASSES, MAP_HEIGHT, MAP_WIDTH)),
        Expected("sizes", config.sizes, (1, 2, MAP_HEIGHT, MAP_WIDTH)),
        Expected("offsets", config.offsets, (1, 2, MAP_HEIGHT, MAP_WIDTH)),
    )


def decode_centernet(outputs: Outputs, config: Centernet, view: View) -> Detections:
    """Return a box for each peak of 3x3 cells."""
    heat = output_of(outputs, config.heatmap)[0]
    if config.sigmoid:
        heat = sigmoid(heat)
    flat = heat.reshape(-1)
    places = np.flatnonzero(flat >= config.score_threshold)
    places = places[_is_peak(heat, places)]
    places = places[best_of(flat[places], config.score_threshold)]
    classes, rows, columns = np.unravel_index(places, heat.shape)
    sizes = output_of(outputs, config.sizes)[0][:, rows, columns].T
    offsets = output_of(outputs, config.offsets)[0][:, rows, columns].T
    cells = np.concatenate([np.stack([columns, rows], axis=1) + offsets, sizes], axis=1)
    stride = [view.input_width / heat.shape[2], view.input_height / heat.shape[1]] * 2
    return detections_of(
        corners_of(cells * np.array(stride, np.float32)),
        flat[places],
        classes,
        view,
        max_detections=config.max_detections,
    )[0]


def _is_peak(heat: NDArray[np.float32], places: Indices) -> NDArray[np.bool_]:
    """True for cells (flat indices) that no neighbour of 3x3 exceeds."""
    padded = np.pad(heat, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    classes, rows, columns = np.unravel_index(places, heat.shape)
    around = np.stack(
        [padded[classes, rows + row, columns + column] for row in range(3) for column in range(3)]
    )
    peaks: NDArray[np.bool_] = around[4] >= around.max(axis=0, initial=-np.inf)
    return peaks
