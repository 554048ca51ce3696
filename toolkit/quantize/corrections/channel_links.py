"""Find pairs of layers between which channels can be rescaled without changing the result.

A link is Conv -> f -> Conv or Gemm where f commutes with a positive factor s_i on each channel,

    f(s x) = s f(x)   for s > 0,

and nothing else reads the tensors between them. Clip(0, u) commutes only if it clips nothing before
and after scaling; that depends on the data, so such a link names the tensor to observe.

A Mul can scale any other computed tensor that only a depthwise layer reads: `unlinked_depthwise`.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from toolkit.quantize.weights import constant_of

# Positively homogeneous, channel by channel: rectifiers, and maxima and weighted means over space.
COMMUTING_OPS = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Identity"}
)


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """`producer` computes `tensor`'s channels and `consumer` reads them.

    `tensor`: the input of `consumer`. `clipped`: the output of a Clip(0, `limit`) between them.
    """

    producer: ir.Node
    consumer: ir.Node
    tensor: str
    clipped: str | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node cannot be adjusted."""

    node: str
    reason: str


def find_links(graph: ir.Graph) -> tuple[tuple[Link, ...], tuple[Refusal, ...]]:
    """Return the links in graph order, and why other convolutions have none."""
    links, refusals = [], []
    for node in graph:
        if node.op_type == "Conv" and node.domain == "":
            link = _link(node)
            if isinstance(link, Link):
                links.append(link)
            else:
                refusals.append(Refusal(str(node.name), link))
    return tuple(links), tuple(refusals)


def unlinked_depthwise(graph: ir.Graph) -> dict[str, ir.Node]:
    """Return computed tensor -> the depthwise convolution that alone reads it, where no link ends.

    In graph order.
    """
    linked = {link.consumer for link in find_links(graph)[0]}
    readers = {}
    for node in graph:
        if node.op_type != "Conv" or node.domain != "" or node in linked or unusable(node):
            continue
        value = node.inputs[0]
        if value is None or value.producer() is None or value.dtype != ir.DataType.FLOAT:
            continue
        alone = len(list(value.uses())) == 1 and not value.is_graph_output()
        if alone and is_depthwise(node):
            readers[str(value.name)] = node
    return readers


def is_depthwise(node: ir.Node) -> bool:
    """True for a depthwise convolution: as many groups as input and output channels."""
    weight = constant_of(node, 1)
    groups = node.attributes.get_int("group", 1)
    return weight is not None and weight.shape[:2] == (groups, 1)


def _link(producer: ir.Node) -> Link | str:
    """The link from a convolution, or the reason why there is none."""
    reason = unusable(producer)
    if reason:
        return reason
    value, clipped, limit = producer.outputs[0], None, None
    while True:
        uses = list(value.uses())
        if value.is_graph_output() or len(uses) != 1:
            readers = len(uses) + value.is_graph_output()
            return f"tensor {value.name!r} has {readers} readers, but a link needs exactly 1"
        node = uses[0].node
        if node.op_type == "Conv" and uses[0].idx == 0 and node.domain == "":
            return unusable(node) or Link(producer, node, str(value.name), clipped, limit)
        bound = _upper_bound(node) if node.op_type == "Clip" else None
        if node.op_type == "Gemm" and uses[0].idx == 0 and value.shape is not None:
            return unusable_gemm(node) or Link(producer, node, str(value.name), clipped, limit)
        if bound is not None and clipped is None:
            clipped, limit = str(node.outputs[0].name), bound
        elif not commutes(node, uses[0].idx) and not flattens(node):
            return f"it leads to {node.op_type} {node.name!r}, which does not commute with scaling"
        value = node.outputs[0]


def unusable(node: ir.Node) -> str:
    """Why a convolution cannot be scaled, "" if it can."""
    if constant_of(node, 1) is None:
        return f"the weight of {node.name!r} is not a float32 constant"
    if len(node.inputs) > 2 and node.inputs[2] is not None and constant_of(node, 2) is None:
        return f"the bias of {node.name!r} is not a float32 constant"
    return ""


def unusable_gemm(node: ir.Node) -> str:
    """Why the inputs of a Gemm cannot be scaled, "" if they can: one feature is one channel."""
    if constant_of(node, 1) is None or node.attributes.get_int("transA", 0) != 0:
        return f"Gemm {node.name!r} does not multiply with a float32 constant from the right"
    return ""


def flattens(node: ir.Node) -> bool:
    """True if a node reshapes [N, C, 1, ..] to [N, C]."""
    value = node.inputs[0] if node.op_type == "Flatten" and node.domain == "" else None
    shape = None if value is None else value.shape
    if shape is None or node.attributes.get_int("axis", 1) != 1:
        return False
    return all(dim == 1 for dim in shape.dims[2:])


def commutes(node: ir.Node, operand: int) -> bool:
    """True if factors of the channels of an operand are factors of the result."""
    if node.op_type not in COMMUTING_OPS or node.domain != "" or operand != 0:
        return False
    return len(node.outputs) == 1 or not any(value.uses() for value in node.outputs[1:])


def _upper_bound(node: ir.Node) -> float | None:
    """u of Clip(0, u) with constant bounds; None for any other Clip."""
    low, high = constant_of(node, 1), constant_of(node, 2)
    if low is None or high is None or low.size != 1 or high.size != 1:
        return None
    lower, upper = float(low.reshape(())), float(high.reshape(()))
    return upper if lower == 0.0 and 0.0 < upper < np.inf else None
