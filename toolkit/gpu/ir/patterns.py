"""Patterns of operations that one kernel computes, or that other operators express more simply.

Exporters write attention and normalizations as a handful of operators. A rule looks at operations
of some kinds, the last of its pattern, and at what produces their inputs; where they match it adds
operations that compute the same, and names those that they replace. Each rule is tried on the
whole network before the next.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.gpu.ir.builder import NetworkBuilder
from toolkit.gpu.ir.network import Attribute, Network, Operation
from toolkit.graph import rewriter as driver
from toolkit.graph.rewriter import Reason, Replacement


@dataclass(frozen=True, slots=True)
class UseDefGraph:
    """A network as rules see it: what produces each tensor, and how often it is read."""

    network: Network
    producers: Mapping[str, Operation]
    reads: Mapping[str, int]

    @classmethod
    def of(cls, network: Network) -> "UseDefGraph":
        """Return the graph of a network; an operation that reads a tensor twice counts once."""
        reads = Counter(name for op in network.operations for name in set(op.inputs))
        reads.update(network.outputs)
        producers = {name: op for op in network.operations for name in op.outputs}
        return cls(network, producers, reads)

    def producer(self, name: str, *kinds: str) -> Operation | None:
        """Return the operation that produces a tensor, if it is of one of these kinds."""
        op = self.producers.get(name)
        return op if op is not None and op.kind in kinds else None

    def sole_producer(self, name: str, *kinds: str) -> Operation | None:
        """Return it if the tensor is read once, so that it need not be computed any more."""
        return self.producer(name, *kinds) if self.reads[name] == 1 else None

    def scalar(self, name: str) -> float | None:
        """Return the value of a floating-point constant of one element."""
        values = self.network.constants.get(name)
        if values is None or values.size != 1 or values.dtype.kind != "f":
            return None
        return float(values.reshape(()))


Match = Replacement[Operation] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern that ends in an operation of one of the `kinds`, names with spaces between.

    `rewrite` adds operations through the rewriter and returns `rewriter.replacement(...)`, or
    `rewriter.replaced_by(...)` for one; None: no match.
    """

    kinds: str
    rewrite: Callable[[UseDefGraph, Operation, "NetworkRewriter"], Match]


def apply_rules(network: Network, rules: Iterable[Rule]) -> Network:
    """Return the network with every match of the rules replaced."""
    for rule in rules:
        target = NetworkRewriter(network)
        if driver.apply_rules(target, (rule,)):
            network = target.network()
    return network


class NetworkRewriter(NetworkBuilder):
    """A network under one rule: the adapter of `toolkit.graph.rewriter`, and what rules add to.

    `operations` are those of the match at hand. Rules see the network as it was before any match.
    """

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._graph = UseDefGraph.of(network)
        self._replaced_by: dict[str, tuple[Operation, ...]] = {}  # first outputs -> operations
        self._matched: tuple[Operation, ...] = ()
        self._mark = self._names.mark()

    def replacement(self, *also: Operation) -> Replacement[Operation]:
        """Return the replacement of the matched operation, and of `also`, by those added."""
        return Replacement((*self._matched, *also), tuple(self.operations))

    def replaced_by(
        self,
        op: Operation,
        kind: str,
        inputs: Sequence[str],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        also: Sequence[Operation] = (),
    ) -> Replacement[Operation]:
        """Add the operation that makes the result of the matched `op`; return the replacement."""
        self.add(op, kind, inputs, op.outputs[0], attributes)
        return self.replacement(*also)

    def network(self) -> Network:
        """Return the network with all replacements: each in the place of the operation matched."""
        operations = (
            new
            for op in self._network.operations
            for new in self._replaced_by.get(op.outputs[0], (op,))
        )
        self.operations = list(operations)
        return super().network()

    def nodes(self) -> Sequence[Operation]:
        """Return the operations in running order."""
        return self._network.operations

    def rules_for(self, node: Operation, rules: Sequence[Rule]) -> Sequence[Rule]:
        """Return the rules whose pattern ends in an operation of this kind."""
        return [rule for rule in rules if node.kind in rule.kinds.split()]

    def match(
        self, rule: Rule, node: Operation, excluded: frozenset[Operation]
    ) -> Replacement[Operation] | Reason:
        """Run a rule on an operation."""
        self.operations, self._matched = [], (node,)
        self._mark = self._names.mark()
        return rule.rewrite(self._graph, node, self) or "it does not match"

    def accept(self, rule: Rule, replacement: Replacement[Operation]) -> None:
        """Accept every replacement."""

    def commit(self, rule: Rule, replacement: Replacement[Operation]) -> None:
        """Keep a replacement; its last operation stands for the ONNX nodes of all replaced."""
        op, *also = replacement.replaced
        names = dict.fromkeys(
            [*(name for operation in also for name in operation.nodes), *op.others]
        )
        *first, last = replacement.nodes
        self._replaced_by.update({operation.outputs[0]: () for operation in also})
        self._replaced_by[op.outputs[0]] = (*first, replace(last, others=tuple(names)))

    def roll_back(self) -> None:
        """Drop the operations, tensors and constants that were added since `match`."""
        self.operations = []
        for name in self._names.roll_back(self._mark):
            for table in (self.shapes, self.dtypes, self.constants, self.integers, self.scales):
                table.pop(name, None)

    def decline(self, rule: Rule, node: Operation, reason: Reason) -> None:
        """Note nothing: no report names patterns that do not match."""
