"""[decode] of pipeline.toml: one table for each kind of decoder.

`kind` is the tag. `pipelines/stages/decoders/table.py` has a row for each: its outputs and its
function. A = cells or anchors, C = classes, K = keypoints, N = rows.
"""

from typing import Annotated, Literal, Union

from msgspec import Meta

from pipelines.value import Fraction, Positive, PositiveFloat, Value

Strides = Annotated[tuple[Positive, ...], Meta(min_length=1)]
Names = Annotated[tuple[str, ...], Meta(min_length=1)]
Unit = Literal["pixels", "fraction"]  # of the input; of its width and height
Background = Literal["none", "first", "last"]  # which score is that of no object
Column = Literal[
    "batch", "x1", "y1", "x2", "y2", "cx", "cy", "w", "h", "score", "class", "angle", "unused"
]
CORNERS: tuple[Column, ...] = ("x1", "y1", "x2", "y2", "score", "class")


class Scored(Value, frozen=True, kw_only=True, tag_field="kind"):
    """Base of decoders that give objects with boxes."""

    score_threshold: Fraction = 0.25
    max_detections: Positive = 100

    @property
    def max_iou(self) -> float | None:
        """How far boxes of a class may overlap; None: nothing is suppressed."""
        return None


class _Suppressed(Scored, frozen=True, kw_only=True, tag_field="kind"):
    """Base of decoders that suppress overlapping boxes."""

    iou_threshold: Fraction = 0.5

    @property
    def max_iou(self) -> float | None:
        return self.iou_threshold


class LtrbGrid(_Suppressed, frozen=True, kw_only=True, tag="ltrb_grid"):
    """Anchor-free head: `boxes` [1,4,A] = left, top, right, bottom distances from the centre of
    each cell in units of its stride; `scores` [1,C,A] = probabilities. Cells go level by level,
    row by row."""

    boxes: str
    scores: str
    strides: Strides
    score_threshold: Fraction = 0.35


class UltralyticsDetect(_Suppressed, frozen=True, kw_only=True, tag="ultralytics_detect"):
    """`output` [1,4+C,A]: centre, width and height in pixels, then a probability for each class."""

    output: str = "output0"
    iou_threshold: Fraction = 0.7


class UltralyticsSegment(_Suppressed, frozen=True, kw_only=True, tag="ultralytics_segment"):
    """As ultralytics_detect, then M mask coefficients: [1,4+C+M,A]; `masks` [1,M,h,w]."""

    output: str = "output0"
    masks: str = "output1"
    iou_threshold: Fraction = 0.7


class UltralyticsPose(_Suppressed, frozen=True, kw_only=True, tag="ultralytics_pose"):
    """As ultralytics_detect, then `keypoints` points of x, y and, if 3 values, a probability."""

    output: str = "output0"
    keypoints: Positive = 17
    keypoint_values: Literal[2, 3] = 3
    iou_threshold: Fraction = 0.7


class UltralyticsObb(_Suppressed, frozen=True, kw_only=True, tag="ultralytics_obb"):
    """As ultralytics_detect, then an angle in radians: [1,4+C+1,A]. Rotated boxes."""

    output: str = "output0"
    iou_threshold: Fraction = 0.7


class Rows(_Suppressed, frozen=True, kw_only=True, tag="rows"):
    """`output` [1,N,columns] or [N,columns]: a row for each object, best class only.

    Columns after the named ones are mask coefficients (`masks` names the prototypes) or
    `keypoints`. `suppress`: the rows still overlap.
    """

    output: str = "output0"
    columns: Annotated[tuple[Column, ...], Meta(min_length=6)] = CORNERS
    unit: Unit = "pixels"
    suppress: bool = False
    masks: str = ""
    keypoints: Annotated[int, Meta(ge=0)] = 0
    keypoint_values: Literal[2, 3] = 3

    @property
    def max_iou(self) -> float | None:
        """The overlap above which the lower score goes; None: rows do not overlap."""
        return self.iou_threshold if self.suppress else None


class ClassRows(_Suppressed, frozen=True, kw_only=True, tag="class_rows"):
    """`output` [1,N,4+C]: a box, then a probability for each class. `suppress`: the rows still
    overlap. RT-DETR of Ultralytics to 8.4.0, PP-YOLOE."""

    output: str = "output0"
    format: Literal["corners", "centre"] = "centre"
    unit: Unit = "fraction"
    suppress: bool = False

    @property
    def max_iou(self) -> float | None:
        """The overlap above which the lower score goes; None: rows do not overlap."""
        return self.iou_threshold if self.suppress else None


class Yolov5(_Suppressed, frozen=True, kw_only=True, tag="yolov5"):
    """`output` [1,A,5+C]: centre, width and height in pixels, objectness, class probabilities;
    with `masks` [1,M,h,w] also M coefficients. YOLOv5, YOLOv6 and YOLOv7."""

    output: str = "output0"
    masks: str = ""
    iou_threshold: Fraction = 0.45


