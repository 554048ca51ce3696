"""Regions of rank 2 and 3 in 4-D: heads of Flatten and Gemm, and networks of one dimension.

[N, K] becomes [N, K, 1, 1] and [N, C, L] becomes [N, C, 1, L]; where such a tensor is a view of a
4-D map, that map itself stands for it:

    Gemm(Flatten(x)) = Flatten(Conv(x)) with a window of the whole map
    f(Flatten(x)) = Flatten(f(x))

The views that are left stand where the region ends.
"""

import onnx_ir as ir

from toolkit.dla.legalize.graph_rewriter import GraphRewriter
from toolkit.dla.legalize.lift_forms import FORMS, Lifted
from toolkit.dla.legalize.rearrange import PLAIN_VIEWS
from toolkit.dla.legalize.rewrite import Outcome, Site, image, sizes
from toolkit.graph.node_view import view

WEIGHTED = frozenset({"Conv", "ConvTranspose"})
NOT_NEAR = "neither a 4-D map nor a layer with weights is near"


def region_of(start: ir.Node) -> tuple[ir.Node, ...]:
    """The nodes of one rank, connected to `start`, that have a 4-D form, in running order."""
    if not liftable(start):
        return ()
    region, open_nodes = {start}, [start]
    while open_nodes:
        node = open_nodes.pop()
        near = [value.producer() for value in node.inputs if value is not None]
        near += [use.node for value in node.outputs for use in value.uses()]
        for neighbour in near:
            if neighbour is None or neighbour in region or neighbour.graph is not start.graph:
                continue
            if liftable(neighbour) and _rank(neighbour) == _rank(start):
                region.add(neighbour)
                open_nodes.append(neighbour)
    graph = start.graph
    assert graph is not None
    return tuple(node for node in graph if node in region)


def liftable(node: ir.Node) -> bool:
    """Whether a node and all that it computes with are of one rank, 2 or 3, and it has a form."""
    form = FORMS.get(node.op_type)
    if form is None or node.domain not in ("", "ai.onnx") or len(node.outputs) != 1:
        return False
    computed = [v for v in node.inputs if v is not None and not v.is_initializer()]
    ranks = {_rank_of(value) for value in (node.outputs[0], *computed)}
    return len(ranks) == 1 and ranks <= form.ranks


def _rank(node: ir.Node) -> int:
    return _rank_of(node.outputs[0])


def _rank_of(value: ir.Value) -> int:
    shape = sizes(value)
    return 0 if shape is None else len(shape)


def lift(site: Site) -> Outcome:
    """Write the region of a node in 4-D; nodes without a 4-D form are left out."""
    region = [node for node in region_of(site.node) if node not in site.excluded]
    if site.node not in region:
        return "it has no 4-D form"
    site.rewriter.restart()
    if not _may_pay(region):
        site.rewriter.replaced.extend(region)
        return NOT_NEAR
    reason = _emit(site.rewriter, region)
    pays = site.rewriter.sinks or any(node.op_type in WEIGHTED for node in site.rewriter.nodes)
    if not pays:
        return reason or NOT_NEAR
    return site.rewriter.replacement()


def _may_pay(region: list[ir.Node]) -> bool:
    """Whether a region is worth views at its edges: it goes on from a 4-D map, or has weights."""
    if any(node.op_type in WEIGHTED | {"Gemm", "MatMul"} for node in region):
        return True
    inputs = [value for node in region for value in node.inputs if value is not None]
    return any(_source(value) is not None for value in inputs if not value.is_initializer())


def _emit(rewriter: GraphRewriter, region: list[ir.Node]) -> str | None:
    """Fill the rewriter with the nodes that have a form; return why the last without has none."""
    images: dict[ir.Value, ir.Value] = {}
    written: dict[ir.Node, ir.Value] = {}
    reason = None
    for node in region:
        mark = rewriter.mark()
        rewriter.replace(node)
        entering = {
            value: _enter(rewriter, value)
            for value in node.inputs
            if value is not None and not value.is_initializer() and value not in images
        }
        seen = Lifted(node, view(node, rewriter.opset), rewriter, {**images, **entering})
        lifted = FORMS[node.op_type].write(seen)
        if isinstance(lifted, str):
            rewriter.back_to(mark)
            reason = f"'{node.name}' has no 4-D form: {lifted}"
            continue
        images |= entering
        written[node] = images[node.outputs[0]] = lifted
    for node, lifted in written.items():
        old = node.outputs[0]
        if old.is_graph_output() or any(use.node not in written for use in old.uses()):
            rewriter.set_origin(node)
            rewriter.replace_uses(old, rewriter.reshape(lifted, sizes(old) or ()))
    return reason


def _enter(rewriter: GraphRewriter, value: ir.Value) -> ir.Value:
    """The 4-D image of a tensor that enters the region."""
    source, shape = _source(value), sizes(value) or ()
    if source is not None:
        rewriter.sinks = True
        return source
    wide = (*shape, 1, 1) if len(shape) == 2 else (shape[0], shape[1], 1, shape[2])
    return rewriter.reshape(value, wide)


def _source(value: ir.Value) -> ir.Value | None:
    """The 4-D map of which a tensor is a view, its batch (and channels, at rank 3) kept apart."""
    shape = sizes(value)
    source: ir.Value | None = value
    while source is not None and shape is not None:
        node = source.producer()
        if node is None or node.op_type not in PLAIN_VIEWS:
            return None
        source = node.inputs[0]
        size = image(source)
        if size is not None and size[0] == shape[0] and (len(shape) == 2 or size[1] == shape[1]):
            return source
    return None
