"""Rewrite what the DLA refuses into what it takes, where that is exact: model in, model out.

Each replacement is staged in a copy of the graph. It is accepted if the DLA takes every new node
but its borders, if no neighbour is lost, and if fewer nodes are refused than before (or, where a
view only moves down, no more). This runs before calibration: new tensors need ranges.
"""

from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from device.engine.manifest import Precision
from device.profile import Dla
from toolkit.dla.legalize.graph_rewriter import GraphRewriter, producers
from toolkit.dla.legalize.rewrite import Applied, Cut, Declined, Legalized, Outcome, Rewrite, Site
from toolkit.dla.legalize.rows import REWRITES
from toolkit.dla.rules.rule import Verdict
from toolkit.dla.rules.verdicts import judge
from toolkit.graph.node_view import NodeView, view
from toolkit.graph.rewriter import Reason, Refusal, Replacement, UniqueNames, apply_rules

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
    target = _DlaTarget(copy.graph, dla, tensorrt, precision, only)
    if precision != "fp32":
        for _ in range(MAX_ROUNDS):
            if not _rewrite_once(target):
                break
    return Legalized(copy, tuple(target.applied), target.still_declined(), _cuts(target))


def as_it_is(model: ir.Model, dla: Dla, tensorrt: str | None, precision: Precision) -> Legalized:
    """Return the model without a rewrite, and where its heads are cut."""
    copy = model.clone()
    target = _DlaTarget(copy.graph, dla, tensorrt, precision, None)
    return Legalized(copy, (), (), _cuts(target))


def would_help(node: NodeView) -> tuple[str, ...]:
    """The rewrites that exist for the operator of a node, in the order in which they are tried."""
    return tuple(row.id for row in REWRITES if node.op in row.ops)


def _rewrite_once(target: "_DlaTarget") -> int:
    """Try every row on every node; return how many rewrites were applied."""
    target.start_round()
    return sum(
        apply_rules(target, tuple(row for row in REWRITES if row.first == first))
        for first in (True, False)
    )


class _DlaTarget:
    """A graph being legalized for a DLA: the adapter of `toolkit.graph.rewriter`.

    It keeps the views and verdicts of its nodes as far as they are known.
    """

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
        self._names = UniqueNames(_names_in(graph))
        self._opsets = dict(graph.opset_imports)
        self._verdicts: dict[ir.Node, tuple[Verdict, ...]] = {}
        self._views: dict[ir.Node, NodeView] = {}
        self._declined: dict[str, list[Declined]] = {}
        self._failed: dict[tuple[str, ir.Node], Reason] = {}
        self._rewriter: GraphRewriter
        self._refused: Verdict  # what kept the first node of the accepted replacement off the DLA

    def start_round(self) -> None:
        """Forget which rewrites failed: others may make them possible."""
        self._failed.clear()

    def still_declined(self) -> tuple[Declined, ...]:
        """Return why the rewrites of the nodes that are still there were not applied."""
        names = {node.name for node in self.graph}
        return tuple(d for name, all_of in self._declined.items() if name in names for d in all_of)

    def verdicts(self, node: ir.Node) -> tuple[Verdict, ...]:
        """Return what keeps a node off the DLA."""
        if node not in self._verdicts:
            self._verdicts[node] = judge(self._known_view(node), *self._judged_by)
        return self._verdicts[node]

    def nodes(self) -> Iterator[ir.Node]:
        """Yield the nodes in running order, constants excluded."""
        return (node for node in self.graph if node.op_type != "Constant")

    def rules_for(self, node: ir.Node, rules: Sequence[Rewrite]) -> Iterator[Rewrite]:
        """Yield the rows to try on a node: on one that is refused, or reads one that is."""
        if node.graph is not self.graph:
            return
        precision = self._judged_by[2]
        rows = [row for row in rules if node.op_type in row.ops and precision in row.precisions]
        if rows and not self.verdicts(node):
            rows = [row for row in rows if self._reads_refused(node, row)]
        if not rows or node.domain not in ("", "ai.onnx"):
            return
        seen = self._known_view(node)
        self._declined[str(node.name)] = []
        for row in rows:
            if not _is_plain(seen, row.dtypes):
                continue
            reason = self._failed.get((row.id, node))
            if reason is None:
                yield row
            else:
                self._note_declined(row, node, reason)

    def match(self, rule: Rewrite, node: ir.Node, excluded: frozenset[ir.Node]) -> Outcome:
        """Build the new form of a node."""
        self._rewriter = GraphRewriter(self.graph, self._names, node)
        try:
            outcome = rule.build(Site(node, self._known_view(node), self._rewriter, excluded))
        except onnx.shape_inference.InferenceError as err:
            return f"its new nodes have no valid shape ({str(err).splitlines()[0]})"
        if isinstance(outcome, Replacement) and self._rewriter.drops_output:
            return "an output of the model would lose its node"
        return outcome

    def accept(self, rule: Rewrite, replacement: Replacement[ir.Node]) -> Refusal[ir.Node] | None:
        """Stage a replacement and ask the DLA's rules; return why it may not stay."""
        rewriter, replaced = self._rewriter, list(replacement.replaced)
        near = [*replaced, *_above(replaced), *_readers(replaced)]
        near += [node for node in producers(replacement.nodes) if node.graph is self.graph]
        known = {node: self.verdicts(node) for node in near}
        rewriter.stage()
        superseded = rewriter.superseded()
        refusal = self._refusal(superseded, known)
        if refusal is not None:
            return refusal
        before = sum(bool(known[node]) for node in superseded if node in known)
        after = len(rewriter.borders)
        if after > before - (not rewriter.sinks):
            return Refusal(f"{after} views or casts at its edges for {before} nodes gained")
        in_order = _in_order(self.graph, superseded)
        refused = next((known[node][0] for node in in_order if known.get(node)), None)
        if refused is None:
            return Refusal("no node is gained")
        if self._only is not None and refused.node not in self._only:
            return Refusal("it was not asked for")
        self._refused = refused
        return None

    def commit(self, rule: Rewrite, replacement: Replacement[ir.Node]) -> None:
        """Remove what the accepted replacement supersedes, and report it."""
        superseded = self._rewriter.superseded()
        replaced = tuple(str(node.name) for node in _in_order(self.graph, superseded))
        names = tuple(str(node.name) for node in replacement.nodes)
        borders = tuple(name for name in names if name in self._rewriter.borders)
        refused = self._refused
        self.applied.append(Applied(rule.id, refused.node, refused, replaced, names, borders))
        for node in _neighbours(self._rewriter, superseded):
            self._verdicts.pop(node, None)
            self._views.pop(node, None)
        for node in (*producers(superseded), *self._rewriter.around_outputs()):
            self._views.pop(node, None)
        self._rewriter.commit()

    def roll_back(self) -> None:
        """Take the new nodes out of the graph."""
        self._rewriter.roll_back()

    def decline(self, rule: Rewrite, node: ir.Node, reason: Reason) -> None:
        """Record the reason for all nodes of the attempt; the rule skips them in this round."""
        self._failed |= {(rule.id, member): reason for member in self._rewriter.replaced}
        self._note_declined(rule, node, reason)

    def _note_declined(self, rule: Rewrite, node: ir.Node, reason: Reason) -> None:
        name = str(node.name)
        for verdict in self.verdicts(node)[:1]:
            self._declined[name].append(Declined(rule.id, name, verdict, reason))

    def _judge(self, node: ir.Node) -> tuple[Verdict, ...]:
        return judge(self._view(node), *self._judged_by)

    def _known_view(self, node: ir.Node) -> NodeView:
        """Return the view of a node while no replacement is staged."""
        if node not in self._views:
            self._views[node] = self._view(node)
        return self._views[node]

    def _view(self, node: ir.Node) -> NodeView:
        return view(node, self._opsets.get(node.domain))

    def _reads_refused(self, node: ir.Node, row: Rewrite) -> bool:
        return any(
            producer.op_type in row.reads and self.verdicts(producer)
            for producer in producers([node])
        )

    def _refusal(
        self, superseded: list[ir.Node], known: Mapping[ir.Node, tuple[Verdict, ...]]
    ) -> Refusal[ir.Node] | None:
        """Return what the DLA refuses of the staged nodes, or of their neighbours."""
        rewriter, reasons, culprits = self._rewriter, [], set()
        for node in rewriter.nodes:
            if node.name in rewriter.borders:
                continue
            for verdict in self._judge(node)[:1]:
                culprits.add(rewriter.origin_of(node))
                reasons.append(f"its {node.op_type} is refused by {verdict.rule}: {verdict.reason}")
        if reasons:
            return Refusal(reasons[0], frozenset(culprits))
        for node in _neighbours(rewriter, superseded):
            if not known.get(node, ()) and (now := self._judge(node)):
                return Refusal(f"'{node.name}' beside it would be refused by {now[0].rule}")
        return None


