"""The table of decoders: a kind of [decode], the outputs that it takes, and its function.

A new decoder is a struct in `pipelines/decode_config.py`, a row here, and its two functions in a
file of this folder (CONTRIBUTING.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipelines.config import PreprocessConfig
from pipelines.decode_config import (
    Blazeface,
    BoxesScores,
    BoxScoreRows,
    Centernet,
    Classification,
    ClassRows,
    DecodeConfig,
    Depth,
    DetectnetV2,
    Detr,
    Finished,
    Heatmaps,
    LtrbGrid,
    Movenet,
    RetinaFace,
    Rows,
    Scrfd,
    Segmentation,
    Simcc,
    TextDetection,
    TextRecognition,
    UltralyticsDetect,
    UltralyticsObb,
    UltralyticsPose,
    UltralyticsSegment,
    YoloAnchors,
    Yolov5,
    Yolox,
    Yunet,
)
from pipelines.results import Decoded
from pipelines.stages.decoders import (
    boxes_scores,
    detr,
    faces,
    finished,
    grid,
    maps,
    poses,
    rows,
    text,
    ultralytics,
    yolo,
)
from pipelines.stages.decoders.candidates import Outputs
from pipelines.stages.decoders.expected import Expected
from pipelines.stages.view import View


@dataclass(frozen=True, slots=True)
class Decoder:
    """A row: `outputs` says what a configuration expects; `decode` is its function; `example`, with
    any names, stands for the kind where an engine's outputs are matched with decoders."""

    outputs: Callable[[Any, PreprocessConfig], tuple[Expected, ...]]
    decode: Callable[[Outputs, Any, View], Decoded]
    example: DecodeConfig

    @property
    def kind(self) -> str:
        """`kind` in pipeline.toml."""
        return str(self.example.__struct_config__.tag)


_SCRFD = Scrfd(scores=("a", "b", "c"), boxes=("d", "e", "f"), keypoints=("g", "h", "i"))

# fmt: off
ROWS: tuple[Decoder, ...] = (
    Decoder(grid.ltrb_grid_outputs, grid.decode_ltrb_grid,
            LtrbGrid(boxes="a", scores="b", strides=(8, 16, 32))),
    Decoder(ultralytics.detect_outputs, ultralytics.decode_detect, UltralyticsDetect()),
    Decoder(ultralytics.segment_outputs, ultralytics.decode_segment, UltralyticsSegment()),
    Decoder(ultralytics.pose_outputs, ultralytics.decode_pose, UltralyticsPose()),
    Decoder(ultralytics.obb_outputs, ultralytics.decode_obb, UltralyticsObb()),
    Decoder(rows.rows_outputs, rows.decode_rows, Rows()),
    Decoder(rows.class_rows_outputs, rows.decode_class_rows, ClassRows()),
    Decoder(yolo.yolov5_outputs, yolo.decode_yolov5, Yolov5()),
    Decoder(yolo.yolox_outputs, yolo.decode_yolox, Yolox()),
    Decoder(yolo.yolo_anchors_outputs, yolo.decode_yolo_anchors,
            YoloAnchors(outputs=("a", "b", "c"))),
    Decoder(boxes_scores.boxes_scores_outputs, boxes_scores.decode_boxes_scores, BoxesScores()),
    Decoder(finished.finished_outputs, finished.decode_finished, Finished()),
    Decoder(finished.box_score_rows_outputs, finished.decode_box_score_rows, BoxScoreRows()),
    Decoder(detr.detr_outputs, detr.decode_detr, Detr()),
    Decoder(grid.detectnet_outputs, grid.decode_detectnet, DetectnetV2()),
    Decoder(grid.centernet_outputs, grid.decode_centernet, Centernet()),
    Decoder(faces.yunet_outputs, faces.decode_yunet, Yunet()),
    Decoder(faces.scrfd_outputs, faces.decode_scrfd, _SCRFD),
    Decoder(faces.retinaface_outputs, faces.decode_retinaface,
            RetinaFace(boxes="a", scores="b", keypoints="c")),
    Decoder(faces.blazeface_outputs, faces.decode_blazeface, Blazeface()),
    Decoder(poses.movenet_outputs, poses.decode_movenet, Movenet()),
    Decoder(poses.simcc_outputs, poses.decode_simcc, Simcc()),
    Decoder(poses.heatmaps_outputs, poses.decode_heatmaps, Heatmaps()),
    Decoder(maps.classification_outputs, maps.decode_classification,
            Classification(scores="a")),
    Decoder(maps.segmentation_outputs, maps.decode_segmentation, Segmentation(output="a")),
    Decoder(maps.depth_outputs, maps.decode_depth, Depth()),
    Decoder(text.text_detection_outputs, text.decode_text_detection, TextDetection(output="a")),
    Decoder(text.text_recognition_outputs, text.decode_text_recognition,
            TextRecognition(output="a")),
)
# fmt: on

DECODERS: dict[type[DecodeConfig], Decoder] = {type(row.example): row for row in ROWS}