class Yolox(_Suppressed, frozen=True, kw_only=True, tag="yolox"):
    """`output` [1,A,5+C] as yolov5, but the box is raw, unless it was decoded in the graph:
    centre = (p + cell) * stride, size = exp(p) * stride."""

    output: str = "output"
    strides: Strides = (8, 16, 32)
    decoded: bool = False
    iou_threshold: Fraction = 0.45


class YoloAnchors(_Suppressed, frozen=True, kw_only=True, tag="yolo_anchors"):
    """Raw heads of YOLOv5 and YOLOv7: for each stride an output [1,3,h,w,5+C] of logits.

    centre = (2 s - 0.5 + cell) * stride, size = (2 s)^2 * anchor, s the sigmoid. `anchors`: width
    and height in pixels of the input, three for each stride; the default is that of YOLOv7.
    """

    outputs: Names
    strides: Strides = (8, 16, 32)
    anchors: tuple[tuple[PositiveFloat, PositiveFloat], ...] = (
        *((12, 16), (19, 36), (40, 28)),
        *((36, 75), (76, 55), (72, 146)),
        *((142, 110), (192, 243), (459, 401)),
    )
    iou_threshold: Fraction = 0.45


class BoxesScores(_Suppressed, frozen=True, kw_only=True, tag="boxes_scores"):
    """`boxes` [1,A,4] and `scores` [1,A,C], probabilities, before suppression.

    `class_axis` 1: scores are [1,C,A]. `background`: the score that is of no class of labels.txt.
    """

    boxes: str = "boxes"
    scores: str = "scores"
    format: Literal["corners", "centre"] = "corners"
    unit: Unit = "pixels"
    background: Background = "none"
    class_axis: Literal[1, 2] = 2


class Finished(Scored, frozen=True, kw_only=True, tag="finished"):
    """`boxes` [1,N,4], `scores` [1,N] and `classes` [1,N] after suppression, or without the 1.

    `count` names the number of rows that are valid. `first_class`: the number of the first label.
    `masks` [N,1,h,w]: probabilities over the whole input. `keypoints` [N,K,3]: x, y, visibility.
    """

    boxes: str = "det_boxes"
    scores: str = "det_scores"
    classes: str = "det_classes"
    count: str = ""
    format: Literal["corners", "corners_y_first"] = "corners"
    unit: Unit = "pixels"
    first_class: Literal[0, 1] = 0
    masks: str = ""
    keypoints: str = ""
    size_input: str = ""  # a second input [1,2] int64 that takes width and height


class BoxScoreRows(Scored, frozen=True, kw_only=True, tag="box_score_rows"):
    """`boxes` [1,N,5]: x1, y1, x2, y2, score; `classes` [1,N]. After suppression (mmdeploy)."""

    boxes: str = "dets"
    classes: str = "labels"


class Detr(Scored, frozen=True, kw_only=True, tag="detr"):
    """`logits` [1,N,C] and `boxes` [1,N,4]: centre, width and height as fractions of the input.

    `activation`: "sigmoid" scores every class of a query, "softmax" takes its best one.
    `background`: the logit that is of no class of labels.txt. `masks` [1,N,h,w]: logits.
    """

    logits: str = "logits"
    boxes: str = "pred_boxes"
    activation: Literal["sigmoid", "softmax"] = "sigmoid"
    background: Background = "none"
    masks: str = ""
    score_threshold: Fraction = 0.5


class DetectnetV2(_Suppressed, frozen=True, kw_only=True, tag="detectnet_v2"):
    """`coverage` [1,C,h,w] and `boxes` [1,4C,h,w]: distances from the centre of each cell in units
    of `box_norm` pixels; a cell's centre is `stride` * index + 0.5."""

    coverage: str = "output_cov/Sigmoid"
    boxes: str = "output_bbox/BiasAdd"
    stride: Positive = 16
    box_norm: PositiveFloat = 35.0
    score_threshold: Fraction = 0.4


class Centernet(Scored, frozen=True, kw_only=True, tag="centernet"):
    """`heatmap` [1,C,h,w] (logits), `sizes` and `offsets` [1,2,h,w] in cells: peaks of 3x3."""

    heatmap: str = "hm"
    sizes: str = "wh"
    offsets: str = "reg"
    sigmoid: bool = True


class Yunet(_Suppressed, frozen=True, kw_only=True, tag="yunet"):
    """Faces with 5 points: outputs cls_8 [1,A,1], obj_8 [1,A,1], bbox_8 [1,A,4], kps_8 [1,A,10],
    and so for each stride; score = sqrt(cls * obj)."""

    strides: Strides = (8, 16, 32)
    score_threshold: Fraction = 0.6
    iou_threshold: Fraction = 0.3


class Scrfd(_Suppressed, frozen=True, kw_only=True, tag="scrfd"):
    """Faces: for each stride `scores` [2A,1], `boxes` [2A,4] and `keypoints` [2A,10]; two anchors a
    cell, distances and points from its corner in units of the stride."""

    scores: Names
    boxes: Names
    keypoints: tuple[str, ...] = ()
    strides: Strides = (8, 16, 32)
    score_threshold: Fraction = 0.5
    iou_threshold: Fraction = 0.4


