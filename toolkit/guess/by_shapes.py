"""Families that only the shapes of outputs tell apart; shapes do not show colours and numbers."""

from dataclasses import replace

from device.engine.manifest import TensorInfo
from pipelines.decode_config import (
    Blazeface,
    Classification,
    Column,
    Depth,
    Finished,
    Heatmaps,
    Movenet,
    RetinaFace,
    Rows,
    Scrfd,
    Segmentation,
    TextDetection,
    TextRecognition,
    UltralyticsDetect,
    YoloAnchors,
    Yolov5,
    Yolox,
)
from pipelines.stages.decoders.faces import anchor_count
from pipelines.stages.decoders.grid import cell_count
from toolkit.guess.facts import ModelFacts
from toolkit.guess.names import class_names
from toolkit.guess.proposal import Candidate

STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))
ANCHORS = 3  # per cell of a YOLO with anchors
COCO_CLASSES = 80
POINT_COLUMNS = (16, 57)  # YOLOv5-face, YOLOv7-pose
CLASS_COUNTS = (1000, 1001, 11821, 21841, 21843)
"""Of ImageNet and its supersets: no embedding and no list of points has so many elements."""
CLASS_NAMES = ("logit", "prob", "softmax", "class", "label")  # words of outputs
MAP_NAMES = (*CLASS_NAMES, "seg", "mask")
DEPTH_NAMES = ("depth", "disp")
TEXT_HEIGHTS = (32, 48)
TEXT_SIZE = (48, 320)  # of one whose size is dynamic
SCRFD_COLUMNS = (1, 4, 10)
_COLOUR = "the file does not show the colour order and the numbers"
_TIMM = "timm's mean and std vary by model, and the file does not hold them"


def cells(facts: ModelFacts) -> tuple[int, ...]:
    """Return A for each usual set of strides."""
    height, width = facts.size
    return tuple(cell_count(strides, width, height) for strides in STRIDES)


def channels_first(facts: ModelFacts) -> tuple[Candidate, ...]:
    """[1, 4+C, A]: a raw head as Ultralytics makes it, without its metadata."""
    output = _single(facts, 3)
    if output is None or output.shape[2] not in cells(facts) or not _more(output.shape[1], 4):
        return ()
    why = f"one output [1, {output.shape[1]}, {output.shape[2]}]: channels before all cells"
    note = "without metadata the task is not known: classes and extras share the channels"
    producer = facts.producers.get(output.name)
    # Key points and angles are joined to what is joined already, boxes and scores.
    detects = (
        producer is not None and producer.op == "Concat" and producer.before[-1:] == ("Sigmoid",)
    )
    known = detects or output.shape[1] == 4 + COCO_CLASSES or _named_classes(facts, output, 1, 4)
    decode = UltralyticsDetect(output=output.name)
    return (Candidate(decode, "letterbox", why, (note,), sure=known),)


def anchor_rows(facts: ModelFacts) -> tuple[Candidate, ...]:
    """[1, 3A, 5+C]: YOLOv5 and YOLOv7."""
    output = _single(facts, 3, others=4)
    if output is None or not _more(output.shape[2], 5):
        return ()
    if output.shape[1] not in [ANCHORS * count for count in cells(facts)]:
        return ()
    masks = next((o.name for o in facts.outputs if len(o.shape) == 4), "")
    why = f"output [1, {output.shape[1]}, {output.shape[2]}]: three anchors a cell, YOLOv5 or v7"
    # Faces and poses have as many columns as detectors of some number of classes.
    known = output.shape[2] not in POINT_COLUMNS or _named_classes(facts, output, 2, 5)
    decode = Yolov5(output=output.name, masks=masks)
    return (Candidate(decode, "letterbox", why, sure=known),)


def six_columns(facts: ModelFacts) -> tuple[Candidate, ...]:
    """[1, A, 6]: rows of DeepStream-Yolo's exporters, or a YOLOX of one class."""
    output = _single(facts, 3)
    if output is None or output.shape[2] != 6 or output.shape[1] not in cells(facts):
        return ()
    shape = f"one output [1, {output.shape[1]}, 6]"
    return (
        Candidate(Rows(output=output.name, suppress=True), "letterbox",
                  f"{shape}: DeepStream-Yolo's rows x1, y1, x2, y2, score, class"),
        Candidate(Yolox(output=output.name), "yolox", f"{shape}: YOLOX of one class"),
    )  # fmt: skip


