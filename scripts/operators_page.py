"""Render docs/operators.md from the outcomes of the ONNX backend suite."""

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from scripts.backend_suite import KINDS, Outcome
from toolkit.gpu.ir.dtypes import ELEMENT_TYPES
from toolkit.gpu.ir.expressions import is_elementwise
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.operations import OPERATIONS

SEVERAL = "several"  # in place of an operator: a test's graph is no single node


@dataclass(frozen=True, slots=True)
class Peer:
    """Results of another backend on the same suite: (passed, tests) by kind."""

    name: str
    how: str
    shares: Mapping[str, tuple[int, int]]


# All with the tests of onnx 1.23.2. The first two ran on this suite's CPU variants, with nothing
# left out: onnxruntime's own backend (CPU provider), and tinygrad's, whose slow Python device did
# not get through the other kinds. onnx-tensorrt's is what the include list of its
# onnx_backend_test.py (commit 96e7811) lets run, not what passes.
PEERS = (
    Peer(
        "onnxruntime 1.31.1",
        "measured on a CPU",
        {
            "node": (1345, 1884),
            "real": (9, 9),
            "simple": (17, 23),
            "pytorch-converted": (59, 82),
            "pytorch-operator": (24, 35),
        },
    ),
    Peer("tinygrad 0.14.0", "measured on a CPU, device PYTHON", {"node": (1226, 1884)}),
    Peer(
        "onnx-tensorrt",
        "enabled in its own test list",
        {
            "node": (580, 1884),
            "real": (9, 9),
            "simple": (1, 23),
            "pytorch-converted": (66, 82),
            "pytorch-operator": (26, 35),
        },
    ),
)

# Why tests come out wrong, by the pattern of their names.
_CAUSES = (
    (
        r"_add_(broadcast|size1_\w+)|_addconstant",
        "its doubles, up to 1e+228 and down to 1e-322, are beyond FP32",
    ),
    (
        r"_align_corners$",
        "the suite aligns corners to the scaled size before it is rounded, kernels and onnxruntime "
        "to the size that the result has",
    ),
)

_HEAD = """\
# Operators on the GPU

Written by `python -m scripts.onnx_backend --write`. Every test of the ONNX backend suite (onnx
{onnx}) goes through the GPU path: import, passes, one GPU segment, and its kernels in Triton's
interpreter on the CPU, on memory filled with NaN. FP32 build; the suite's own comparison and
tolerances, types and shapes included. Names of the tests that pass:
`tests/golden/onnx_backend_gpu.txt`; `tests/gpu/test_gpu_backend.py` runs them again.

An engine is compiled for its parameters: shapes, axes, pads, weights of convolutions. The suite
feeds many of them as inputs. A test that is not covered as it stands is tried again with these
inputs as constants of the model (`PARAMETERS` in `scripts/backend_suite.py`), as they are in
networks; the tables count such tests apart. An operator in such a case runs in a portable segment
when its parameters come as inputs.

## Shares
"""

_TYPES = """\
"Not covered" means that the build says so, with node and reason, and leaves the segment to
onnxruntime. Doubles are computed with as FP32: those beyond its range become infinite or 0. Tests
of strings, sequences, FP8, FP4, INT4, INT2 and BF16 are counted as tests like all others; so are
those of training.

## Operators

*how*: `kernel` of its own, `steps` of an element-wise expression inside other kernels,
`definition` by other operators (the function in the ONNX standard), `rewritten` as others or
computed while building. Tests are the node tests of the operator, those of its expanded definition
included.
"""
_WIDTH = 99


def render(
    outcomes: Mapping[str, Outcome],
    operators: Mapping[str, str],
    compiled: Mapping[str, str] | None = None,
) -> str:
    """Return the page; `operators` has the operator of each node test, or SEVERAL.

    `compiled`: status of tests that ran on a GPU, "passed" or another text.
    """
    parts = [_HEAD.format(onnx=onnx.__version__), *_shares(outcomes)]
    wrong = [name.split("/")[1] for name, outcome in outcomes.items() if outcome.status == "wrong"]
    for name in sorted(wrong):
        why = next((text for pattern, text in _CAUSES if re.search(pattern, name)), "not known why")
        parts += ["", *textwrap.wrap(f"Wrong: `{name}` ({why}).", _WIDTH, break_on_hyphens=False)]
    late = sorted(
        name.split("/")[1] for name, outcome in outcomes.items() if outcome.status == "error"
    )
    if late:
        names = ", ".join(f"`{name}`" for name in late)
        text = f"Not run to their end, because the interpreter needs minutes for them: {names}."
        parts += ["", *textwrap.wrap(text, _WIDTH, break_on_hyphens=False)]
    if compiled:
        text = compiled_text(outcomes, compiled)
        parts += ["", *textwrap.wrap(text, _WIDTH, break_on_hyphens=False)]
    types = f"Tensors that kernels read and write: {', '.join(ELEMENT_TYPES)}."
    parts += ["", *textwrap.wrap(types, _WIDTH), "", _TYPES]
    parts += _operators(outcomes, operators)
    return "\n".join(parts).rstrip() + "\n"