def _names_in(graph: ir.Graph) -> Iterator[str]:
    """Yield the names of all inputs, initializers, nodes and results."""
    yield from (str(value.name) for value in graph.inputs)
    yield from graph.initializers
    for node in graph.all_nodes():
        yield node.name or ""
        yield from (str(value.name) for value in node.outputs)


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
        for producer in producers([open_nodes.pop()]):
            yield producer
            if len(list(producer.outputs[0].uses())) == 1:
                open_nodes.append(producer)


def _readers(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    """The nodes that read what `nodes` make."""
    for node in nodes:
        for value in node.outputs:
            yield from (use.node for use in value.uses())


def _neighbours(rewriter: GraphRewriter, superseded: list[ir.Node]) -> Iterator[ir.Node]:
    """Yield the nodes that stay and compute an input or read an output of the new ones."""
    ours = {*rewriter.nodes, *superseded}
    for node in dict.fromkeys([*producers(rewriter.nodes), *_readers(rewriter.nodes)]):
        if node not in ours and node.graph is rewriter.graph:
            yield node


def _in_order(graph: ir.Graph, nodes: list[ir.Node]) -> list[ir.Node]:
    members = set(nodes)
    return [node for node in graph if node in members] if len(members) > 1 else list(nodes)


def _cuts(target: _DlaTarget) -> tuple[Cut, ...]:
    """Return the first nodes whose output is too long for the DLA, with all nodes below."""
    cuts = []
    for node in target.graph:
        if node.op_type == "Constant" or not _too_long(target.verdicts(node)):
            continue
        makers = [value.producer() for value in node.inputs if value is not None]
        if any(maker is not None and _too_long(target.verdicts(maker)) for maker in makers):
            continue
        tensors = [v for v in node.inputs if v is not None and not v.is_initializer()]
        below = _below(node)
        names = tuple(str(member.name) for member in target.graph if member in below)
        cuts.append(Cut(str(node.name), tuple(str(v.name) for v in tensors), names))
    return tuple(cuts)


def _too_long(verdicts: tuple[Verdict, ...]) -> bool:
    return any(verdict.rule == "G4" for verdict in verdicts)


def _below(node: ir.Node) -> set[ir.Node]:
    below: set[ir.Node] = set()
    open_nodes = [node]
    while open_nodes:
        for value in open_nodes.pop().outputs:
            for use in value.uses():
                if use.node not in below:
                    below.add(use.node)
                    open_nodes.append(use.node)
    return below
