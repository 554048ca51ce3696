"""Rewrite what the DLA refuses into what it takes, where that is exact: model in, model out.

Each rewrite is put into a copy of the graph on trial. It stays if the DLA takes every new node but
its borders, if no neighbour is lost, and if fewer nodes are refused than before (or, where a view
only moves down, no more). This runs before calibration: new tensors need ranges.
"""

from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir

from device.engine.manifest import Precision
from device.profile import Dla
from toolkit.dla.legalize.draft import Draft, Names
from toolkit.dla.legalize.rewrite import Applied, Cut, Declined, Legalized, Rewrite, Site
from toolkit.dla.legalize.rows import REWRITES
from toolkit.dla.rules.rule import Verdict
from toolkit.dla.rules.verdicts import judge
from toolkit.graph.node_view import NodeView, view

MAX_ROUNDS = 8  # one or two do; a bound, so that the loop ends whatever rows are added


def legalize(
    model: ir.Model,
    dla: Dla,
    tensorrt: str | None,
    precision: Precision,
    only: frozenset[str] | None = None,
) -> Legalized:
    """Return the model with every rewrite that lets nodes onto the DLA; `model` is not changed.

    The model has gone through the passes. `only` names the nodes (`Applied.node` of an earlier
    call) to which rewrites are kept.
    """
    copy = model.clone()
    work = _Work(copy.graph, dla, tensorrt, precision, only)
    if precision != "fp32":
        for _ in range(MAX_ROUNDS):
            if not work.round():
                break
    return Legalized(copy, tuple(work.applied), work.still_declined(), _cuts(copy.graph, work))


def would_help(node: NodeView) -> tuple[str, ...]:
    """The rewrites that exist for the operator of a node, in the order in which they are tried."""
    return tuple(row.id for row in REWRITES if node.op in row.ops)


