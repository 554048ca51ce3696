"""The parts of a graph's outputs, and the nodes that mix them.

Detectors often write boxes and scores into one tensor with a last Concat. One figure over that
tensor shows the boxes alone, which are a hundred times larger. So an output of a Concat is several
parts, one for each operand.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.quantize.loss.detections import detections
from toolkit.quantize.loss.varying import detection_outputs, varying_outputs

Kind = Literal["scores", "probabilities", "values", "detections", "varying"]
"""Scores: each in [0, 1] by itself (Sigmoid). Probabilities: they add up to 1 along an axis
(Softmax). Values: boxes, logits and all others. Of outputs whose size depends on the data:
detections, or varying, which are not compared."""

MOVES = frozenset(
    {"DepthToSpace", "Flatten", "Identity", "Pad", "Reshape", "Slice", "SpaceToDepth", "Split"}
    | {"Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators whose results hold elements of their first operand only."""
_BOUNDED = frozenset({"HardSigmoid", "Sigmoid", "Softmax"})
_LINEAR = frozenset({"Conv", "Gemm", "MatMul"})


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A part of an output: all of it where `axis` is None, else `start` to `stop` along `axis`.

    `class_axis`: the axis of the probabilities that add up to 1, None: unknown. `linear`: a linear
    layer computes it, as it does logits; what was normalised or bounded since is none. Detections
    are those of `boxes` and `labels` ("": of one class) beside the scores in `output`.
    """

    name: str
    output: str
    kind: Kind
    axis: int | None = None
    start: int = 0
    stop: int = 0
    class_axis: int | None = None
    linear: bool = False
    boxes: str = ""
    labels: str = ""

    def of(self, outputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Return this part of the outputs; of detections [N] rows of DETECTIONS."""
        if self.kind == "detections":
            labels = outputs[self.labels] if self.labels else None
            return detections(outputs[self.boxes], outputs[self.output], labels)
        array = outputs[self.output]
        if self.axis is None:
            return array
        indices = np.arange(self.start, self.stop)
        return np.take(array, indices, axis=self.axis)


def output_parts(model: ir.Model) -> tuple[OutputPart, ...]:
    """Return the parts of every floating-point output, in the order of the graph.

    Detections are one part, with the name of their scores.
    """
    varying = varying_outputs(model)
    detected = detection_outputs(varying)
    parts: list[OutputPart] = []
    for value in model.graph.outputs:
        name = str(value.name)
        if value not in varying:
            parts += _parts_of(value)
        elif detected is None or name not in (detected.boxes, detected.scores, detected.labels):
            if value.dtype is None or value.dtype.is_floating_point():
                parts.append(OutputPart(name, name, "varying"))
        elif name == detected.scores:
            boxes, labels = detected.boxes, detected.labels
            parts.append(OutputPart(name, name, "detections", boxes=boxes, labels=labels))
    return tuple(parts)


