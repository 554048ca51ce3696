"""Every rule that speaks of a node: its value, its limit, and why it holds or not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from device.engine.manifest import Precision
from device.profile import Dla
from toolkit.dla.rules.notes import Note, notes_on
from toolkit.dla.rules.rule import Certainty, Rule, S_contra, Seen, Situation
from toolkit.dla.rules.verdicts import RULES, situation_of
from toolkit.graph.node_view import NodeView

Status = Literal["refused", "ok", "does not apply"]

NOTHING = "nothing that it limits, or not known"


@dataclass(frozen=True, slots=True)
class RuleLine:
    """One rule on one node.

    `actual` is what was found ("" where the rule does not apply), `why` what keeps it from
    applying: the precision, the DLA's generation, the version, or that there is nothing to judge.
    """

    rule: str
    status: Status
    actual: str
    limit: str
    why: str
    hint: str
    certainty: Certainty
    source: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """All rules on one node in the order of the table, and the remarks on its operator."""

    node: str
    op: str
    situation: Situation
    lines: tuple[RuleLine, ...]
    notes: tuple[Note, ...]

    def with_status(self, status: Status) -> tuple[RuleLine, ...]:
        """Return the lines of one status."""
        return tuple(line for line in self.lines if line.status == status)


def explain(
    view: NodeView, dla: Dla, tensorrt: str | None, precision: Precision
) -> tuple[RuleLine, ...]:
    """Return every rule that speaks of the node's operator, in the order of the table.

    `tensorrt` None takes the version of the generation's last JetPack. The lines "refused" are the
    verdicts of `judge`.

    Raises PlanError: `tensorrt` is not numbers separated by dots.
    """
    return rule_lines(RULES, view, situation_of(dla, tensorrt, precision))


def explain_node(
    view: NodeView, dla: Dla, tensorrt: str | None, precision: Precision
) -> Explanation:
    """Return the lines of `explain` with the remarks on the operator.

    Raises PlanError: `tensorrt` is not numbers separated by dots.
    """
    situation = situation_of(dla, tensorrt, precision)
    lines = rule_lines(RULES, view, situation)
    return Explanation(view.name, view.op, situation, lines, notes_on(view.op, situation))


def rule_lines(
    rules: Sequence[Rule[S_contra]], subject: S_contra, situation: Situation
) -> tuple[RuleLine, ...]:
    """Return one line for each of `rules` that speaks of `subject`."""
    return tuple(_line(rule, subject, situation) for rule in rules if rule.binds(subject.op))


def _line(rule: Rule[S_contra], subject: S_contra, situation: Situation) -> RuleLine:
    why, actual, hint = rule.idle(situation), "", ""
    status: Status = "does not apply"
    if not why:
        seen, verdict = rule.see(subject), rule.verdict(subject)
        if verdict is not None:
            actual, status, hint = verdict.actual, "refused", verdict.hint
        elif seen:
            actual, status = _strongest(seen).text, "ok"
        else:
            why = NOTHING
    return RuleLine(
        rule=rule.id,
        status=status,
        actual=actual,
        limit=rule.limit_text,
        why=why,
        hint=hint,
        certainty=rule.certainty,
        source=rule.source,
    )


def _strongest(seen: Sequence[Seen]) -> Seen:
    """Return the largest number, or the first of other values."""
    numbers = [s.value for s in seen if isinstance(s.value, (int, float))]
    return seen[numbers.index(max(numbers))] if len(numbers) == len(seen) else seen[0]


_HEADINGS: tuple[tuple[Status, str], ...] = (
    ("refused", "refused by"),
    ("ok", "within"),
    ("does not apply", "do not apply"),
)


def render_explanation(explanation: Explanation) -> str:
    """Return an explanation as text: what refuses first, then what holds, then what is idle."""
    situation = explanation.situation
    version = ".".join(map(str, situation.tensorrt))
    lines = [
        f"{explanation.node} ({explanation.op}) on DLA {situation.generation}, "
        f"{situation.precision}, TensorRT {version}: {_summary(explanation)}"
    ]
    width = max((len(line.rule) for line in explanation.lines), default=0)
    for status, heading in _HEADINGS:
        found = explanation.with_status(status)
        if found:
            lines += ["", heading]
            for line in found:
                lines += _text(line, width)
    if explanation.notes:
        lines += ["", "remarks"]
        for note in explanation.notes:
            lines.append(f"  {note.text} ({note.certainty}: {note.source})")
    return "\n".join(lines) + "\n"


def _summary(explanation: Explanation) -> str:
    refused, count = len(explanation.with_status("refused")), len(explanation.lines)
    if not refused:
        return f"none of {count} rules refuses it"
    return f"{refused} of {count} rules refuse{'s' if refused == 1 else ''} it"


def _text(line: RuleLine, width: int) -> list[str]:
    found = {
        "refused": f"{line.actual}, but {line.limit}",
        "ok": f"{line.actual}: {line.limit}",
        "does not apply": f"({line.why}) {line.limit}",
    }[line.status]
    indent = " " * (width + 4)
    text = [f"  {line.rule.ljust(width)}  {found}", f"{indent}{line.certainty}: {line.source}"]
    return text + ([f"{indent}helps: {line.hint}"] if line.hint else [])
