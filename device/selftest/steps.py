"""The steps of a selftest, in running order: what each works through, and how long it may take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from device.selftest.kit import Kit
from device.selftest.report import (
    DemoRow,
    KernelRow,
    Machine,
    NetworkRow,
    RecordedRow,
    RuleRow,
    TacticRow,
)

MINUTES = 20.0
_MARGIN = 0.97  # of the time: the rest is for starts of processes and the file


@dataclass(frozen=True, slots=True)
class Step:
    """One row of STEPS.

    `items`: what of the kit it works through, one after the other. `result`: the row that an item
    gives, and `failed` that of one that gives none (item, problem). `item_s`: seconds that one item
    may take; `share`: the step's part of the selftest's time. What a step does not use is the
    next one's.
    """

    name: str
    items: Callable[[Kit], tuple[str, ...]]
    result: type[Any]
    failed: Callable[[Kit, str, str], Any]
    item_s: float
    share: float


def rule_row(kit: Kit, item: str, problem: str = "") -> RuleRow:
    """Return the row of a case of a rule before it is tried."""
    case = next(case for case in kit.rules if case.name == item)
    return RuleRow(
        item=item,
        rule=case.rule,
        side=case.side,
        op=case.op,
        precision=case.precision,
        certainty=case.certainty,
        expected=case.expected,
        problem=problem,
    )


def network_row(kit: Kit, item: str, problem: str = "") -> NetworkRow:
    """Return the row of a network before it runs."""
    case = next(case for case in kit.networks if case.name == item)
    return NetworkRow(
        item=item,
        network=case.network,
        variant=case.variant,
        precision=case.precision,
        model_sha256=case.model_sha256,
        problem=problem,
    )


def _plain_row(kind: type[Any]) -> Callable[[Kit, str, str], Any]:
    return lambda kit, item, problem: kind(item=item, problem=problem)


def _on(processor: str) -> Callable[[Kit], tuple[str, ...]]:
    return lambda kit: tuple(row.name for row in kit.references if row.on == processor)


# What says most about a whole implementation in the least time comes first: a selftest that is
# ended early has the answers to the large questions. docs/board_kit.md has the measured run.
STEPS: tuple[Step, ...] = (
    Step("machine", lambda kit: ("machine",), Machine,
         lambda kit, item, problem: Machine(problem=problem), item_s=60.0, share=0.02),
    Step("kernels", _on("gpu"), KernelRow, _plain_row(KernelRow), item_s=60.0, share=0.12),
    Step("dla", _on("dla"), RecordedRow, _plain_row(RecordedRow), item_s=100.0, share=0.06),
    Step("demo", lambda kit: ("demo",) if kit.demo else (), DemoRow, _plain_row(DemoRow),
         item_s=60.0, share=0.03),
    Step("rules", lambda kit: tuple(case.name for case in kit.rules), RuleRow, rule_row,
         item_s=30.0, share=0.30),
    Step("networks", lambda kit: tuple(case.name for case in kit.networks), NetworkRow,
         network_row, item_s=150.0, share=0.47),
    # Of jobs of a farm alone: other kits name none, as `kernels` times all.
    Step("tactics", lambda kit: tuple(case.name for case in kit.tactics), TacticRow,
         _plain_row(TacticRow), item_s=150.0, share=0.0),
)  # fmt: skip


def deadlines_s(minutes: float) -> tuple[float, ...]:
    """Return when each step must have ended, in seconds from the start."""
    total, times = 0.0, []
    for step in STEPS:
        total += step.share * minutes * 60 * _MARGIN
        times.append(total)
    return tuple(times)
