"""Products of FP8 in a graph with its Q/DQ, as kernels read them.

A product between DequantizeLinear of FP8 reads the numbers as they are stored: one byte each, at
the rate of INT8. The DequantizeLinear is no kernel then.
"""

from collections.abc import Sequence
from dataclasses import replace

from toolkit.graph.node_view import NodeView, TensorView

_PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})
_STORED = frozenset({"float8e4m3fn"})


def read_as_stored(views: Sequence[NodeView]) -> tuple[tuple[NodeView, ...], frozenset[str]]:
    """Return the views with products that read FP8; second, the names of these products."""
    stored = {
        view.outputs[0].name: (view.name, source)
        for view in views
        if view.op == "DequantizeLinear"
        and (source := view.input(0)) is not None
        and source.dtype in _STORED
    }
    if not stored:
        return tuple(views), frozenset()
    float8 = {view.name for view in views if _multiplies(view, stored)}
    read_in_half = {name for view in views if view.name not in float8 for name in view.reads}
    free = {node for output, (node, _) in stored.items() if output not in read_in_half}
    return tuple(_seen(view, stored, float8, free) for view in views), frozenset(float8)


def _multiplies(view: NodeView, stored: dict[str, tuple[str, TensorView]]) -> bool:
    operands = [view.input(index) for index in (0, 1)]
    return view.op in _PRODUCTS and all(t is not None and t.name in stored for t in operands)


def _seen(
    view: NodeView,
    stored: dict[str, tuple[str, TensorView]],
    float8: set[str],
    free: set[str],
) -> NodeView:
    if view.name in free:
        return replace(view, op="Identity")
    if view.name not in float8:
        return view
    inputs = [t if t is None or t.name not in stored else stored[t.name][1] for t in view.inputs]
    renamed = {t.name: new.name for t, new in zip(view.inputs, inputs, strict=True) if t and new}
    reads = tuple(renamed.get(name, name) for name in view.reads)
    return replace(view, inputs=tuple(inputs), reads=reads)
