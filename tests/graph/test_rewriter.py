"""The rewriter that legalization and GPU patterns share: names, order, acceptance, rolling back."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.gpu.ir import patterns
from toolkit.gpu.ir.network import Network, Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, UseDefGraph, apply_rules
from toolkit.graph import rewriter
from toolkit.graph.rewriter import Reason, Refusal, Replacement, UniqueNames


def test_names_are_free_and_rolling_back_leaves_no_trace():
    names = UniqueNames(["x", "y"])
    mark = names.mark()
    assert [names.take("x"), names.take("x"), names.take("z")] == ["x_1", "x_2", "z"]
    assert set(names.roll_back(mark)) == {"x_1", "x_2", "z"}
    assert names.take("x") == "x_1"


Rule = Callable[["Letters", str, frozenset[str]], Replacement[str] | Reason]


@dataclass
class Letters:
    """Nodes that are letters: what was tried, applied, and declined for which reason."""

    letters: str
    refused: dict[str, Refusal[str]] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    applied: list[Replacement[str]] = field(default_factory=list)
    declined: dict[str, Reason] = field(default_factory=dict)
    rolled_back: int = 0

    def nodes(self) -> Iterable[str]:
        return list(self.letters)

    def rules_for(self, node: str, rules: Sequence[Rule]) -> Sequence[Rule]:
        return rules

    def match(self, rule: Rule, node: str, excluded: frozenset[str]) -> Replacement[str] | Reason:
        self.tried.append(node)
        return rule(self, node, excluded)

    def accept(self, rule: Rule, replacement: Replacement[str]) -> Refusal[str] | None:
        return self.refused.get("".join(replacement.replaced))

    def commit(self, rule: Rule, replacement: Replacement[str]) -> None:
        self.applied.append(replacement)

    def roll_back(self) -> None:
        self.rolled_back += 1

    def decline(self, rule: Rule, node: str, reason: Reason) -> None:
        self.declined[node] = reason


def pair(target: Letters, node: str, excluded: frozenset[str]) -> Replacement[str] | Reason:
    """Replace a letter and the one before it."""
    at = target.letters.index(node)
    if at == 0:
        return "nothing is before it"
    both = [one for one in (node, target.letters[at - 1]) if one not in excluded]
    return Replacement(tuple(both), (node.upper(),))


def test_no_node_is_replaced_twice():
    target = Letters("abcd")
    assert rewriter.apply_rules(target, (pair,)) == 2
    assert [one.replaced for one in target.applied] == [("b", "a"), ("d", "c")]
    assert target.declined == {
        "a": "nothing is before it",
        "c": "it includes a node that is replaced already",
    }
    assert target.rolled_back == 2


def test_the_first_rule_that_applies_is_the_last_that_is_tried():
    def never(target: Letters, node: str, excluded: frozenset[str]) -> Reason:
        return "never"

    target = Letters("ab")
    assert rewriter.apply_rules(target, (never, pair, never)) == 1
    assert target.tried == ["a", "a", "a", "b", "b"]


def test_a_refused_replacement_is_tried_again_without_its_culprits():
    target = Letters("ab", {"ba": Refusal("a is refused", frozenset("a"))})
    assert rewriter.apply_rules(target, (pair,)) == 1
    assert [one.replaced for one in target.applied] == [("b",)]
    assert target.rolled_back == 2  # of a, and of b with a


def test_a_replacement_of_culprits_alone_is_not_tried_again():
    target = Letters("ab", {"ba": Refusal("both are refused", frozenset("ab"))})
    assert rewriter.apply_rules(target, (pair,)) == 0
    assert target.declined["b"] == "both are refused"


def chain(*kinds: str) -> Network:
    """Operations that each read the result of the one before."""
    operations = [
        Operation(kind, f"n{at}", (f"t{at}",), (f"t{at + 1}",), {}) for at, kind in enumerate(kinds)
    ]
    tensors = [f"t{at}" for at in range(len(kinds) + 1)]
    return Network(
        tuple(operations),
        ("t0",),
        (tensors[-1],),
        dict.fromkeys(tensors, (2,)),
        dict.fromkeys(tensors, "float32"),
        {"one": np.ones(1)},
    )


def twice(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Relu(Relu(x)) -> Relu(x), by way of a constant that a match that fails leaves nowhere."""
    rewriter.constant("one", np.ones(1))
    first = graph.sole_producer(op.inputs[0], "Relu")
    if first is None:
        return None
    return rewriter.replaced_by(op, "Relu", first.inputs, also=(first,))


TWICE = (patterns.Rule("Relu", twice),)


def test_a_pattern_computes_all_nodes_that_it_replaced():
    network = apply_rules(chain("Exp", "Relu", "Relu", "Exp"), TWICE)
    assert [op.kind for op in network.operations] == ["Exp", "Relu", "Exp"]
    assert network.operations[1].nodes == ("n1", "n2")
    assert network.operations[1].inputs == ("t1",)
    assert set(network.constants) == {"one", "one_1"}  # of the match alone


def test_patterns_see_the_network_as_it_was():
    once = apply_rules(chain("Relu", "Relu", "Relu", "Relu"), TWICE)
    assert [op.nodes for op in once.operations] == [("n0", "n1"), ("n2", "n3")]
    assert [op.nodes for op in apply_rules(once, TWICE).operations] == [("n0", "n1", "n2", "n3")]


def test_a_network_without_matches_is_returned_as_it_is():
    network = chain("Exp", "Relu")
    assert apply_rules(network, TWICE) is network
