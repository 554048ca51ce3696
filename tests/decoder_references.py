"""Decoders one number at a time, in plain Python, from the layouts that exporters document.

They share nothing with `pipelines.stages.decoders`: a list of objects (box in input pixels, score,
class, extras) is what each gives; `placed` suppresses and moves them to the frame.
"""

import math

import numpy as np

from pipelines.config import PreprocessConfig
from pipelines.stages.decode import view_of
from pipelines.stages.preprocess import fit

WIDTH, HEIGHT = 64, 32  # of the input


def frame_view(resize="letterbox", frame=(75, 110)):
    """How a frame of (height, width) lies in the input."""
    preprocess = PreprocessConfig(width=WIDTH, height=HEIGHT, resize=resize)
    return view_of(fit(*frame, preprocess), (*frame, 3), preprocess)


def area(box):
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def overlap(a, b):
    shared = area([max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])])
    union = area(a) + area(b) - shared
    return shared / union if union > 0 else 0.0


def covariance(rotated):
    width, height, angle = rotated[2:]
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    return turn @ np.diag([width**2 / 12, height**2 / 12]) @ turn.T


def probabilistic_overlap(a, b):
    """1 - Hellinger distance of two normal distributions, in matrix form."""
    delta = np.array(a[:2], np.float64) - np.array(b[:2], np.float64)
    first, second = covariance(a), covariance(b)
    mean = (first + second) / 2
    distance = delta @ np.linalg.inv(mean) @ delta / 8
    product = np.linalg.det(first) * np.linalg.det(second)
    distance += 0.5 * math.log(np.linalg.det(mean) / math.sqrt(product))
    return 1 - math.sqrt(max(1 - math.exp(-distance), 0.0))


def fast(items, overlaps, threshold):
    """Fast NMS: what is suppressed suppresses, too."""
    order = sorted(items, key=lambda item: -item["score"])
    return [
        item
        for place, item in enumerate(order)
        if all(
            overlaps(item, better) < threshold
            for better in order[:place]
            if better["class"] == item["class"]
        )
    ]


def weighted(items, threshold):
    """MediaPipe's: the mean of a box and of those that overlap it, weighted by their scores."""
    rest, merged = sorted(items, key=lambda item: -item["score"]), []
    while rest:
        near = [item for item in rest if overlap(item["box"], rest[0]["box"]) > threshold]
        total = sum(item["score"] for item in near)
        mean = {
            key: [
                sum(values) / total
                for values in zip(
                    *([v * item["score"] for v in item[key]] for item in near), strict=True
                )
            ]
            for key in ("box", "rest")
        }
        merged.append({**rest[0], **mean})
        rest = [item for item in rest if item not in near]
    return merged


def greedy(items, overlaps, threshold):
    kept = []
    for item in sorted(items, key=lambda item: -item["score"]):
        rivals = (rival for rival in kept if rival["class"] == item["class"])
        if threshold is None or all(overlaps(item, rival) <= threshold for rival in rivals):
            kept.append(item)
    return kept


def to_frame(box, view):
    geometry = view.geometry
    scales = [geometry.scale_x, geometry.scale_y] * 2
    pads = [geometry.pad_x, geometry.pad_y] * 2
    return [(v - p) / s for v, p, s in zip(box, pads, scales, strict=True)]


def placed(items, view, iou, limit=100, compared=lambda box: box):
    """Suppress, move to the frame, cut there, drop what is empty: boxes, scores and classes.

    `compared` gives the box that suppression compares.
    """
    items = [item for item in items if area(item["box"]) > 0]
    kept = greedy(items, lambda a, b: overlap(compared(a["box"]), compared(b["box"])), iou)
    solid = []
    for item in kept[:limit]:
        box = to_frame(item["box"], view)
        limits = [view.frame_width, view.frame_height] * 2
        box = [min(max(v, 0.0), top) for v, top in zip(box, limits, strict=True)]
        if box[0] < box[2] and box[1] < box[3]:
            solid.append({**item, "box": box})
    return solid


