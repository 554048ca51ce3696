"""What one DLA core holds and how tensors lie at its border, at each limit and one beyond it."""

from dataclasses import dataclass

import pytest
from planning_graphs import constant, one_node

from scripts.dla_cases import V2, conv, relu
from toolkit.dla.rules.explain import rule_lines
from toolkit.dla.rules.formats import FORMAT_RULES, BoundaryTensor
from toolkit.dla.rules.memory import (
    CORE_RULES,
    LOADABLE_RULES,
    Core,
    Loadable,
    stored_bytes,
)
from toolkit.dla.rules.rule import Situation, parse_version
from toolkit.dla.rules.verdicts import situation_of

ALL_RULES = CORE_RULES + LOADABLE_RULES + FORMAT_RULES
ORIN = situation_of(V2, "10.3", "int8")


def at(version: str, generation: str = "v2") -> Situation:
    return Situation(generation, parse_version(version), "int8")


def held(*batches: int, weights: int = 0, intermediates: int = 0) -> Loadable:
    return Loadable("segment", batches or (1,), weights, intermediates)


def border(
    name: str = "chw32",
    side: str = "input",
    shape: tuple[int, ...] = (1, 3, 8, 8),
    precision: str = "int8",
    **options: object,
) -> BoundaryTensor:
    return BoundaryTensor("x", name, side, shape, precision, **options)


def hwc4(**options: object) -> BoundaryTensor:
    return border("dla_hwc4", **options)


@dataclass(frozen=True)
class Case:
    """A rule, what it lets pass and what it refuses, and for which builds."""

    rule: str
    passes: object
    fails: object
    situation: Situation = ORIN


MIB = 1024 * 1024
CASES = (
    Case("G6", Core("dla0", 16), Core("dla0", 17)),
    Case("G6", Core("dla0", 16), Core("dla0", 17), at("8.5")),
    Case("G6.8-4", Core("dla0", 4), Core("dla0", 5), at("8.4.9")),
    Case("G6.8-4", Core("dla0", 4), Core("dla0", 5), at("8.0")),
    Case("G6.7", Core("dla0", 8), Core("dla0", 9), at("7.1.3")),
    Case("G7", held(2, 2, 2), held(2, 2, 4)),
    Case("G8", held(intermediates=1024 * MIB - 1), held(intermediates=1024 * MIB)),
    Case("G9", held(weights=512 * MIB - 1), held(weights=512 * MIB)),
    Case("format.rank", border(shape=(1, 3, 8, 8)), border(shape=(1, 3, 8))),
    Case("format.precision", border("dla_linear"), border("dla_linear", precision="fp32")),
    Case("format.precision", hwc4(), hwc4(precision="fp32")),
    Case("chw16.precision", border("chw16", precision="fp16"), border("chw16")),
    Case("chw32.precision", border("chw32"), border("chw32", precision="fp16")),
    Case("hwc4.side", hwc4(), hwc4(side="output")),
    Case("hwc4.channels", hwc4(shape=(1, 4, 8, 8)), hwc4(shape=(1, 5, 8, 8))),
    Case("hwc4.channels", hwc4(shape=(1, 1, 8, 8)), hwc4(shape=(1, 2, 8, 8))),
    Case("hwc4.reader", hwc4(readers=(conv(),)), hwc4(readers=(conv(), relu(1, 3, 8, 8)))),
    Case("hwc4.precision", hwc4(reader_precision="int8"), hwc4(reader_precision="fp16")),
    Case(
        "hwc4.groups",
        hwc4(readers=(conv((1, 4, 8, 8), 4, group=4),)),
        hwc4(readers=(conv((1, 5, 8, 8), 5, group=5),)),
    ),
)


def refused_by(subject: object, situation: Situation) -> set[str]:
    rules = {
        Core: CORE_RULES,
        Loadable: LOADABLE_RULES,
        BoundaryTensor: FORMAT_RULES,
    }[type(subject)]
    lines = rule_lines(rules, subject, situation)
    return {line.rule for line in lines if line.status == "refused"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_subject_at_the_limit_passes_and_one_beyond_is_refused(case):
    assert refused_by(case.passes, case.situation) == set()
    assert refused_by(case.fails, case.situation) == {case.rule}


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} == {rule.id for rule in ALL_RULES}
    assert len({rule.id for rule in ALL_RULES}) == len(ALL_RULES)


def test_one_cap_of_loadables_holds_in_every_version():
    for version in ("5.0", "7.9", "8.0", "8.4.9", "8.5", "10.3", "11.4.1"):
        lines = rule_lines(CORE_RULES, Core("dla0", 1), at(version))
        assert [line.status for line in lines].count("ok") == 1


def test_weights_of_convolutions_have_the_precision_and_other_constants_are_filled_up():
    weights = constant(10, 8, 3, 3)
    convolution = one_node("Conv", [(1, 8, 9, 9), weights, constant(10)], (1, 10, 7, 7))
    assert stored_bytes(convolution, "int8", "v2") == 720 + 4 * 10
    assert stored_bytes(convolution, "fp16", "v2") == 1440 + 4 * 10
    added = one_node("Add", [(1, 20, 4, 4), constant(1, 20, 1, 1)], (1, 20, 4, 4))
    assert stored_bytes(added, "int8", "v2") == 4 * 32
    assert stored_bytes(added, "fp16", "v2") == 4 * 32
    assert stored_bytes(added, "fp16", "v1") == 2 * 20
    whole = one_node("Mul", [(1, 17, 4, 4), constant(1, 17, 4, 4)], (1, 17, 4, 4))
    assert stored_bytes(whole, "fp16", "v2") == 4 * 32 * 16
    norm = one_node("BatchNormalization", [(1, 40, 4, 4), *[constant(40)] * 4], (1, 40, 4, 4))
    assert stored_bytes(norm, "int8", "v2") == 4 * 4 * 64
    assert stored_bytes(relu(1, 8, 4, 4), "int8", "v2") == 0
