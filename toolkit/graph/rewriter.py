"""Pattern rewriting, the same for every kind of graph: names, replacements and the driver.

A rule looks at one node. Where it matches it adds new nodes and returns a `Replacement`, else the
`Reason` why not. A graph takes part by an adapter, a `RewriteTarget`: it runs the rule, decides
whether the replacement may stay, and commits it or rolls it back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

NodeT = TypeVar("NodeT")
RuleT = TypeVar("RuleT")

Reason = str
"""Why a rule does not apply at a node, or why its replacement may not stay."""


class UniqueNames:
    """The names in use. New ones are free, the same each time, and can be given back."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = dict.fromkeys(taken)

    def take(self, preferred: str) -> str:
        """Return `preferred`, with a number where it is in use, and mark it as used."""
        name, number = preferred, 1
        while name in self._taken:
            name, number = f"{preferred}_{number}", number + 1
        self._taken[name] = None
        return name

    def mark(self) -> int:
        """Return the current state, for `roll_back`."""
        return len(self._taken)

    def roll_back(self, mark: int) -> tuple[str, ...]:
        """Give back the names taken since `mark`, so that they leave no trace in later ones."""
        return tuple(self._taken.popitem()[0] for _ in range(len(self._taken) - mark))


@dataclass(frozen=True, slots=True)
class Replacement(Generic[NodeT]):
    """`nodes`, in running order, compute what `replaced` computed."""

    replaced: tuple[NodeT, ...]
    nodes: tuple[NodeT, ...]


@dataclass(frozen=True, slots=True)
class Refusal(Generic[NodeT]):
    """Why a graph does not accept a replacement.

    `culprits`: the replaced nodes whose new form is refused. The rule is tried again without them.
    """

    reason: Reason
    culprits: frozenset[NodeT] = frozenset()


class RewriteTarget(Protocol[NodeT, RuleT]):
    """A graph that is rewritten, with at most one replacement open at a time."""

    def nodes(self) -> Iterable[NodeT]:
        """Return the nodes in running order."""
        ...

    def rules_for(self, node: NodeT, rules: Sequence[RuleT]) -> Iterable[RuleT]:
        """Return those of `rules` to try on a node, in order; none if it is not there any more."""
        ...

    def match(
        self, rule: RuleT, node: NodeT, excluded: frozenset[NodeT]
    ) -> Replacement[NodeT] | Reason:
        """Run a rule on a node. `excluded`: nodes that a rule for several must leave out."""
        ...

    def accept(self, rule: RuleT, replacement: Replacement[NodeT]) -> Refusal[NodeT] | None:
        """Return why the replacement of the last `match` may not stay; None if it may."""
        ...

    def commit(self, rule: RuleT, replacement: Replacement[NodeT]) -> None:
        """Keep the accepted replacement."""
        ...

    def roll_back(self) -> None:
        """Undo all that the last `match` and `accept` added: nodes, constants, names."""
        ...

    def decline(self, rule: RuleT, node: NodeT, reason: Reason) -> None:
        """Note that a rule, rolled back, does not apply at a node."""
        ...


def apply_rules(target: RewriteTarget[NodeT, RuleT], rules: Sequence[RuleT]) -> int:
    """Try rules on each node, in running order, until one applies; return how many did.

    New nodes are not visited, and no replaced node is replaced a second time.
    """
    replaced: dict[int, NodeT] = {}  # by identity; the values keep the identities alive
    applied = 0
    for node in tuple(target.nodes()):
        if id(node) not in replaced:
            candidates = target.rules_for(node, rules)
            applied += any(_apply(target, rule, node, replaced) for rule in candidates)
    return applied


def _apply(
    target: RewriteTarget[NodeT, RuleT], rule: RuleT, node: NodeT, replaced: dict[int, NodeT]
) -> bool:
    """Try one rule on one node; return whether it applied. Adds its old nodes to `replaced`."""
    excluded: frozenset[NodeT] = frozenset()
    while True:
        outcome = target.match(rule, node, excluded)
        if not isinstance(outcome, Replacement):
            reason = outcome
            break
        if any(id(member) in replaced for member in outcome.replaced):
            reason = "it includes a node that is replaced already"
            break
        refusal = target.accept(rule, outcome)
        if refusal is None:
            target.commit(rule, outcome)
            replaced.update((id(member), member) for member in outcome.replaced)
            return True
        if not refusal.culprits - excluded or refusal.culprits >= set(outcome.replaced):
            reason = refusal.reason
            break
        target.roll_back()
        excluded |= refusal.culprits
    target.roll_back()
    target.decline(rule, node, reason)
    return False
