"""RetinaFace: offsets from square priors around the centre of each cell.

    centre = prior + o v0 side      size = side exp(o v1)      point = prior + o v0 side

Deng et al. 2019; layouts of the exports of biubug6's Pytorch_Retinaface.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.decode_config import RetinaFace
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Floats,
    Outputs,
    best_of,
    cells_of,
    corners_of,
    detections_of,
    keypoints_of,
    output_of,
    whole_pixels,
)
from pipelines.stages.decoders.expected import Expected
from pipelines.stages.decoders.grid import cell_count
from pipelines.stages.view import View

POINTS = 5


def retinaface_outputs(config: RetinaFace, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `retinaface`."""
    strides, priors = len(config.strides), len(config.priors)
    if priors % strides:
        raise PipelineError(
            f"[decode] of kind retinaface has {priors} priors for {strides} strides: give equally"
            " many for each stride, in its order."
        )
    cells = cell_count(config.strides, preprocess.width, preprocess.height)
    count = cells * (priors // strides)
    outputs = [
        Expected("boxes", config.boxes, (1, count, 4)),
        Expected("scores", config.scores, (1, count, 2)),
    ]
    if config.keypoints:
        outputs.append(Expected("keypoints", config.keypoints, (1, count, 2 * POINTS)))
    return tuple(outputs)


def decode_retinaface(outputs: Outputs, config: RetinaFace, view: View) -> Detections:
    """Return faces."""
    scores = output_of(outputs, config.scores)[0, :, 1]
    faces = best_of(scores, config.score_threshold)
    centres, sides = _priors(config.strides, config.priors, view.input_width, view.input_height)
    centre, side = centres[faces], sides[faces, None]
    offsets = output_of(outputs, config.boxes)[0, faces]
    place, scale = config.variances
    with np.errstate(over="ignore"):  # infinite sides are cut at the frame
        sizes = side * np.exp(offsets[:, 2:] * scale)
    boxes = np.concatenate([centre + offsets[:, :2] * place * side, sizes], axis=1)
    corners = corners_of(boxes)
    detections, kept = detections_of(
        corners,
        scores[faces],
        np.zeros(len(faces), np.int64),
        view,
        max_detections=config.max_detections,
        iou_threshold=config.iou_threshold,
        compared=whole_pixels(corners, view),
    )
    if not config.keypoints:
        return detections
    points = output_of(outputs, config.keypoints)[0, faces[kept]].reshape(-1, POINTS, 2)
    places = centre[kept, None] + points * place * side[kept, None]
    return replace(detections, keypoints=keypoints_of(places, None, view))


@lru_cache(maxsize=8)
def _priors(
    strides: tuple[int, ...], priors: tuple[int, ...], width: int, height: int
) -> tuple[Floats, Floats]:
    """Return centres [A, 2] and sides [A] in pixels. Shared: do not write to them."""
    each = len(priors) // len(strides)
    centres, strides_of = cells_of(strides, width, height, 0.5, each)
    by_stride = {
        stride: priors[level * each : (level + 1) * each] for level, stride in enumerate(strides)
    }
    sides = np.concatenate(
        [
            np.tile(
                np.asarray(by_stride[stride], np.float32), int(np.sum(strides_of == stride)) // each
            )
            for stride in strides
        ]
    )
    return centres, sides
