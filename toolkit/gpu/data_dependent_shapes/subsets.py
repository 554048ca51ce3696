"""Rows that are gathered, computed and scattered: computed for all rows, and chosen.

    y = scatter(data, i, f(gather(x, i))),  i = nonzero(mask)   ->   y = where(mask, f(x), data)

f computes each row alone. A feature pyramid samples each region from one of its levels so. All rows
at each level are more work, but their number no longer depends on the numbers.
"""

from dataclasses import dataclass, field

import onnx_ir as ir

from toolkit.gpu.data_dependent_shapes.region import Region
from toolkit.gpu.data_dependent_shapes.symbolic import RowSizes, Source
from toolkit.graph.rewriter import UniqueNames

_KEEPS_INDICES = frozenset(
    {"Expand", "Flatten", "Identity", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)


@dataclass
class _Subset:
    """The rows that one NonZero chooses.

    `indices`: tensors that hold its indices along the rows; `gathered`: rows and what they are
    gathered from; `scatters`: the nodes that write computed rows back.
    """

    mask: ir.Value
    indices: dict[ir.Value, None]
    gathered: dict[ir.Value, ir.Value] = field(default_factory=dict)
    scatters: list[ir.Node] = field(default_factory=list)
    region: Region = field(default_factory=Region)


def merge_subsets(graph: ir.Graph, sizes: RowSizes, names: UniqueNames) -> int:
    """Compute all rows where subsets were computed; return the number of subsets."""
    subsets = [_find_subset(graph, sizes, source) for source in sizes.sources]
    merged = [subset for subset in subsets if subset is not None]
    for subset in merged:
        _merge(graph, subset, names)
    return len(merged)


def _find_subset(graph: ir.Graph, sizes: RowSizes, source: Source) -> _Subset | None:
    """Return the subset that a NonZero chooses, None where its rows are used otherwise."""
    node = source.value.producer()
    mask = node.inputs[0] if node is not None and node.op_type == "NonZero" else None
    shape = None if mask is None else sizes.shape(mask)
    if mask is None or mask.dtype != ir.DataType.BOOL or shape is None or len(shape) != 1:
        return None
    subset = _Subset(mask, {source.value: None})
    for node in graph:
        known = {**subset.indices, **subset.gathered}
        if not subset.region.touches(node, known):
            continue
        if not (
            _keeps_indices(node, sizes, source.dim, subset)
            or _gathers(node, sizes, shape[0], subset)
            or _scatters(node, sizes, source.dim, shape[0], subset)
            or subset.region.add(node, sizes, source.dim, known)
        ):
            return None
    region = subset.region
    values = (*subset.indices, *subset.gathered, *region.rows, *region.sized)
    read_by_branches = any(use.node.graph is not graph for v in values for use in v.uses())
    leaves = read_by_branches or any(value.is_graph_output() for value in values)
    return subset if subset.scatters and region.multiplies and not leaves else None


def _keeps_indices(node: ir.Node, sizes: RowSizes, dim: int, subset: _Subset) -> bool:
    """Whether a node arranges the indices otherwise, each still in its row."""
    region = subset.region
    source = node.inputs[0] if node.inputs else None
    if node.op_type not in _KEEPS_INDICES or source not in subset.indices:
        return False
    others = [value for value in node.inputs[1:] if value is not None]
    rows = sizes.rows(node.outputs[0], dim)
    if len(node.outputs) != 1 or rows is None or rows.factor != 1:
        return False
    if not all(value in region.sized or sizes.is_static(value) for value in others):
        return False
    subset.indices[node.outputs[0]] = None
    return True


def _gathers(node: ir.Node, sizes: RowSizes, rows: int, subset: _Subset) -> bool:
    """Whether a node gathers the chosen of all rows."""
    if node.op_type != "Gather" or node.inputs[1] not in subset.indices:
        return False
    x, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    assert x is not None
    assert axis is not None
    shape, index = sizes.shape(x), sizes.shape(node.inputs[1])
    if shape is None or index is None or len(index) != 1 or shape[axis] != rows:
        return False
    subset.gathered[node.outputs[0]] = x
    return True


def _scatters(node: ir.Node, sizes: RowSizes, dim: int, rows: int, subset: _Subset) -> bool:
    """Whether a node writes computed rows to the places that the indices say."""
    if (
        node.op_type != "ScatterElements"
        or node.attributes.get_string("reduction", "none") != "none"
    ):
        return False
    data, indices, updates = node.inputs
    assert data is not None
    assert updates is not None
    if indices not in subset.indices or updates not in subset.region.rows:
        return False
    shape, written, at = sizes.shape(data), sizes.shape(updates), sizes.rows(updates, dim)
    if shape is None or written is None or at is None or sizes.shape(indices) != written:
        return False
    axis = (node.attributes.get_int("axis", 0) or 0) % len(shape)
    same = (*shape[:axis], *shape[axis + 1 :]) == (*written[:axis], *written[axis + 1 :])
    if at.axis != axis or at.factor != 1 or shape[axis] != rows or not same:
        return False
    subset.scatters.append(node)
    return True


def _merge(graph: ir.Graph, subset: _Subset, names: UniqueNames) -> None:
    for value, source in subset.gathered.items():
        ir.convenience.replace_all_uses_with(value, source)
    for value in subset.region.rows:
        value.shape = None
    for node in subset.scatters:
        _choose(graph, node, subset.mask, names)


def _choose(graph: ir.Graph, node: ir.Node, mask: ir.Value, names: UniqueNames) -> None:
    """Put Where in the place of a ScatterElements."""
    data, _, updates = node.inputs
    result = node.outputs[0]
    assert data is not None
    assert result.shape is not None
    axis = (node.attributes.get_int("axis", 0) or 0) % len(result.shape)
    aligned = [-1 if at == axis else 1 for at in range(len(result.shape))]
    shape = ir.Value(name=names.take(f"{node.name}_mask_shape"), const_value=ir.tensor(aligned))
    graph.register_initializer(shape)
    reshape = ir.node("Reshape", [mask, shape], name=names.take(f"{node.name}_mask"))
    where = ir.node(
        "Where", [reshape.outputs[0], updates, data], name=names.take(f"{node.name}_where")
    )
    reshape.outputs[0].name = names.take(f"{node.name}_mask_output")
    graph.insert_before(node, [reshape, where])
    chosen = where.outputs[0]
    chosen.type, chosen.shape = result.type, result.shape
    ir.convenience.replace_all_uses_with(result, chosen, replace_graph_outputs=True)
    name, result.name = result.name, names.take(f"{result.name}_scattered")
    chosen.name = name
    graph.remove(node, safe=True)
