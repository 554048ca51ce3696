"""What a report says of the DLA's rules: which it confirms, and which it corrects.

A case that the table lets onto the DLA and TensorRT refuses, or the other way round, is a
correction. `can_run_on_DLA` is TensorRT's own table; whether a loadable was built is the proof. A
case at the limit that more rules judge says only that one of them is wrong.
"""

from dataclasses import dataclass
from typing import Literal

from device.selftest.report import Report, RuleRow

Kind = Literal["too strict", "too lax"]


@dataclass(frozen=True, slots=True)
class Correction:
    """A case in which the board contradicts the rule table.

    "too strict": the table refuses what the DLA runs; "too lax": it takes what the DLA refuses.
    """

    rule: str
    case: str
    op: str
    precision: str
    kind: Kind
    certainty: str
    tensorrt_message: str

    @property
    def text(self) -> str:
        """The correction in a sentence."""
        what = {
            "too strict": f"{self.op} beyond its limit runs on the DLA",
            "too lax": f"{self.op} within its limit does not run on the DLA",
        }[self.kind]
        reason = f": {self.tensorrt_message}" if self.tensorrt_message else ""
        return f"{self.rule} ({self.certainty}) is {self.kind}: {what} in {self.precision}{reason}"


@dataclass(frozen=True, slots=True)
class RuleSummary:
    """The rules of a report: confirmed on both sides, on one, corrected, and without an answer.

    `disputed`: cases in which can_run_on_DLA and the build disagree; the build counts.
    """

    confirmed: tuple[str, ...]
    one_sided: tuple[str, ...]
    corrections: tuple[Correction, ...]
    disputed: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]


def summarize_rules(report: Report) -> RuleSummary:
    """Return what a report says of the rule table."""
    answered = [(row, answer) for row in report.rules if (answer := answer_of(row)) is not None]
    corrections = tuple(
        _correction(row, takes=answer) for row, answer in answered if answer != row.expected
    )
    wrong = {row.rule for row, answer in answered if answer != row.expected}
    sides: dict[str, set[str]] = {}
    for row, _ in answered:
        sides.setdefault(row.rule, set()).add(row.side)
    return RuleSummary(
        confirmed=tuple(r for r, seen in sides.items() if r not in wrong and len(seen) == 2),
        one_sided=tuple(r for r, seen in sides.items() if r not in wrong and len(seen) == 1),
        corrections=corrections,
        disputed=tuple(
            row.item
            for row in report.rules
            if row.can_run is not None and row.built is not None and row.can_run != row.built
        ),
        unknown=tuple(
            (row.item, row.problem or "no answer") for row in report.rules if answer_of(row) is None
        ),
    )


def answer_of(row: RuleRow) -> bool | None:
    """Return whether the DLA takes a case: by the build, or else by can_run_on_DLA."""
    if row.problem:
        return None
    return row.can_run if row.built is None else row.built


def _correction(row: RuleRow, *, takes: bool) -> Correction:
    return Correction(
        rule=row.rule,
        case=row.item,
        op=row.op,
        precision=row.precision,
        kind="too strict" if takes else "too lax",
        certainty=row.certainty,
        tensorrt_message=row.message,
    )
