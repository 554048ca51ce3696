"""Regions of rank 2 and 3 in 4-D: heads of Flatten and Gemm, and networks of one dimension.

[N, K] becomes [N, K, 1, 1] and [N, C, L] becomes [N, C, 1, L]; where such a tensor is a view of a
4-D map, that map itself stands for it:

    Gemm(Flatten(x)) = Flatten(Conv(x)) with a window of the whole map
    f(Flatten(x)) = Flatten(f(x))

The views that are left stand where the region ends.
"""

import onnx_ir as ir

from toolkit.legalize.draft import Draft
from toolkit.legalize.lift_forms import FORMS, Lifted
from toolkit.legalize.rearrange import PLAIN_VIEWS
from toolkit.legalize.rewrite import Site, image, sizes
from toolkit.planning.node_view import view


def region_of(start: ir.Node) -> tuple[ir.Node, ...]:
    """The nodes of one rank, connected to `start`, that have a 4-D form, in running order."""
    if not liftable(start):
        return ()
    found, open_nodes = {start}, [start]
    while open_nodes:
        node = open_nodes.pop()
        near = [value.producer() for value in node.inputs if value is not None]
        near += [use.node for value in node.outputs for use in value.uses()]
        for other in near:
            if other is None or other in found or other.graph is not start.graph:
                continue
            if liftable(other) and _rank(other) == _rank(start):
                found.add(other)
                open_nodes.append(other)
    graph = start.graph
    assert graph is not None
    return tuple(node for node in graph if node in found)


def liftable(node: ir.Node) -> bool:
    """Whether a node is of rank 2 or 3, of known size and of an operator with a 4-D form."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in FORMS or len(node.outputs) != 1:
        return False
    return _rank(node) in (2, 3)


def _rank(node: ir.Node) -> int:
    shape = sizes(node.outputs[0])
    return 0 if shape is None else len(shape)


def lift(site: Site) -> str | None:
    """Write the region of a node in 4-D; nodes without a 4-D form are left out."""
    region = [node for node in region_of(site.node) if node not in site.excluded]
    reason = "it has no 4-D form"
    while region:
        site.draft.restart()
        failed = _emit(site.draft, region, site.draft.opset)
        if failed is None:
            return None if _pays(site.draft) else "it neither reads a 4-D map nor holds weights"
        node, why = failed
        reason = f"'{node.name}' has no 4-D form: {why}"
        region.remove(node)
    return reason


def _pays(draft: Draft) -> bool:
    """Whether a region is worth views at its edges: it goes on from a map, or convolves."""
    return draft.sinks or any(node.op_type in ("Conv", "ConvTranspose") for node in draft.nodes)


def _emit(draft: Draft, nodes: list[ir.Node], opset: int) -> tuple[ir.Node, str] | None:
    """Fill the draft; return the first node without a 4-D form, and why."""
    images: dict[ir.Value, ir.Value] = {}
    inside = set(nodes)
    for node in nodes:
        draft.at(node)
        for value in node.inputs:
            if value is not None and not value.is_initializer() and value not in images:
                images[value] = _enter(draft, value)
        lifted = FORMS[node.op_type](Lifted(node, view(node, opset), draft, images))
        if isinstance(lifted, str):
            return node, lifted
        made = node.outputs[0]
        images[made] = lifted
        if made.is_graph_output() or any(use.node not in inside for use in made.uses()):
            shape = sizes(made)
            assert shape is not None
            draft.finish(made, draft.reshape(lifted, shape))
    return None


def _enter(draft: Draft, value: ir.Value) -> ir.Value:
    """The 4-D image of a tensor that enters the region."""
    shape, source = sizes(value), value
    assert shape is not None
    while (node := source.producer()) is not None and node.op_type in PLAIN_VIEWS:
        above = node.inputs[0]
        if above is None:
            break
        source = above
        size = image(source)
        # A batch, channels and the rest must stay apart, as the region sees them.
        if size is not None and size[0] == shape[0] and (len(shape) == 2 or size[1] == shape[1]):
            draft.sinks = True
            return source
    wide = (*shape, 1, 1) if len(shape) == 2 else (shape[0], shape[1], 1, shape[2])
    return draft.reshape(value, wide)
