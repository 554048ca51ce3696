"""A report of a board as a change of this repository, which `git apply` takes and a person reviews.

    configs/published_figures.csv   a row for each network that ran whole on the DLA
    toolkit/dla/rules/*.py          "recalled" becomes "observed" where both sides are confirmed

What the board contradicts is never changed by itself: it stands at the head of the patch, with the
place of the rule. `python -m scripts.read_board_report REPORT --patch FILE` writes it.
"""

import csv
import difflib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from device.selftest.report import Report
from scripts.cost_rows import figure_rows
from scripts.rule_corrections import RuleSummary, summarize_rules

ROOT = Path(__file__).parents[1]
FIGURES = Path("configs/published_figures.csv")
RULES = Path("toolkit/dla/rules")
_RULE = re.compile(r'Rule\(id="([\w.-]+)".*?(?=\n    Rule\(|\n\)|\Z)', re.DOTALL)
_RECALLED = 'certainty="recalled"'


@dataclass(frozen=True, slots=True)
class Change:
    """`head`: what a reviewer reads first; `files`: path below the root -> old and new text."""

    head: tuple[str, ...]
    files: dict[Path, tuple[str, str]]

    @property
    def patch(self) -> str:
        """The whole as text; `git apply` skips the head."""
        # Texts of a report come from outside: none begins a line, which git could take for a diff.
        lines = [f"# {' '.join(line.split())}\n" for line in (*self.head, "")]
        for path, (old, new) in self.files.items():
            lines += difflib.unified_diff(
                old.splitlines(keepends=True),
                new.splitlines(keepends=True),
                f"a/{path.as_posix()}",
                f"b/{path.as_posix()}",
            )
        return "".join(lines)


def change_of(report: Report, root: Path = ROOT) -> Change:
    """Return what a report changes in the repository at `root`."""
    rules = summarize_rules(report)
    texts = {path: (root / path).read_text() for path in (FIGURES, *_rule_files(root))}
    changed = {FIGURES: _with_figures(texts[FIGURES], report)}
    confirmed = frozenset(rules.confirmed)
    changed |= {path: _observed(texts[path], confirmed) for path in _rule_files(root)}
    return Change(
        head=tuple(_head(report, rules, root)),
        files={path: (texts[path], new) for path, new in changed.items() if new != texts[path]},
    )


def _with_figures(text: str, report: Report) -> str:
    """Add the report's rows; a row that is there, of the same report, stays the only one."""
    fields = next(csv.reader(io.StringIO(text)))
    present = set(text.splitlines())
    rows, _ = figure_rows(report)
    for _, row in rows:
        line = io.StringIO()
        plain = {name: " ".join(value.split()) for name, value in row.items()}
        csv.DictWriter(line, fields, lineterminator="\n").writerow(plain)
        if line.getvalue().rstrip("\n") not in present:
            text += line.getvalue()
    return text


def _observed(text: str, confirmed: frozenset[str]) -> str:
    def certain(match: re.Match[str]) -> str:
        if match[1] not in confirmed:
            return match[0]
        return match[0].replace(_RECALLED, 'certainty="observed"')

    return _RULE.sub(certain, text)


def _head(report: Report, rules: RuleSummary, root: Path) -> Iterator[str]:
    machine = report.machine
    yield (
        f"Report of {machine.model or report.profile}, L4T {machine.l4t or 'unknown'}, TensorRT "
        f"{machine.tensorrt or 'unknown'}, kit {report.kit[:8]}."
    )
    figures, unused = figure_rows(report)
    yield f"Figures: {len(figures)} networks on the DLA; then python -m scripts.fit_costs --write"
    for row in unused:
        yield f"  not used: {row.reason}"
    yield (
        f"Rules: {len(rules.confirmed)} confirmed on both sides, {len(rules.one_sided)} on one, "
        f"{len(rules.unknown)} cases without an answer."
    )
    for correction in rules.corrections:
        yield f"To decide by hand: {_place(correction.rule, root)}: {correction.text}"
    for item in rules.disputed:
        yield f"To look at: can_run_on_DLA and the build disagree on {item}"


def _place(rule: str, root: Path) -> str:
    for path in _rule_files(root):
        for number, line in enumerate((root / path).read_text().splitlines(), start=1):
            if f'id="{rule}"' in line:
                return f"{path.as_posix()}:{number}"
    return RULES.as_posix()


def _rule_files(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in (root / RULES).glob("*.py"))