def cell_rows(facts: ModelFacts) -> tuple[Candidate, ...]:
    """[1, A, 5+C]: YOLOv6 (`outputs`) or YOLOX (`output`, raw or decoded)."""
    output = _single(facts, 3)
    if output is None or output.shape[1] not in cells(facts) or not _more(output.shape[2], 5):
        return ()
    shape = f"one output {output.name!r} [1, {output.shape[1]}, {output.shape[2]}]"
    if output.name == "outputs":
        decode = Yolov5(output=output.name)
        return (Candidate(decode, "letterbox", f"{shape}: YOLOv6, read as YOLOv5"),)
    raw = Yolox(output=output.name)
    decoded = Yolox(output=output.name, decoded=True)
    if not facts.operators:
        return (
            Candidate(raw, "yolox", f"{shape}: YOLOX, boxes raw"),
            Candidate(decoded, "yolox", f"{shape}: YOLOX, boxes decoded"),
        )
    # Its export with boxes in pixels multiplies them by their strides, and joins them at the end.
    if "Exp" in facts.operators:
        why = f"{shape}, Exp in the graph: YOLOX, boxes decoded"
        return (Candidate(decoded, "yolox", why),)
    return (Candidate(raw, "yolox", f"{shape}, no Exp in the graph: YOLOX, raw"),)


def finished_rows(facts: ModelFacts) -> tuple[Candidate, ...]:
    """[1, 300, 6]: NMS-free rows without metadata (YOLOv10, DETR of DeepStream-Yolo)."""
    output = _single(facts, 3)
    if output is None or output.shape[1:] != (300, 6):
        return ()
    why = "one output [1, 300, 6]: x1, y1, x2, y2, score, class without suppression"
    # RT-DETR of Ultralytics, without its metadata, has centres in fractions.
    sampled = "GridSample" in facts.operators
    return (Candidate(Rows(output=output.name), "letterbox", why, sure=not sampled),)


def seven_columns(facts: ModelFacts) -> tuple[Candidate, ...]:
    """[n, 7]: YOLOv7 with NMS (class before score) or YOLO-NAS flat (score before class)."""
    output = _single(facts, 2)
    producer = facts.producers.get(output.name) if output is not None else None
    layer = producer is not None and (producer.of_layer or producer.op == "Softmax")
    if output is None or output.shape[1] != 7 or layer:  # a layer's are seven classes
        return ()
    corners: tuple[Column, ...] = ("batch", "x1", "y1", "x2", "y2")
    return (
        Candidate(Rows(output=output.name, columns=(*corners, "class", "score")), "letterbox",
                  "one output [n, 7]: YOLOv7 with NMS, class before score"),
        Candidate(Rows(output=output.name, columns=(*corners, "score", "class")), "letterbox",
                  "one output [n, 7]: YOLO-NAS, score before class"),
    )  # fmt: skip


def scrfd(facts: ModelFacts) -> tuple[Candidate, ...]:
    """Nine or six outputs of 1, 4 and 10 columns: SCRFD, largest level first."""
    groups = {
        columns: [output for output in facts.outputs if output.shape[-1:] == (columns,)]
        for columns in SCRFD_COLUMNS
    }
    counts = [len(group) for group in groups.values()]
    if counts not in ([3, 3, 3], [3, 3, 0]) or len(facts.outputs) != sum(counts):
        return ()
    scores, boxes, points = (tuple(output.name for output in group) for group in groups.values())
    decode = Scrfd(scores=scores, boxes=boxes, keypoints=points)
    why = f"{sum(counts)} outputs of 1, 4 and 10 columns: SCRFD"
    return (Candidate(decode, "scrfd", why),)