class RetinaFace(_Suppressed, frozen=True, kw_only=True, tag="retinaface"):
    """Faces with 5 points: `boxes` [1,A,4], `scores` [1,A,2] probabilities, of which the second is
    of a face, `keypoints` [1,A,10]. Two priors a cell of each stride, squares of `priors` pixels;
    offsets are multiplied by `variances`."""

    boxes: str
    scores: str
    keypoints: str = ""
    strides: Strides = (8, 16, 32)
    priors: Annotated[tuple[Positive, ...], Meta(min_length=2)] = (16, 32, 64, 128, 256, 512)
    variances: tuple[PositiveFloat, PositiveFloat] = (0.1, 0.2)
    score_threshold: Fraction = 0.5
    iou_threshold: Fraction = 0.4


class Blazeface(_Suppressed, frozen=True, kw_only=True, tag="blazeface"):
    """Faces with 6 points: `boxes` [1,A,16], centre, sides and points in pixels from the centre of
    a cell, `scores` [1,A,1] logits. `anchors`: how many a cell of each stride has."""

    boxes: str = "regressors"
    scores: str = "classificators"
    strides: Strides = (8, 16)
    anchors: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (2, 6)
    score_threshold: Fraction = 0.5
    iou_threshold: Fraction = 0.3

    @property
    def max_iou(self) -> None:
        """None: the decoder itself merges overlapping faces."""


class Movenet(Scored, frozen=True, kw_only=True, tag="movenet"):
    """`output` [1,1,17,3]: y, x and score of each point as fractions; one person."""

    output: str = "output_0"


class Simcc(Scored, frozen=True, kw_only=True, tag="simcc"):
    """`x` [1,K,W] and `y` [1,K,H]: a score for each of `split` steps a pixel; one person."""

    x: str = "simcc_x"
    y: str = "simcc_y"
    split: PositiveFloat = 2.0


class Heatmaps(Scored, frozen=True, kw_only=True, tag="heatmaps"):
    """`output` [1,K,h,w]: a heat map for each point, whose peak is it; one person."""

    output: str = "heatmaps"


class Classification(Value, frozen=True, kw_only=True, tag="classification", tag_field="kind"):
    """`scores` [1,C]: the `top` best classes; softmax is applied unless the model did."""

    scores: str
    softmax: bool = True
    top: Positive = 5


class Segmentation(Value, frozen=True, kw_only=True, tag="segmentation", tag_field="kind"):
    """The class of each point. `values`: "logits" [1,C,h,w], or [1,h,w,C] with `layout` "nhwc": the
    best class; "binary" [1,1,h,w]: class 1 above `threshold`; "classes" [1,h,w]: integers.

    `full_size`: logits are enlarged to the input's size first.
    """

    output: str
    values: Literal["logits", "binary", "classes"] = "logits"
    layout: Literal["nchw", "nhwc"] = "nchw"
    threshold: float = 0.5
    full_size: bool = False


class Depth(Value, frozen=True, kw_only=True, tag="depth", tag_field="kind"):
    """`output` [1,h,w] or [1,1,h,w]: relative inverse depth, or metres if `metric`."""

    output: str = "predicted_depth"
    metric: bool = False


class TextDetection(Scored, frozen=True, kw_only=True, tag="text_detection"):
    """`output` [1,1,h,w]: the probability of text at each point (DB). Regions above `threshold`
    whose mean is above `score_threshold` become rotated boxes, grown by `unclip`."""

    output: str
    threshold: Fraction = 0.3
    unclip: Annotated[float, Meta(ge=1.0)] = 1.6
    score_threshold: Fraction = 0.5


class TextRecognition(Value, frozen=True, kw_only=True, tag="text_recognition", tag_field="kind"):
    """`output` [1,T,1+C]: probabilities of blank and of each character, CTC; labels.txt has the
    characters. `space`: one more class, at the end, is the space."""

    output: str
    space: bool = True
    score_threshold: Fraction = 0.5


DecodeConfig = Union[  # noqa: UP007  (read by msgspec on 3.10)
    LtrbGrid,
    UltralyticsDetect,
    UltralyticsSegment,
    UltralyticsPose,
    UltralyticsObb,
    Rows,
    ClassRows,
    Yolov5,
    Yolox,
    YoloAnchors,
    BoxesScores,
    Finished,
    BoxScoreRows,
    Detr,
    DetectnetV2,
    Centernet,
    Yunet,
    Scrfd,
    RetinaFace,
    Blazeface,
    Movenet,
    Simcc,
    Heatmaps,
    Classification,
    Segmentation,
    Depth,
    TextDetection,
    TextRecognition,
]

# These say something of the whole frame: there are no boxes to follow.
BOXLESS = (Classification, Segmentation, Depth, TextRecognition)
