"""Explain the rules on a node: the value, the limit, and why a rule does not apply."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from device.engine.manifest import Precision
from device.profile import Dla
from toolkit.dla.rules.notes import Note, notes_on
from toolkit.dla.rules.rule import Certainty, Fact, Rule, S_contra, Situation, version_text
from toolkit.dla.rules.verdicts import RULES, situation_of
from toolkit.graph.node_view import NodeView

Status = Literal["refused", "ok", "does not apply"]

NOTHING = "nothing that it limits, or not known"


@dataclass(frozen=True, slots=True)
class RuleLine:
    """One rule on one node.

    `actual`: the value of the node ("" if the rule does not apply). `why`: why it does not apply:
    precision, generation of the DLA, TensorRT version, or nothing to judge.
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
    """All rules on a node in table order, and the remarks on its operator."""

    node: str
    op: str
    situation: Situation
    lines: tuple[RuleLine, ...]
    notes: tuple[Note, ...]

    def with_status(self, status: Status) -> tuple[RuleLine, ...]:
        """Return the lines of one status."""
        return tuple(line for line in self.lines if line.status == status)


def explain_node(
    view: NodeView, dla: Dla, tensorrt: str | None, precision: Precision
) -> Explanation:
    """Return every rule on the node's operator, in table order, with the remarks on it.

    `tensorrt` None: the version of the generation's last JetPack. The lines "refused" are the
    verdicts of `judge`.

    Raises PlanError: `tensorrt` is not numbers separated by dots.
    """
    situation = situation_of(dla, tensorrt, precision)
    lines = rule_lines(RULES, view, situation)
    return Explanation(view.name, view.op, situation, lines, notes_on(view.op, situation))


def rule_lines(
    rules: Sequence[Rule[S_contra]], subject: S_contra, situation: Situation
) -> tuple[RuleLine, ...]:
    """Return a line for each of `rules` that binds `subject`."""
    return tuple(_line(rule, subject, situation) for rule in rules if rule.binds(subject.op))


def _line(rule: Rule[S_contra], subject: S_contra, situation: Situation) -> RuleLine:
    why, actual, hint = rule.why_inactive(situation), "", ""
    status: Status = "does not apply"
    if not why:
        facts, verdict = rule.facts(subject), rule.verdict(subject)
        if verdict is not None:
            actual, status, hint = verdict.actual, "refused", verdict.hint
        elif facts:
            actual, status = _strongest(facts).text, "ok"
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


def _strongest(facts: Sequence[Fact]) -> Fact:
    """Return the largest number, or the first of other values."""
    numbers = [fact.value for fact in facts if isinstance(fact.value, (int, float))]
    return facts[numbers.index(max(numbers))] if len(numbers) == len(facts) else facts[0]


_HEADINGS: tuple[tuple[Status, str], ...] = (
    ("refused", "refused by"),
    ("ok", "within"),
    ("does not apply", "do not apply"),
)


def render_explanation(explanation: Explanation) -> str:
    """Return an explanation as text: refusals, then fulfilled rules, then the others."""
    situation = explanation.situation
    version = version_text(situation.tensorrt)
    lines = [
        f"{explanation.node} ({explanation.op}) on DLA {situation.generation}, "
        f"{situation.precision}, TensorRT {version}: {_summary(explanation)}"
    ]
    width = max((len(line.rule) for line in explanation.lines), default=0)
    for status, heading in _HEADINGS:
        status_lines = explanation.with_status(status)
        if status_lines:
            lines += ["", heading]
            for line in status_lines:
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
    statement = {
        "refused": f"{line.actual}, but {line.limit}",
        "ok": f"{line.actual}: {line.limit}",
        "does not apply": f"({line.why}) {line.limit}",
    }[line.status]
    indent = " " * (width + 4)
    text = [f"  {line.rule.ljust(width)}  {statement}", f"{indent}{line.certainty}: {line.source}"]
    return text + ([f"{indent}helps: {line.hint}"] if line.hint else [])
