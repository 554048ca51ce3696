"""Anchor-free heads whose boxes are distances from the centre of each cell."""

import numpy as np

from pipelines.config import PreprocessConfig
from pipelines.decode_config import LtrbGrid
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Outputs,
    cells_of,
    choose_columns,
    detections_of,
    output_of,
)
from pipelines.stages.decoders.expected import CLASSES, Expected
from pipelines.stages.view import View


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
        view,
        max_detections=config.max_detections,
        iou_threshold=config.iou_threshold,
    )[0]