class _Work:
    """A graph being rewritten, with the verdicts of its nodes as far as they are known."""

    def __init__(
        self,
        graph: ir.Graph,
        dla: Dla,
        tensorrt: str | None,
        precision: Precision,
        only: frozenset[str] | None,
    ) -> None:
        self.graph = graph
        self.applied: list[Applied] = []
        self._judged_by = (dla, tensorrt, precision)
        self._only = only
        self._names = Names(graph)
        self._opsets = dict(graph.opset_imports)
        self._verdicts: dict[ir.Node, tuple[Verdict, ...]] = {}
        self._declined: dict[str, list[Declined]] = {}
        self._failed: dict[tuple[str, ir.Node], str] = {}

    def round(self) -> bool:
        """Try every row on every node; return whether any rewrite was made."""
        before = len(self.applied)
        self._failed.clear()
        for first in (True, False):
            rows = tuple(row for row in REWRITES if row.first == first)
            for node in list(self.graph):
                if node.graph is self.graph and node.op_type != "Constant":
                    self._try(node, rows)
        return len(self.applied) > before

    def still_declined(self) -> tuple[Declined, ...]:
        """Why the rewrites of the nodes that are still there were not made."""
        names = {node.name for node in self.graph}
        return tuple(d for name, all_of in self._declined.items() if name in names for d in all_of)

    def verdicts(self, node: ir.Node) -> tuple[Verdict, ...]:
        """What keeps a node off the DLA."""
        if node not in self._verdicts:
            self._verdicts[node] = self._judge(node)
        return self._verdicts[node]

    def _judge(self, node: ir.Node) -> tuple[Verdict, ...]:
        return judge(self._view(node), *self._judged_by)

    def _view(self, node: ir.Node) -> NodeView:
        return view(node, self._opsets.get(node.domain))

    def _try(self, node: ir.Node, rows: tuple[Rewrite, ...]) -> None:
        rows = tuple(row for row in rows if node.op_type in row.ops)
        verdicts = self.verdicts(node) if rows else ()
        if not verdicts:
            rows = tuple(row for row in rows if self._reads_refused(node, row))
        if not rows or node.domain not in ("", "ai.onnx"):
            return
        seen = self._view(node)
        rows = tuple(row for row in rows if _is_plain(seen, row.dtypes))
        declined = []
        for row in rows:
            reason = self._failed.get((row.id, node)) or self._apply(row, node, seen)
            if reason is None:
                return
            if verdicts:
                declined.append(Declined(row.id, str(node.name), verdicts[0], reason))
        self._declined[str(node.name)] = declined

    def _reads_refused(self, node: ir.Node, row: Rewrite) -> bool:
        makers = (value.producer() for value in node.inputs if value is not None)
        return any(m is not None and m.op_type in row.reads and self.verdicts(m) for m in makers)

    def _apply(self, row: Rewrite, node: ir.Node, seen: NodeView) -> str | None:
        """Try one row on one node; return why it was not made."""
        excluded: frozenset[ir.Node] = frozenset()
        while True:
            draft = Draft(self.graph, self._names, node)
            try:
                reason = row.build(Site(node, seen, draft, excluded))
            except onnx.shape_inference.InferenceError as err:
                reason = f"its new nodes have no valid shape ({str(err).splitlines()[0]})"
            if reason is None and draft.drops_output:
                reason = "an output of the model would lose its node"
            if reason is not None:
                draft.discard()
                return self._remember(row, draft, reason)
            reason, refused = self._trial(row, draft)
            if reason is None or not refused - excluded or refused >= set(draft.replaces):
                return reason and self._remember(row, draft, reason)
            excluded |= refused

    def _remember(self, row: Rewrite, draft: Draft, reason: str) -> str:
        """A draft of several nodes that fails once need not be tried at each of them."""
        self._failed |= {(row.id, node): reason for node in draft.replaces}
        return reason

    def _trial(self, row: Rewrite, draft: Draft) -> tuple[str | None, set[ir.Node]]:
        """Put a draft in and keep it; or return why not, and the nodes whose form is refused."""
        near = [*draft.replaces, *_above(draft.replaces), *_readers(draft.replaces)]
        near += [node for node in _makers(draft.nodes) if node.graph is self.graph]
        known = {node: self.verdicts(node) for node in near}
        draft.put_in()
        gone = [*draft.replaces, *_dead(draft.replaces)]
        reason, refused = self._refusal(draft, gone, known)
        before = sum(bool(known[n]) for n in gone if n in known)
        after = len(draft.borders)
        if reason is None and after > before - (not draft.sinks):
            reason = f"{after} views or casts at its edges for {before} nodes gained"
        verdict = next((known[n][0] for n in _in_order(self.graph, gone) if known.get(n)), None)
        if reason is None and verdict is None:
            reason = "no node is gained"
        if reason is None and self._only is not None and verdict and verdict.node not in self._only:
            reason = "it was not asked for"
        if reason is not None or verdict is None:
            draft.take_out()
            return reason, refused
        self._keep(row, draft, gone, verdict)
        return None, set()

    def _refusal(
        self, draft: Draft, gone: list[ir.Node], known: Mapping[ir.Node, tuple[Verdict, ...]]
    ) -> tuple[str | None, set[ir.Node]]:
        """What the DLA refuses of a draft that is in the graph, or of its neighbours."""
        reason, refused = None, set()
        for node in draft.nodes:
            if node.name in draft.borders:
                continue
            for verdict in self._judge(node)[:1]:
                refused.add(draft.origin_of(node))
                reason = (
                    reason or f"its {node.op_type} is refused by {verdict.rule}: {verdict.reason}"
                )
        if reason is not None:
            return reason, refused
        for node in _neighbours(draft, gone):
            if not known.get(node, ()) and (now := self._judge(node)):
                return f"'{node.name}' beside it would be refused by {now[0].rule}", set()
        return None, set()

    def _keep(self, row: Rewrite, draft: Draft, gone: list[ir.Node], verdict: Verdict) -> None:
        near = list(_neighbours(draft, gone))
        names = tuple(str(node.name) for node in _in_order(self.graph, gone))
        made = tuple(str(node.name) for node in draft.nodes)
        borders = tuple(name for name in made if name in draft.borders)
        self.applied.append(Applied(row.id, verdict.node, verdict, names, made, borders))
        for node in near:
            self._verdicts.pop(node, None)
        read = [value for node in gone for value in node.inputs if value is not None]
        self.graph.remove(gone, safe=True)
        for value in read:
            unused = not list(value.uses()) and not value.is_graph_output()
            if value.is_initializer() and unused:
                self.graph.initializers.pop(str(value.name), None)


