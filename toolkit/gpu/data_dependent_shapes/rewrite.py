"""The graph pass: numbers of rows that data decide become bounds where that is worth it."""

import onnx_ir as ir

from toolkit.gpu.data_dependent_shapes.bounded import bound_rows
from toolkit.gpu.data_dependent_shapes.subsets import merge_subsets
from toolkit.gpu.data_dependent_shapes.suppression import pad_suppressions
from toolkit.gpu.data_dependent_shapes.symbolic import infer_rows
from toolkit.graph.passes import Pass
from toolkit.graph.passes.fold import fold_constants
from toolkit.graph.passes.shapes import infer_shapes
from toolkit.graph.rewriter import UniqueNames

_SIZED_BY_NUMBERS = frozenset({"NonMaxSuppression", "NonZero"})


def give_bounds(model: ir.Model) -> str:
    """Pad rows to their bounds and merge subsets of rows; return what was done, in words."""
    if not any(node.op_type in _SIZED_BY_NUMBERS for node in model.graph.all_nodes()):
        return ""
    names = UniqueNames(_names(model))
    subsets = merge_subsets(model.graph, infer_rows(model), names)
    if subsets:
        _settle(model)
    bounded: list[str] = []
    suppressions = 0
    while True:
        padded = pad_suppressions(model, names)
        suppressions += padded
        if padded:
            _settle(model)
        note = bound_rows(model.graph, infer_rows(model), names)
        if note is None:
            break
        bounded.append(note)
        _settle(model)
    notes = [f"computed {subsets} subsets of rows as all rows"] if subsets else []
    if suppressions:
        notes.append(f"padded the results of {suppressions} NonMaxSuppression")
    return "; ".join(notes + bounded)


def _settle(model: ir.Model) -> None:
    """Infer the shapes that are known now, and fold what computes with them."""
    infer_shapes(model)
    fold_constants(model)
    infer_shapes(model)


def _names(model: ir.Model) -> set[str]:
    values = (value.name for node in model.graph.all_nodes() for value in node.outputs)
    nodes = (node.name for node in model.graph.all_nodes())
    constants = (name for graph in model.graphs() for name in graph.initializers)
    inputs = (value.name for value in model.graph.inputs)
    return {str(name) for name in (*values, *nodes, *constants, *inputs)}


ROW_PASSES = (Pass("bound-rows", give_bounds),)