def split_outputs(
    parts: Sequence[OutputPart], outputs: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the floating-point parts of the outputs by name; only they have noise.

    Those whose size depends on the data are left out, but for detections.
    """
    compared = [part for part in parts if part.kind != "varying"]
    floats = [part for part in compared if outputs[part.output].dtype.kind == "f"]
    return {part.name: part.of(outputs) for part in floats}


def output_tensors(model: ir.Model) -> frozenset[str]:
    """Return the tensors whose elements are elements of an output, moved at most.

    No later layer makes up for what is clipped from them.
    """
    names: set[str] = set()
    pending = list(model.graph.outputs)
    while pending:
        value = pending.pop()
        if str(value.name) not in names:
            names.add(str(value.name))
            pending += _moved(value)
    return frozenset(names)


def output_layers(model: ir.Model) -> dict[str, str]:
    """Return the nodes that compute elements of an output, and their results.

    Left out are those that bound them to [0, 1]: their range is known.
    """
    outputs = output_tensors(model)
    return {
        str(node.name): str(node.outputs[0].name)
        for node in model.graph
        if str(node.outputs[0].name) in outputs
        and node.domain == ""
        and node.op_type not in MOVES | _BOUNDED | {"Concat"}
    }


def mixing_concats(model: ir.Model) -> dict[str, str]:
    """Return the Concat nodes that put scores beside other values, and what they mix.

    With one scale for all its operands, as the DLA asks for, such a Concat rounds scores in steps
    of the other values. Only those are returned whose result is moved but not computed with, so
    that no product loses INT8 if they are kept out.
    """
    scores = output_tensors(model)
    mixing = {}
    for node in model.graph:
        if node.op_type != "Concat" or node.domain != "":
            continue
        operands = [value for value in node.inputs if value is not None]
        bounded = [_bounded_by(value) for value in operands]
        if str(node.outputs[0].name) in scores and len({bool(op) for op in bounded}) == 2:
            mixing[str(node.name)] = f"{next(filter(None, bounded))} scores beside other outputs"
            continue
        readers = list(_readers(node.outputs[0]))
        to_scores = [_is_score(reader, scores) for reader in readers]
        if any(to_scores) and not all(to_scores):
            mixing[str(node.name)] = "the operands of scores beside those of other outputs"
    return mixing


def _moved(value: ir.Value) -> list[ir.Value]:
    """The operands whose elements a value holds."""
    node = value.producer()
    if node is None or node.domain != "":
        return []
    operands = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    if node.op_type != "Concat" and node.op_type not in MOVES:
        return []
    return [operand for operand in operands if operand is not None]


def _readers(value: ir.Value) -> Iterator[ir.Node | None]:
    """The first nodes that compute with a value; None: it is an output."""
    pending, seen = [value], {value}
    while pending:
        moved = pending.pop()
        if moved.is_graph_output():
            yield None
        for use in moved.uses():
            node = use.node
            if node.op_type == "Concat" or (node.op_type in MOVES and use.idx == 0):
                pending += [result for result in node.outputs if result not in seen]
                seen.update(node.outputs)
            elif node.op_type != "Shape":
                yield node


def _is_score(reader: ir.Node | None, output_names: frozenset[str]) -> bool:
    """True if a node makes the scores of an output."""
    return (
        reader is not None
        and reader.op_type in _BOUNDED
        and str(reader.outputs[0].name) in output_names
    )


def _bounded_by(value: ir.Value) -> str:
    """The operator that bounds all elements of a value to [0, 1], "" if none does."""
    ops: set[str] = set()
    pending, seen = [value], {value}
    while pending:
        origin = _origin(pending.pop())
        if origin is None or origin.domain != "" or origin.op_type not in _BOUNDED | {"Concat"}:
            return ""
        if origin.op_type == "Concat":
            operands = [one for one in origin.inputs if one is not None and one not in seen]
            seen.update(operands)
            pending += operands
        else:
            ops.add(origin.op_type)
    return ops.pop() if len(ops) == 1 else ""


def _origin(value: ir.Value) -> ir.Node | None:
    """The node that computes a value, before it was moved."""
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in MOVES:
        operand = node.inputs[0]
        node = None if operand is None else operand.producer()
    return node


def _is_linear(value: ir.Value) -> bool:
    """True if a value is the result of a linear layer, with its bias."""
    node = _origin(value)
    if node is not None and node.op_type == "Add" and node.domain == "":
        computed = [operand for operand in node.inputs if operand is not None and _varies(operand)]
        node = _origin(computed[0]) if len(computed) == 1 else None
    return node is not None and node.domain == "" and node.op_type in _LINEAR


def _varies(value: ir.Value) -> bool:
    return value.const_value is None


def bounded_tensors(model: ir.Model) -> frozenset[str]:
    """Return the tensors of the outputs whose elements all lie in [0, 1], whatever the samples."""
    values = [out for node in model.graph for out in node.outputs]
    outputs = output_tensors(model)
    return frozenset(
        str(value.name) for value in values if str(value.name) in outputs and _bounded_by(value)
    )


def _parts_of(output: ir.Value) -> Iterator[OutputPart]:
    name, node = str(output.name), output.producer()
    orders: list[Sequence[int]] = []
    while node is not None and node.op_type == "Transpose" and node.domain == "":
        orders.append(node.attributes.get_ints("perm", ()))
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    pieces = _pieces(node) if node is not None and all(orders) else ()
    if not pieces or node is None:
        kind, class_axis = _kind_of(output)
        yield OutputPart(name, name, kind, class_axis=class_axis, linear=_is_linear(output))
        return
    axis = node.attributes.get_int("axis", 0) % len(node.outputs[0].shape or (0,))
    for order in reversed(orders):
        axis = list(order).index(axis)
    start = 0
    for value, size in pieces:
        label = f"{name}[{start}:{start + size}]"
        kind, class_axis = _kind_of(value)
        yield OutputPart(
            label, name, kind, axis, start, start + size, None if orders else class_axis
        )
        start += size


def _pieces(node: ir.Node) -> tuple[tuple[ir.Value, int], ...]:
    """The operands of a Concat of unlike values with their sizes; empty if it is none."""
    if node.op_type != "Concat" or node.domain != "":
        return ()
    axis, pieces = node.attributes.get_int("axis", 0), []
    for value in node.inputs:
        size = None if value is None or value.shape is None else value.shape[axis]
        if value is None or not isinstance(size, int):
            return ()
        pieces.append((value, size))
    # Levels of one head are one part.
    return tuple(pieces) if len({_bounded_by(value) for value, _ in pieces}) > 1 else ()


def _kind_of(value: ir.Value) -> tuple[Kind, int | None]:
    """The kind of a value, and the axis of its classes if it is known."""
    op, producer = _bounded_by(value), value.producer()
    if op != "Softmax":
        return ("scores" if op else "values"), None
    rank = 0 if value.shape is None else len(value.shape)
    if producer is None or producer.op_type != "Softmax" or not rank:
        return "probabilities", None  # behind a move the axis is another one
    return "probabilities", producer.attributes.get_int("axis", -1) % rank
