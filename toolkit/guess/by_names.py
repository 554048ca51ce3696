"""Families whose outputs have names of their own."""

from msgspec import structs

from pipelines.decode_config import (
    BoxesScores,
    BoxScoreRows,
    Centernet,
    DecodeConfig,
    Depth,
    DetectnetV2,
    Detr,
    Finished,
    Heatmaps,
    LtrbGrid,
    Simcc,
    Yunet,
)
from pipelines.stages.decoders.grid import cell_count
from toolkit.guess.facts import ModelFacts
from toolkit.guess.proposal import Candidate

LTRB_STRIDES = (8, 16, 32)
ULTRAFACE_ANCHORS = (4420, 17640)
JETSON_SSD_ANCHORS = 3000
_COLOUR = "the file does not show the colour order and the numbers: these are the family's"


def efficient_nms(facts: ModelFacts) -> tuple[Candidate, ...]:
    """num_dets, det_boxes, det_scores, det_classes: TensorRT's EfficientNMS plugin."""
    if not _has(facts, "num_dets", "det_boxes", "det_scores", "det_classes"):
        return ()
    why = "outputs num_dets, det_boxes, det_scores, det_classes: EfficientNMS"
    return (Candidate(Finished(count="num_dets"), "letterbox", why, (_COLOUR,)),)


def yolo_nas(facts: ModelFacts) -> tuple[Candidate, ...]:
    """num_predictions, pred_boxes, pred_scores, pred_classes, with any prefix."""
    ends = ("num_predictions", "pred_boxes", "pred_scores", "pred_classes")
    names = [next((o.name for o in facts.outputs if o.name.endswith(end)), "") for end in ends]
    if not all(names):
        return ()
    decode = Finished(count=names[0], boxes=names[1], scores=names[2], classes=names[3])
    why = "outputs num_predictions and pred_*: YOLO-NAS"
    note = "YOLO-NAS fits the longest side to 636 of 640; a letterbox of 640 is close"
    return (Candidate(decode, "letterbox", why, (note,)),)


def detection_boxes(facts: ModelFacts) -> tuple[Candidate, ...]:
    """TensorFlow's Object Detection API, and TAO EfficientDet: y before x."""
    boxes = facts.output("detection_boxes")
    if boxes is None:
        return ()
    scores, classes, count = (
        facts.output(name) for name in ("detection_scores", "detection_classes", "num_detections")
    )
    if scores is None or classes is None:
        return ()
    tao = classes.dtype.startswith("int")
    decode = Finished(
        boxes=boxes.name,
        scores=scores.name,
        classes=classes.name,
        count=count.name if count is not None else "",
        format="corners_y_first",
        unit="pixels" if tao else "fraction",
        first_class=0 if tao else 1,
    )
    family = "TAO EfficientDet (integer classes)" if tao else "TensorFlow's Object Detection API"
    why = f"output detection_boxes: {family}"
    return (Candidate(decode, "rgb-bytes", why, (_COLOUR,)),)


def queries(facts: ModelFacts) -> tuple[Candidate, ...]:
    """pred_boxes with logits: DETR and its kin, whatever the number of queries.

    DETR, YOLOS and Table Transformer score by a softmax whose last class is no object, and their
    boxes are the sigmoid of a layer. The others score by a sigmoid, and add a reference to what
    their layer gives (conditional and DAB-DETR) or sample around it (`GridSample`).
    """
    boxes = facts.output("pred_boxes")
    logits = facts.output("logits") or facts.output("pred_logits")
    if boxes is None or logits is None or any(i.name == "input_ids" for i in facts.inputs):
        return ()  # with a text as an input, classes are what it says
    outputs = f"outputs {logits.name} and pred_boxes"
    softmax = Candidate(
        Detr(logits=logits.name, boxes=boxes.name, activation="softmax", background="last"),
        "imagenet",
        f"{outputs}, boxes straight from a layer: DETR, whose last class is no object",
    )
    sigmoid = Detr(logits=logits.name, boxes=boxes.name)
    conditional = Candidate(
        sigmoid, "imagenet", f"{outputs}, boxes relative to references: conditional or DAB-DETR"
    )
    if not facts.operators:  # an engine
        return (softmax, conditional, *_sampled(facts, sigmoid, outputs))
    if "GridSample" in facts.operators:
        return _sampled(facts, sigmoid, f"{outputs}, GridSample in the graph")
    producer = facts.producers.get(boxes.name)
    if producer is not None and producer.op == "Sigmoid" and producer.of_layer:
        return (softmax,)
    known = facts.has_weights("class_labels_classifier", "class_embed", "bbox_predictor")
    return (conditional,) if known else (conditional, softmax)


def _sampled(facts: ModelFacts, sigmoid: Detr, outputs: str) -> tuple[Candidate, ...]:
    """The readings of DETRs that sample around references."""
    stretch = Candidate(sigmoid, "stretch", f"{outputs}: RT-DETR, D-FINE")
    deformable = Candidate(sigmoid, "imagenet", f"{outputs}: deformable DETR, LW-DETR")
    if sigmoid.logits.startswith("pred_logits"):
        tao = Candidate(
            structs.replace(sigmoid, background="first"),
            "imagenet",
            f"{outputs}: DETR or DINO of TAO, whose first class is no object",
        )
        # TAO's exports call their input "inputs"; the papers' code has other names.
        return (tao,) if facts.image.name == "inputs" else (tao, deformable)
    if facts.has_weights("encoder_input_proj", "enc_score_head", "enc_bbox_head"):
        return (stretch,)
    if facts.has_weights("input_proj.0.0", "query_position_embeddings"):  # no hybrid encoder
        return (deformable,)
    return (stretch, deformable)


