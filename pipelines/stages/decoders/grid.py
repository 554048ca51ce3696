"""Heads without anchors, whose cells each say a box: distances from the centre of the cell (also
NVIDIA's DetectNet_v2: PeopleNet, TrafficCamNet, DashCamNet), or CenterNet's peaks of a heat map.
"""

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import Centernet, DetectnetV2, LtrbGrid
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Indices,
    Outputs,
    best_of,
    cells_of,
    choose_columns,
    corners_of,
    detections_of,
    output_of,
    sigmoid,
)
from pipelines.stages.decoders.expected import CLASSES, MAP_HEIGHT, MAP_WIDTH, Expected, Size
from pipelines.stages.view import View

CENTRE_OFFSET = 0.5  # pixels; of DetectNet


def cell_count(strides: tuple[int, ...], input_width: int, input_height: int) -> int:
    """Return A, the number of cells of all levels together."""
    return sum(-(-input_width // side) * -(-input_height // side) for side in strides)


def ltrb_grid_outputs(config: LtrbGrid, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `ltrb_grid`."""
    cells = cell_count(config.strides, preprocess.width, preprocess.height)
    return (
        Expected("boxes", config.boxes, (1, 4, cells)),
        Expected("scores", config.scores, (1, CLASSES, cells)),
    )


def decode_ltrb_grid(outputs: Outputs, config: LtrbGrid, view: View) -> Detections:
    """Decode the best cells, then suppress."""
    scores = output_of(outputs, config.scores)[0]  # [C, A]
    distances = output_of(outputs, config.boxes)[0]  # [4, A]
    points, strides = cells_of(config.strides, view.input_width, view.input_height)
    chosen = choose_columns(scores, config.score_threshold)
    sides = distances[:, chosen.cells].T * strides[chosen.cells, None]
    centres = points[chosen.cells]
    return detections_of(
        np.concatenate([centres - sides[:, :2], centres + sides[:, 2:]], axis=1),
        chosen.scores,
        chosen.class_ids,
        config,
        view,
    )[0]


def detectnet_outputs(config: DetectnetV2, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `detectnet_v2`."""
    rows, columns = preprocess.height // config.stride, preprocess.width // config.stride
    return (
        Expected("coverage", config.coverage, (1, CLASSES, rows, columns)),
        Expected("boxes", config.boxes, (1, Size((CLASSES,), times=4), rows, columns)),
    )


def decode_detectnet(outputs: Outputs, config: DetectnetV2, view: View) -> Detections:
    """Return the boxes of the cells above the threshold; every class has boxes of its own."""
    coverage = output_of(outputs, config.coverage)[0]
    distances = output_of(outputs, config.boxes)[0]
    places = best_of(coverage.reshape(-1), config.score_threshold)
    classes, rows, columns = np.unravel_index(places, coverage.shape)
    channels = classes[:, None] * 4 + np.arange(4)
    sides = distances[channels, rows[:, None], columns[:, None]] * config.box_norm  # [M, 4]
    centres = np.stack([columns, rows], axis=1) * float(config.stride) + CENTRE_OFFSET
    boxes = np.concatenate([centres - sides[:, :2], centres + sides[:, 2:]], axis=1)
    # DeepStream's parser cuts boxes at the input's last pixel, and counts it, before it suppresses.
    boxes = np.clip(boxes, 0.0, [view.input_width - 1.0, view.input_height - 1.0] * 2)
    boxes[:, 2:] += 1.0
    return detections_of(boxes, coverage.reshape(-1)[places], classes, config, view)[0]


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
        corners_of(cells * np.array(stride, np.float32)), flat[places], classes, config, view
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
