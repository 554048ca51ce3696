"""Outputs whose size depends on the data: found in the graph, and the detections among them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

DATA_SIZED = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
"""Operators that make as many elements as the values of their inputs decide."""
_SCORES = ("score", "conf", "prob")
_LABELS = ("label", "class", "categ")
_BOXES = ("box", "det")


@dataclass(frozen=True, slots=True)
class DetectionOutputs:
    """The outputs that hold detections: boxes [..., 4], scores [...], labels [...] or ""."""

    boxes: str
    scores: str
    labels: str


def varying_outputs(model: ir.Model) -> tuple[ir.Value, ...]:
    """Return the outputs of unknown size behind an operator of DATA_SIZED."""
    return tuple(value for value in model.graph.outputs if _is_open(value) and _depends(value))


def detection_outputs(values: Sequence[ir.Value]) -> DetectionOutputs | None:
    """Return which of `varying_outputs` are boxes, scores and labels; None where that is not clear.

    Where several have the rank and the type, the names decide.
    """
    boxes = _one([v for v in values if _is_float(v) and _last_size(v) == 4], _BOXES)
    if boxes is None or boxes.shape is None:
        return None
    lists = [
        v
        for v in values
        if v.shape is not None and len(v.shape) == len(boxes.shape) - 1 and v.dtype
    ]
    floats, integers = [v for v in lists if _is_float(v)], [v for v in lists if _is_integer(v)]
    scores = _one(floats, _SCORES)
    if scores is None:
        return None
    rest = [value for value in floats if value is not scores]
    labels = _one(integers, _LABELS) or _one([v for v in rest if _is_named(v, _LABELS)], _LABELS)
    return DetectionOutputs(
        str(boxes.name), str(scores.name), str(labels.name) if labels is not None else ""
    )


def _one(values: Sequence[ir.Value], words: Sequence[str]) -> ir.Value | None:
    """The only value, or the only one with a name of `words`."""
    if len(values) == 1:
        return values[0]
    named = [value for value in values if _is_named(value, words)]
    return named[0] if len(named) == 1 else None


def _is_named(value: ir.Value, words: Sequence[str]) -> bool:
    return any(word in str(value.name).lower() for word in words)


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer()


def _last_size(value: ir.Value) -> object:
    return value.shape[-1] if value.shape is not None and len(value.shape) > 1 else None


def _is_open(value: ir.Value) -> bool:
    return value.shape is None or not all(isinstance(size, int) for size in value.shape)


def _depends(value: ir.Value) -> bool:
    """True if a node above a value makes as many elements as data decide."""
    pending: list[ir.Value | None] = [value]
    known: set[ir.Node] = set()
    while pending:
        above = pending.pop()
        node = None if above is None else above.producer()
        if node is None or node in known:
            continue
        known.add(node)
        for part in (node, *_inner(node)):
            if part.op_type in DATA_SIZED and part.domain in ("", "ai.onnx"):
                return True
            pending += part.inputs
    return False


def _inner(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes of the branches and bodies of a node."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()