def inclusive(view):
    """The box in the frame with its last pixel, as py_cpu_nms of SCRFD and RetinaFace counts."""

    def box_of(box):
        x1, y1, x2, y2 = to_frame(box, view)
        return [x1, y1, x2 + 1, y2 + 1]

    return box_of


def whole_numbers(box):
    """x, y, width and height without fractions, as OpenCV's face detector compares them."""
    x, y, width, height = (int(v) for v in (box[0], box[1], box[2] - box[0], box[3] - box[1]))
    return [x, y, x + width, y + height]


def inside_input(items, size, last=0.0, least=0.0):
    """Boxes cut at the input before suppression, as parsers of DeepStream do."""
    kept = []
    for item in items:
        limits = [side - last for side in size] * 2
        box = [min(max(v, 0.0), top) for v, top in zip(item["box"], limits, strict=True)]
        box = [box[0], box[1], box[2] + last, box[3] + last]
        if box[2] - box[0] >= least and box[3] - box[1] >= least:
            kept.append({**item, "box": box})
    return kept


def corners(x, y, width, height):
    return [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


def logistic(x):
    return 1 / (1 + math.exp(-x))


def best_class(scores):
    values = [float(score) for score in scores]
    best = max(range(len(values)), key=lambda c: values[c])
    return best, values[best]


def ultralytics(head, threshold, extras=0):
    items = []
    for cell in range(head.shape[1]):
        column = [float(v) for v in head[:, cell]]
        class_id, score = best_class(column[4 : len(column) - extras])
        if score >= threshold:
            rest = column[len(column) - extras :] if extras else []
            items.append(
                {"box": corners(*column[:4]), "score": score, "class": class_id, "rest": rest,
                 "centre": column[:4]}
            )  # fmt: skip
    return items


def yolov5(rows, threshold, extras=0):
    items = []
    for row in rows:
        values = [float(v) for v in row]
        end = len(values) - extras
        class_id, score = best_class([values[4] * v for v in values[5:end]])
        if score >= threshold:
            items.append({"box": corners(*values[:4]), "score": score, "class": class_id,
                          "rest": values[end:]})  # fmt: skip
    return items


def yolox(rows, strides, width, height, threshold):
    decoded, cell = [], 0
    for stride in strides:
        for row in range(height // stride):
            for column in range(width // stride):
                values = [float(v) for v in rows[cell]]
                box = [
                    (values[0] + column) * stride,
                    (values[1] + row) * stride,
                    math.exp(values[2]) * stride,
                    math.exp(values[3]) * stride,
                ]
                decoded.append(box + values[4:])
                cell += 1
    return yolov5(decoded, threshold)


def detectnet(coverage, boxes, threshold):
    items = []
    for class_id in range(coverage.shape[0]):
        for row in range(coverage.shape[1]):
            for column in range(coverage.shape[2]):
                score = float(coverage[class_id, row, column])
                if score < threshold:
                    continue
                x, y = 16 * column + 0.5, 16 * row + 0.5
                left, top, right, bottom = (
                    35 * float(boxes[4 * class_id + k, row, column]) for k in range(4)
                )
                box = [x - left, y - top, x + right, y + bottom]
                items.append({"box": box, "score": score, "class": class_id})
    return items


def centernet(heat, sizes, offsets, threshold):
    items = []
    classes, height, width = heat.shape
    for class_id in range(classes):
        for row in range(height):
            for column in range(width):
                score = logistic(float(heat[class_id, row, column]))
                around = heat[class_id, max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
                if score < threshold or float(heat[class_id, row, column]) < float(around.max()):
                    continue
                x = (column + float(offsets[0, row, column])) * 4
                y = (row + float(offsets[1, row, column])) * 4
                w, h = (4 * float(sizes[k, row, column]) for k in range(2))
                items.append({"box": corners(x, y, w, h), "score": score, "class": class_id})
    return items


def yunet(outputs, strides, width, height, threshold):
    items = []
    for stride in strides:
        cell = 0
        for row in range(height // stride):
            for column in range(width // stride):
                cls, obj, box, points = (
                    [float(v) for v in outputs[f"{name}_{stride}"][0, cell]]
                    for name in ("cls", "obj", "bbox", "kps")
                )
                cell += 1
                score = math.sqrt(min(max(cls[0], 0), 1) * min(max(obj[0], 0), 1))
                if score < threshold:
                    continue
                x, y = (box[0] + column) * stride, (box[1] + row) * stride
                sides = math.exp(box[2]) * stride, math.exp(box[3]) * stride
                rest = [(v + (row if i % 2 else column)) * stride for i, v in enumerate(points)]
                items.append({"box": corners(x, y, *sides), "score": score, "class": 0,
                              "rest": rest})  # fmt: skip
    return items


def scrfd(scores, boxes, points, strides, width, threshold):
    items = []
    for level, stride in enumerate(strides):
        across = -(-width // stride)
        for index in range(len(scores[level])):
            score = float(scores[level][index, 0])
            if score < threshold:
                continue
            x, y = index // 2 % across * stride, index // 2 // across * stride
            left, top, right, bottom = (float(v) * stride for v in boxes[level][index])
            rest = [
                (y if i % 2 else x) + float(v) * stride for i, v in enumerate(points[level][index])
            ]
            items.append({"box": [x - left, y - top, x + right, y + bottom], "score": score,
                          "class": 0, "rest": rest})  # fmt: skip
    return items


def yolo_anchors(heads, strides, anchors, threshold):
    items = []
    for level, (head, stride) in enumerate(zip(heads, strides, strict=True)):
        for anchor, row, column in np.ndindex(head.shape[:3]):
            s = [1.0 / (1.0 + math.exp(-float(v))) for v in head[anchor, row, column]]
            scores = [s[4] * value for value in s[5:]]
            best = max(range(len(scores)), key=lambda index: scores[index])
            if scores[best] < threshold:
                continue
            width, height = anchors[3 * level + anchor]
            box = corners((2 * s[0] - 0.5 + column) * stride, (2 * s[1] - 0.5 + row) * stride,
                          (2 * s[2]) ** 2 * width, (2 * s[3]) ** 2 * height)  # fmt: skip
            items.append({"box": box, "score": scores[best], "class": best})
    return items


def retinaface(boxes, scores, points, strides, priors, size, threshold):
    items, index = [], 0
    each = len(priors) // len(strides)
    for level, stride in enumerate(strides):
        for row in range(-(-size[1] // stride)):
            for column in range(-(-size[0] // stride)):
                for side in priors[level * each : (level + 1) * each]:
                    x, y = (column + 0.5) * stride, (row + 0.5) * stride
                    o, score = boxes[index], float(scores[index, 1])
                    if score >= threshold:
                        box = corners(
                            x + o[0] * 0.1 * side,
                            y + o[1] * 0.1 * side,
                            side * math.exp(o[2] * 0.2),
                            side * math.exp(o[3] * 0.2),
                        )
                        rest = [
                            (y if i % 2 else x) + float(v) * 0.1 * side
                            for i, v in enumerate(points[index])
                        ]
                        items.append({"box": box, "score": score, "class": 0, "rest": rest})
                    index += 1
    return items


def blazeface(rows, logits, strides, anchors, size, threshold):
    items, index = [], 0
    for stride, number in zip(strides, anchors, strict=True):
        for row in range(-(-size[1] // stride)):
            for column in range(-(-size[0] // stride)):
                for _ in range(number):
                    x, y = (column + 0.5) * stride, (row + 0.5) * stride
                    logit = max(-100.0, min(100.0, float(logits[index])))  # as MediaPipe
                    values, score = rows[index], 1.0 / (1.0 + math.exp(-logit))
                    index += 1
                    if score >= threshold:
                        box = corners(x + values[0], y + values[1], values[2], values[3])
                        rest = [(y if i % 2 else x) + float(v) for i, v in enumerate(values[4:])]
                        items.append({"box": box, "score": score, "class": 0, "rest": rest})
    return items


def ctc(steps, characters, blank=0):
    text, previous = [], blank
    for step in steps:
        best = int(np.argmax(step))
        if best not in (blank, previous):
            text.append(characters[best - 1])
        previous = best
    return "".join(text)