def raw_heads(facts: ModelFacts) -> tuple[Candidate, ...]:
    """Three outputs [1, 3, h, w, 5+C], the largest first: YOLOv7 without its grid, YOLOv5 raw."""
    heads = [output for output in facts.outputs if len(output.shape) == 5]
    if len(heads) != 3 or len(facts.outputs) != 3 or any(o.shape[1] != 3 for o in heads):
        return ()
    height, width = facts.size
    expected = [(-(-height // stride), -(-width // stride)) for stride in (8, 16, 32)]
    if [output.shape[2:4] for output in heads] != expected:
        return ()
    why = "three outputs of three anchors a cell: raw heads of YOLOv7, or of YOLOv5"
    note = "the anchors are YOLOv7's, which the file does not hold: yours may be others"
    decode = YoloAnchors(outputs=tuple(output.name for output in heads))
    return (Candidate(decode, "letterbox", why, (note,)),)


def retinaface(facts: ModelFacts) -> tuple[Candidate, ...]:
    """Rows of 4, 2 and 10 columns for two priors of each cell: RetinaFace."""
    by_columns = {output.shape[-1]: output for output in facts.outputs if len(output.shape) == 3}
    if set(by_columns) != {4, 2, 10} or len(facts.outputs) != 3:
        return ()
    cells = 2 * cell_count((8, 16, 32), facts.size[1], facts.size[0])
    if any(output.shape[1] != cells for output in facts.outputs):
        return ()
    decode = RetinaFace(
        boxes=by_columns[4].name, scores=by_columns[2].name, keypoints=by_columns[10].name
    )
    why = "rows of 4, 2 and 10 columns for two priors of each cell: RetinaFace"
    return (Candidate(decode, "retinaface", why),)


BLAZEFACES = (((8, 16), (2, 6)), ((16, 32), (2, 6)), ((4,), (1,)))  # strides, anchors a cell


def blazeface(facts: ModelFacts) -> tuple[Candidate, ...]:
    """Rows of 16 and 1 columns for the anchors of one of MediaPipe's models: BlazeFace."""
    by_columns = {output.shape[-1]: output for output in facts.outputs if len(output.shape) == 3}
    if set(by_columns) != {16, 1} or len(facts.outputs) != 2:
        return ()
    height, width = facts.size
    for strides, anchors in BLAZEFACES:
        count = anchor_count(strides, anchors, width, height)
        if all(output.shape[1] == count for output in facts.outputs):
            decode = Blazeface(
                boxes=by_columns[16].name,
                scores=by_columns[1].name,
                strides=strides,
                anchors=anchors,
            )
            why = f"rows of 16 and 1 columns for {count} anchors: BlazeFace of MediaPipe"
            return (Candidate(decode, "blazeface", why),)
    return ()


def torchvision(facts: ModelFacts) -> tuple[Candidate, ...]:
    """An integer vector, [N, 4] and [N]: torchvision's detectors; names are numbers there."""
    boxes = _named(facts, 2, 4)
    classes = [o for o in facts.outputs if len(o.shape) == 1 and o.dtype == "int64"]
    scores = [o for o in facts.outputs if len(o.shape) == 1 and o.dtype.startswith("float")]
    if boxes is None or not classes or not scores:
        return ()
    masks = next((o.name for o in facts.outputs if len(o.shape) == 4), "")
    points = next((o.name for o in facts.outputs if len(o.shape) == 3), "")
    decode = Finished(
        boxes=boxes.name,
        scores=scores[0].name,
        classes=classes[0].name,
        first_class=1,
        masks=masks,
        keypoints=points,
    )
    why = "an int64 vector beside [N, 4] and [N]: a detector of torchvision, classes from 1"
    note = "it resizes and normalises in the graph: any input size in its ratio will do"
    return (Candidate(decode, "letterbox", why, (note,)),)


def text_recognition(facts: ModelFacts) -> tuple[Candidate, ...]:
    """[N, T, characters]: a line of text, with its alphabet in the metadata or 32 or 48 high."""
    output = _single(facts, 3)
    if output is None or not isinstance(output.shape[2], int):
        return ()
    alphabet = class_names(facts.metadata)
    height = facts.declared_size[0]
    if not alphabet and (height not in TEXT_HEIGHTS or output.shape[2] < 30):
        return ()
    space = not alphabet or output.shape[2] == len(alphabet) + 2
    why = f"one output [N, T, {output.shape[2]}]: characters of a line, CTC"
    decode = TextRecognition(output=output.name, space=space)
    notes = ["labels.txt holds the characters, one a line, without blank and space"]
    if facts.size_is_assumed:
        notes.append(
            "lines are 48 pixels high, 32 in older files: `tandem model guess --input-size 320 48`"
        )
    producer = facts.producers.get(output.name)
    softmax = producer is None or producer.op == "Softmax" or "Softmax" in producer.before
    return (
        Candidate(decode, "signed", why, tuple(notes), TEXT_SIZE, sure=bool(alphabet) or softmax),
    )


def one_channel(facts: ModelFacts) -> tuple[Candidate, ...]:
    """[1, 1, H, W]: text, depth or a mask."""
    output = _single(facts, 4)
    if output is None or not (output.shape[1] == 1 or _is_open(output.shape[1])):
        return ()
    if output.shape[2:] == (17, 3):
        why = "one output [1, 1, 17, 3]: MoveNet"
        return (Candidate(Movenet(output=output.name), "rgb-bytes", why),)
    one = "one map of one channel"
    classes: tuple[Candidate, ...] = ()
    if output.shape[1] != 1:
        one = "one map, if it has one channel, which the file leaves open"
        classes = (Candidate(Segmentation(output=output.name), "imagenet", "a map for each class"),)
    return (
        Candidate(TextDetection(output=output.name), "imagenet",
                  f"{one}: probabilities of text (DB, PP-OCR)"),
        Candidate(Segmentation(output=output.name, values="binary"), "imagenet", f"{one}: a mask"),
        Candidate(Depth(output=output.name), "imagenet", f"{one}: depth", sure=False),
        *classes,
    )  # fmt: skip


def segmentation(facts: ModelFacts) -> tuple[Candidate, ...]:
    """[1, C, H, W] at H or H/4, or [1, H, W] of integers."""
    maps = [output for output in facts.outputs if len(output.shape) == 4]
    if len(maps) == len(facts.outputs) and len({o.shape for o in maps}) == 1:
        return _channels(facts, maps[0])
    output = _single(facts, 3)
    if output is not None and output.dtype in ("int64", "int32", "uint8"):
        decode = Segmentation(output=output.name, values="classes")
        why = "one output [1, H, W] of integers: a map of classes"
        return (Candidate(decode, "imagenet", why, (_COLOUR,)),)
    if output is not None and output.shape[1:] == facts.size:
        why = "one output [1, H, W] of the input's size: depth"
        known = _has_word(output.name, DEPTH_NAMES)
        return (Candidate(Depth(output=output.name), "imagenet", why, (_COLOUR,), sure=known),)
    return ()


def _channels(facts: ModelFacts, output: TensorInfo) -> tuple[Candidate, ...]:
    last = facts.layout == "nhwc" and not isinstance(output.shape[1], str)
    height = output.shape[1] if last else output.shape[2]
    if output.shape[1:] == (17, 64, 48):
        why = "one output [1, 17, 64, 48]: heat maps of a pose"
        return (Candidate(Heatmaps(output=output.name), "imagenet", why),)
    if isinstance(height, int) and height not in (facts.size[0], facts.size[0] // 4):
        return ()
    decode = Segmentation(
        output=output.name,
        layout="nhwc" if last else "nchw",
        full_size=isinstance(height, int) and height < facts.size[0],
    )
    why = f"output {output.name!r} has a map for each class"
    if len(facts.outputs) > 1:
        why += "; the others, of the same shape, are auxiliary"
    maps = Candidate(decode, "imagenet", why, (_COLOUR,))
    if _are_classes(facts, output, output.shape[3 if last else 1]):
        return (maps,)
    points = Candidate(Heatmaps(output=output.name), "imagenet", "or a map for each key point")
    return (replace(maps, sure=False), *(() if last or decode.full_size is False else (points,)))


def _are_classes(facts: ModelFacts, output: TensorInfo, channels: object) -> bool:
    """True if more than shapes says that maps are of classes: pictures, features and key points
    have such shapes, too."""
    if len(facts.outputs) > 1 or _has_word(output.name, MAP_NAMES):
        return True
    producer = facts.producers.get(output.name)
    # Class maps are computed small and enlarged last; a picture of three channels may be, too.
    enlarged = producer is not None and producer.op == "Resize" and channels != len("rgb")
    return enlarged or (producer is not None and producer.op in ("Softmax", "LogSoftmax"))


def classifier(facts: ModelFacts) -> tuple[Candidate, ...]:
    """[1, C]: a classifier; its last node tells whether it has a softmax."""
    output = _single(facts, 2)
    if output is None or len(facts.image.shape) != 4:
        return ()
    producer = facts.producers.get(output.name)
    softmax = producer is None or producer.op != "Softmax"
    last = "unknown (an engine)" if producer is None else producer.op
    why = f"one output [1, {output.shape[1]}]: a classifier; its last node is {last}"
    notes = (_COLOUR, _TIMM) + (("softmax: look whether scores add up to 1",) * (producer is None))
    decode = Classification(scores=output.name, softmax=softmax)
    # An embedding, points of a face and an age are a vector, too.
    known = (
        last in ("Softmax", "LogSoftmax")
        or output.shape[1] in CLASS_COUNTS
        or _has_word(output.name, CLASS_NAMES)
        or _named_classes(facts, output, 1, 0)
    )
    if facts.declared_size in ((48, 192), (80, 160)):
        return (Candidate(decode, "signed", why, notes[:1], sure=known),)
    return (Candidate(decode, "imagenet-crop", why, notes, sure=known),)


def _named_classes(facts: ModelFacts, output: TensorInfo, axis: int, before: int) -> bool:
    """True if the metadata name as many classes as the output has, beside `before` columns."""
    size, count = output.shape[axis], len(class_names(facts.metadata))
    return count > 0 and size == before + count


def _has_word(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.lower() for word in words)


def _is_open(size: object) -> bool:
    """True for a size that the file leaves open."""
    return not isinstance(size, int)


def _single(facts: ModelFacts, rank: int, others: int | None = None) -> TensorInfo | None:
    """Return the only output, if it has this rank; outputs of rank `others` do not count."""
    outputs = [output for output in facts.outputs if len(output.shape) != others]
    return outputs[0] if len(outputs) == 1 and len(outputs[0].shape) == rank else None


def _named(facts: ModelFacts, rank: int, columns: int) -> TensorInfo | None:
    return next((o for o in facts.outputs if len(o.shape) == rank and o.shape[-1] == columns), None)


def _more(size: object, least: int) -> bool:
    return isinstance(size, int) and size > least
