"""Keep the nodes in floating point that are best there, with at most a share of the work.

With the names of `calibration.budget`:

1. Measure M(N) and M({}), and an error of each node alone in INT8, which is smooth where M leaps.
   Where that takes too long, of a few neighbours together, which share it.
2. Sort nodes by error / w(n), descending.
3. Take ever more of them, and end where M meets the limit. If it never does, the answer is the set
   with the least error of all together, as errors of nodes may cancel, or a larger one whose error
   is not clearly larger.

Where M is the largest of a few changes, as the drop of a score is, its value on these samples says
little of others. Then a second limit holds in step 3: the errors of the nodes left in INT8, each
measured alone, may be at most `most_added` in sum. In a sum they do not cancel by luck.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from calibration.budget import (
    Budget,
    BudgetResult,
    Measure,
    NodeCost,
    Search,
    check_work,
)
from calibration.errors import CalibrationError
from calibration.progress import Progress

NODE_WEIGHT = 0.3
"""As of `calibration.budget`: a node of little work that costs little is not worth a conversion."""
STEPS = 16
"""Number of sets of nodes that are tried, each with as much more work."""
CHANCE = 1.5
"""The ratio of two errors that few samples do not tell apart: then more work is in float."""
ROUNDING = 1e-9
"""Relative error of sums of work."""


def least_loss(
    macs: Mapping[str, float],
    measure: Measure,
    budget: Budget,
    *,
    error: Measure,
    error_alone: Measure,
    most_float: float,
    added_alone: Measure = lambda keep_float: 0.0,
    most_added: float = math.inf,
    together: int = 1,
    on_progress: Progress | None = None,
) -> BudgetResult:
    """Find the nodes that are best in floating point, with at most `most_float` of the work.

    `error`: of all nodes together, less is better; `error_alone`: the same where one node alone is
    in INT8, on fewer samples if that takes too long. `added_alone`: the part of it that may be at
    most `most_added` in sum. `together`: how many nodes, one behind the other in `macs`, are
    measured at once. Other parameters as of `largest_int8_share`.

    Raises CalibrationError: as `largest_int8_share`, or `most_float` is no share.
    """
    if not 0.0 < most_float <= 1.0:
        raise CalibrationError(
            f"at most {most_float:g} of the work may be in floating point, but a share lies above "
            "0 and up to 1: give one such as 0.15"
        )
    max_trials = len(macs) + STEPS + 2
    check_work(macs, max_trials)
    search = Search(macs, measure, max_trials, on_progress, NODE_WEIGHT)
    float_value = search.value("float", frozenset(macs))
    search.limit = budget.limit(float_value)
    none = frozenset[str]()
    int8_value = search.value("INT8", none)
    keep_float, value = none, int8_value
    costs, added = tuple[NodeCost, ...](), dict[str, float]()
    if not search.fits(int8_value) or math.isfinite(most_added):
        costs, added = _errors_alone(search, error_alone, added_alone, together)

    def adds_little(keep_float: frozenset[str]) -> bool:
        return _added(added, keep_float) <= most_added

    if not (search.fits(int8_value) and adds_little(none)):
        order = [row.node for row in costs]
        keep_float, value = _least(search, order, error, most_float, adds_little)
    result = search.result((float_value, int8_value, value), keep_float, costs)
    return replace(result, added=_added(added, keep_float), most_added=most_added)


def _errors_alone(
    search: Search, error_alone: Measure, added_alone: Measure, together: int
) -> tuple[tuple[NodeCost, ...], dict[str, float]]:
    """The error of each node alone in INT8, the largest per work first; the part that is added.

    Those that are measured together have equal shares.
    """
    nodes = tuple(search.macs)
    rows, added = [], dict[str, float]()
    for start in range(0, len(nodes), together):
        neighbours = nodes[start : start + together]
        others = frozenset(nodes) - frozenset(neighbours)
        error = _known_error(error_alone(others)) / len(neighbours)
        share = _known_error(added_alone(others)) / len(neighbours)
        for node in neighbours:
            added[node] = share
            rows.append(NodeCost(node, search.macs[node], math.nan, error))
            search.count()
    return tuple(sorted(rows, key=lambda row: -row.cost / search.weight(row.node))), added


def _added(alone: Mapping[str, float], keep_float: frozenset[str]) -> float:
    """The errors of the nodes in INT8, added."""
    return math.fsum(error for node, error in alone.items() if node not in keep_float)


def _known_error(error: float) -> float:
    """An error that compares: that of an output with NaN is infinite."""
    return math.inf if math.isnan(error) else error


def _least(
    search: Search,
    order: Sequence[str],
    error: Measure,
    most_float: float,
    adds_little: Callable[[frozenset[str]], bool],
) -> tuple[frozenset[str], float]:
    """The first set of nodes that `adds_little` and meets the limit, and its metric.

    Else the one of least error, among those that add little and the largest.
    """
    best = frozenset[str]()
    least = of_none = _known_error(error(best))
    for step in range(1, STEPS + 1):
        most = most_float * step / STEPS
        keep_float = _fill(search, order, most)
        if step < STEPS and not adds_little(keep_float):
            continue
        value = search.value(f"at most {100 * most:.1f} % of the work in float", keep_float)
        if search.fits(value) and adds_little(keep_float):
            return keep_float, value
        of_all = _known_error(error(keep_float))
        if of_all < min(CHANCE * least, of_none):
            best, least = keep_float, min(of_all, least)
    return best, search.value("the least error", best)


def _fill(search: Search, order: Sequence[str], most_float: float) -> frozenset[str]:
    """The nodes in order, without those that would make more than `most_float` of the work.

    Nodes of unknown sizes count alike.
    """
    work = search.macs if any(search.macs.values()) else dict.fromkeys(search.macs, 1)
    most_work = most_float * math.fsum(work.values()) * (1.0 + ROUNDING)
    keep_float, in_float = set[str](), 0.0
    for node in order:
        if in_float + work[node] <= most_work:
            keep_float.add(node)
            in_float += work[node]
    return frozenset(keep_float)