def _is_plain(node: NodeView, dtypes: frozenset[str]) -> bool:
    """Whether the tensors are of known size and of these types: what a rewrite starts from."""
    if node.has_subgraph:
        return False
    return all(
        tensor.dtype in dtypes
        and tensor.shape is not None
        and all(isinstance(size, int) and size > 0 for size in tensor.shape)
        for tensor in node.flowing
    )


def _above(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    """The nodes that may lose their last reader with `nodes`: single-reader chains above them."""
    open_nodes = list(nodes)
    while open_nodes:
        for maker in _makers([open_nodes.pop()]):
            yield maker
            if len(list(maker.outputs[0].uses())) == 1:
                open_nodes.append(maker)


def _makers(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    """The nodes that make what `nodes` read."""
    for node in nodes:
        for value in node.inputs:
            maker = value.producer() if value is not None else None
            if maker is not None and maker.op_type != "Constant":
                yield maker


def _readers(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    """The nodes that read what `nodes` make."""
    for node in nodes:
        for value in node.outputs:
            yield from (use.node for use in value.uses())


def _dead(replaced: list[ir.Node]) -> list[ir.Node]:
    """The nodes above whose outputs only the replaced ones, or others of these, read."""
    gone, found = set(replaced), []
    open_nodes = list(replaced)
    while open_nodes:
        for maker in _makers([open_nodes.pop()]):
            if maker not in gone and _unread(maker, gone):
                gone.add(maker)
                found.append(maker)
                open_nodes.append(maker)
    return found


def _unread(node: ir.Node, gone: set[ir.Node]) -> bool:
    return all(
        not value.is_graph_output() and all(use.node in gone for use in value.uses())
        for value in node.outputs
    )


def _neighbours(draft: Draft, gone: list[ir.Node]) -> Iterator[ir.Node]:
    """The nodes that stay and make an input or read an output of the new ones."""
    ours = {*draft.nodes, *gone}
    for node in dict.fromkeys([*_makers(draft.nodes), *_readers(draft.nodes)]):
        if node not in ours and node.graph is draft.graph:
            yield node


def _in_order(graph: ir.Graph, nodes: list[ir.Node]) -> list[ir.Node]:
    wanted = set(nodes)
    return [node for node in graph if node in wanted] if len(wanted) > 1 else list(nodes)


def _cuts(graph: ir.Graph, work: _Work) -> tuple[Cut, ...]:
    """The nodes that make a tensor too long for the DLA of tensors that are not, and all below."""
    cuts = []
    for node in graph:
        if node.op_type == "Constant" or not _too_long(work.verdicts(node)):
            continue
        makers = [value.producer() for value in node.inputs if value is not None]
        if any(maker is not None and _too_long(work.verdicts(maker)) for maker in makers):
            continue
        tensors = [v for v in node.inputs if v is not None and not v.is_initializer()]
        below = _below(node)
        names = tuple(str(other.name) for other in graph if other in below)
        cuts.append(Cut(str(node.name), tuple(str(v.name) for v in tensors), names))
    return tuple(cuts)


def _too_long(verdicts: tuple[Verdict, ...]) -> bool:
    return any(verdict.rule == "G4" for verdict in verdicts)


def _below(node: ir.Node) -> set[ir.Node]:
    found: set[ir.Node] = set()
    open_nodes = [node]
    while open_nodes:
        for value in open_nodes.pop().outputs:
            for use in value.uses():
                if use.node not in found:
                    found.add(use.node)
                    open_nodes.append(use.node)
    return found