def labels_boxes_scores(facts: ModelFacts) -> tuple[Candidate, ...]:
    """labels, boxes, scores with the second input orig_target_sizes: RT-DETR, D-FINE."""
    second = next((i.name for i in facts.inputs if i.name == "orig_target_sizes"), "")
    if not second or not _has(facts, "labels", "boxes", "scores"):
        return ()
    decode = Finished(boxes="boxes", scores="scores", classes="labels", size_input=second)
    why = "input orig_target_sizes with outputs labels, boxes, scores: RT-DETR, D-FINE"
    return (Candidate(decode, "stretch", why),)


def dets_labels(facts: ModelFacts) -> tuple[Candidate, ...]:
    """dets and labels: mmdeploy if the labels are integers, RF-DETR if they are logits."""
    dets, labels = facts.output("dets"), facts.output("labels")
    if dets is None or labels is None:
        return ()
    if labels.dtype.startswith("int"):
        why = "outputs dets and integer labels: mmdeploy"
        return (Candidate(BoxScoreRows(), "mmdet", why, (_COLOUR,)),)
    masks = facts.output("masks")
    decode = Detr(
        logits="labels", boxes="dets", background="last", masks=masks.name if masks else ""
    )
    note = "a checkpoint may have no class for the background: then set background to none"
    return (Candidate(decode, "imagenet", "outputs dets and float labels: RF-DETR", (note,)),)


def ltrb(facts: ModelFacts) -> tuple[Candidate, ...]:
    """boxes [1, 4, A] and scores [1, C, A]: Tandem's own head."""
    boxes, scores = facts.output("boxes"), facts.output("scores")
    if boxes is None or scores is None or boxes.shape[:2] != (1, 4):
        return ()
    height, width = facts.size
    if boxes.shape[2:] != (cell_count(LTRB_STRIDES, width, height),):
        return ()
    decode = LtrbGrid(boxes="boxes", scores="scores", strides=LTRB_STRIDES)
    why = f"outputs boxes [1, 4, {boxes.shape[2]}] and scores: distances from every cell"
    return (Candidate(decode, "letterbox", why),)


def scores_boxes(facts: ModelFacts) -> tuple[Candidate, ...]:
    """scores and boxes beside each other: UltraFace, and SSD of jetson-inference."""
    scores, boxes = facts.output("scores"), facts.output("boxes")
    if scores is None or boxes is None or len(scores.shape) != 3:
        return ()
    anchors, classes = scores.shape[1:]
    decode = BoxesScores(boxes=boxes.name, scores=scores.name, unit="fraction", background="first")
    if classes == 2 and anchors in ULTRAFACE_ANCHORS:
        producer = facts.producers.get(boxes.name)
        before = producer.before if producer is not None else ()
        if "Reshape" in before:  # decoded boxes are joined from differences: Sub
            return ()
        why = f"outputs scores and boxes, 2 classes of {anchors} anchors: UltraFace"
        return (Candidate(decode, "ultraface", why),)
    why = "outputs scores and boxes: SSD of jetson-inference, class 0 is the background"
    known = anchors == JETSON_SSD_ANCHORS and facts.size == (300, 300)
    return (Candidate(decode, "signed", why, (_COLOUR,), sure=known),)


def coverage(facts: ModelFacts) -> tuple[Candidate, ...]:
    """output_cov and output_bbox: DetectNet_v2."""
    cover = next((o.name for o in facts.outputs if o.name.startswith("output_cov")), "")
    boxes = next((o.name for o in facts.outputs if o.name.startswith("output_bbox")), "")
    if not cover or not boxes:
        return ()
    decode = DetectnetV2(coverage=cover, boxes=boxes)
    return (Candidate(decode, "stretch", "outputs output_cov and output_bbox: DetectNet_v2"),)


def yunet(facts: ModelFacts) -> tuple[Candidate, ...]:
    """cls_8, obj_8, bbox_8, kps_8: YuNet."""
    if not _has(facts, "cls_8", "obj_8", "bbox_8", "kps_8"):
        return ()
    return (Candidate(Yunet(), "bgr-bytes", "outputs cls_8, obj_8, bbox_8, kps_8: YuNet"),)


_ALONE: tuple[tuple[tuple[str, ...], DecodeConfig, str, str], ...] = (
    (("simcc_x", "simcc_y"), Simcc(), "imagenet", "RTMPose"),
    (("hm", "wh", "reg"), Centernet(), "centernet", "CenterNet"),
    (("predicted_depth",), Depth(), "imagenet", "a relative depth model"),
    (("heatmaps",), Heatmaps(), "imagenet", "heat maps of a pose"),
)


def names_alone(facts: ModelFacts) -> tuple[Candidate, ...]:
    """Outputs whose names no other family has."""
    for names, decode, recipe, family in _ALONE:
        if _has(facts, *names):
            return (Candidate(decode, recipe, f"outputs {', '.join(names)}: {family}"),)
    return ()


def _has(facts: ModelFacts, *names: str) -> bool:
    have = {output.name for output in facts.outputs}
    return have.issuperset(names)
