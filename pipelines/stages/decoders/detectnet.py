"""NVIDIA's DetectNet_v2 (PeopleNet, TrafficCamNet, DashCamNet): a coverage and a box per cell."""

import numpy as np

from pipelines.config import PreprocessConfig
from pipelines.decode_config import DetectnetV2
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import Outputs, best_of, detections_of, output_of
from pipelines.stages.decoders.expected import CLASSES, Expected, Size
from pipelines.stages.view import View

CENTRE_OFFSET = 0.5  # pixels


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
    return detections_of(
        boxes,
        coverage.reshape(-1)[places],
        classes,
        view,
        max_detections=config.max_detections,
        iou_threshold=config.iou_threshold,
    )[0]
