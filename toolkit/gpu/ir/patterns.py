"""Patterns of operations that one kernel computes, or that other operators say more simply.

Exporters write attention and normalizations as a handful of operators. A rule looks at one
operation, the last of its pattern, and at what made its inputs; where they fit it adds operations
that compute the same, and names those that they replace. Rules are tried in the order of `RULES`,
each on the whole network.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from toolkit.gpu.ir.network import Network, Operation
from toolkit.gpu.ir.rewriting import Rewriting


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a rule sees of a network: who makes each tensor, and how often it is read."""

    network: Network
    makers: Mapping[str, Operation]
    readers: Mapping[str, int]

    def maker(self, name: str, *kinds: str) -> Operation | None:
        """Return the operation of these kinds that makes a tensor."""
        op = self.makers.get(name)
        return op if op is not None and op.kind in kinds else None

    def own(self, name: str, *kinds: str) -> Operation | None:
        """Return it if nothing else reads the tensor, so that it need not be made."""
        return self.maker(name, *kinds) if self.readers[name] == 1 else None

    def number(self, name: str) -> float | None:
        """Return the value of a constant that is one number."""
        values = self.network.constants.get(name)
        if values is None or values.size != 1 or values.dtype.kind != "f":
            return None
        return float(values.reshape(()))


Rule = Callable[[Surroundings, Operation, Rewriting], "tuple[Operation, ...] | None"]
"""Adds what takes the place of an operation; returns what else is replaced, or None: no match."""


def apply_rules(network: Network, rules: tuple[Rule, ...]) -> Network:
    """Return the network with every match of the rules replaced."""
    for rule in rules:
        network = _apply(network, rule)
    return network


def _apply(network: Network, rule: Rule) -> Network:
    readers = Counter(name for op in network.operations for name in set(op.inputs))
    readers.update(network.outputs)
    makers = {name: op for op in network.operations for name in op.outputs}
    around = Surroundings(network, makers, readers)
    made = Rewriting(network)
    gone: set[str] = set()
    rewritten: set[str] = set()
    for op in network.operations:
        start = len(made.operations)
        replaced = rule(around, op, made)
        # `around` is the network as it was: what a match before this one rewrote is not there.
        if replaced is None or any(one.outputs[0] in rewritten for one in replaced):
            made.operations[start:] = [op]
            continue
        gone |= {one.outputs[0] for one in replaced}
        rewritten |= {one.outputs[0] for one in (op, *replaced)}
        names = tuple(name for one in replaced for name in one.nodes)
        last = made.operations[-1]
        assert len(made.operations) > start
        made.operations[-1] = replace(last, others=tuple(dict.fromkeys((*names, *op.others))))
    made.operations = [op for op in made.operations if op.outputs[0] not in gone]
    return made.network()