def compiled_text(outcomes: Mapping[str, Outcome], compiled: Mapping[str, str]) -> str:
    """Summarize how many tests that pass or time out in the interpreter pass on a GPU."""

    def share(status: str) -> tuple[int, int, list[str]]:
        of = [n for n, outcome in outcomes.items() if outcome.status == status and n in compiled]
        failed = sorted(n.split("/")[1] for n in of if compiled[n] != "passed")
        return len(of) - len(failed), len(of), failed

    (passed, of, failed), (late_passed, late, late_failed) = share("passed"), share("error")
    known = sum(outcome.status == "passed" for outcome in outcomes.values())
    text = (
        f"Compiled for an H200 and run there: {of} of the {known} tests that pass in the "
        f"interpreter, of which {passed} gave the expected result"
    )
    text += f"; of those that it does not finish {late_passed} of {late}." if late else "."
    names = ", ".join(f"`{name}`" for name in (*failed, *late_failed))
    return f"{text} Not: {names}." if names else text


def _shares(outcomes: Mapping[str, Outcome]) -> list[str]:
    peers = "".join(f" {peer.name} ({peer.how}) |" for peer in PEERS)
    lines = [
        f"| tests | all | pass | as they stand | with constants | not covered | other |{peers}",
        f"|---|--:|--:|--:|--:|--:|--:|{'--:|' * len(PEERS)}",
    ]
    for kind in KINDS:
        kind_outcomes = [
            outcome for name, outcome in outcomes.items() if name.startswith(f"{kind}/")
        ]
        lines.append(_share_row(kind, kind_outcomes, [peer.shares.get(kind) for peer in PEERS]))
    sums = [_sum(peer) for peer in PEERS]
    lines.append(_share_row("all", list(outcomes.values()), sums))
    return lines


def _sum(peer: Peer) -> tuple[int, int] | None:
    if set(peer.shares) != set(KINDS):
        return None
    return sum(p for p, _ in peer.shares.values()), sum(t for _, t in peer.shares.values())


def _share_row(
    kind: str, outcomes: Sequence[Outcome], peers: Sequence[tuple[int, int] | None]
) -> str:
    passed = [outcome for outcome in outcomes if outcome.status == "passed"]
    fixed = sum(outcome.fixed for outcome in passed)
    refused = sum(outcome.status == "not covered" for outcome in outcomes)
    cells = [
        kind,
        f"{len(outcomes)}",
        f"{len(passed)} ({_percent(len(passed), len(outcomes))})",
        f"{len(passed) - fixed}",
        f"{fixed}",
        f"{refused}",
        f"{len(outcomes) - len(passed) - refused}",
        *("" if peer is None else f"{peer[0]} of {peer[1]} ({_percent(*peer)})" for peer in peers),
    ]
    return f"| {' | '.join(cells)} |"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def _operators(outcomes: Mapping[str, Outcome], operators: Mapping[str, str]) -> list[str]:
    groups: dict[str, list[Outcome]] = {}
    for name, operator in operators.items():
        groups.setdefault(operator, []).append(outcomes[name])
    lines = [
        "| operator | how | pass | of | with constants | what stops others (tests) |",
        "|---|---|--:|--:|--:|---|",
    ]
    lowered = {operator for operator, row in OPERATIONS.items() if row.lower}
    for operator in sorted({*groups, *lowered} - {SEVERAL}, key=str.lower):
        lines.append(_operator_row(operator, groups.get(operator, [])))
    if SEVERAL in groups:
        lines.append(_operator_row(SEVERAL, groups[SEVERAL]))
    return lines


def _operator_row(operator: str, outcomes: Sequence[Outcome]) -> str:
    passed = [outcome for outcome in outcomes if outcome.status == "passed"]
    stops: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.status != "passed":
            stops.update({_short(outcome, operator)})
    words = "; ".join(f"{reason} ({count})" for reason, count in stops.most_common(3))
    more = "; ..." if len(stops) > 3 else ""
    how = _how(operator, bool(passed))
    fixed = sum(outcome.fixed for outcome in passed)
    return f"| {operator} | {how} | {len(passed)} | {len(outcomes)} | {fixed} | {words}{more} |"


def _how(operator: str, passes: bool) -> str:
    row = OPERATIONS.get(operator)
    if row is not None and row.lower:
        return "kernel"
    if is_elementwise(Operation(operator, "", (), (), {})):
        return "steps"
    if operator == SEVERAL:
        return ""
    if not passes or not onnx.defs.has(operator):
        return "no"
    schema = onnx.defs.get_schema(operator)
    has = schema.has_function or schema.has_context_dependent_function
    return "definition" if has else "rewritten"


def _short(outcome: Outcome, operator: str) -> str:
    """Return the first reason without what the row says already."""
    reason = general(outcome.reasons[0])
    reason = reason.replace(f"node ... ({operator}) ", "").replace("node ... ", "")
    reason = re.split(r"[;,:] ", reason, maxsplit=1)[0]
    words = f"{outcome.status}: {reason}" if outcome.status != "not covered" else reason
    return words.replace("|", "\\|")


def general(reason: str) -> str:
    """Return a reason without the names and numbers of one model."""
    reason = re.sub(r"model\.onnx( \S+)?[: ]+", "", reason)
    reason = re.sub(r"'[^']*'", "...", reason)
    return re.sub(r"\[[^\]]*\]|(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?(?![\w.])", "N", reason)[:160]
