"""`--budget`: maximize the share of work in INT8 within an allowed loss of a metric.

Let N be the nodes that can compute in INT8, M(F) the metric with the nodes F kept in floating point
(larger is better), and macs(n) the work of a node. The problem is

    min over F of  sum of macs(n) over F     with   M(F) >= limit

M can only be measured, so the search is greedy, and every answer is measured:

1. Measure M(N) and M({}). If M({}) meets the limit, all nodes are INT8.
2. Measure the cost of each node alone in INT8: c(n) = M(N) - M(N - {n}). (With only n in floating
   point, another node that ruins the metric would hide it.) If M(N) is infinite, as an SQNR in dB
   is, c(n) = 10^(-M(N - {n}) / 10), the noise. Coarse metrics such as mAP are flat near the float
   model: a finer metric orders equal costs.
3. Sort nodes by c(n) / w(n), descending, with w(n) the node's work plus a constant per node. Find
   by bisection the shortest prefix of this list that, in floating point, meets the limit.
4. Return each node of it to INT8, the cheapest first, if the limit still holds.

So no single node of the answer can return to INT8; a better exchange of several may exist. The
other question, which nodes are best in floating point within a share of the work, is answered by
`calibration.least_loss`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from calibration.errors import CalibrationError
from calibration.progress import Progress

MAX_TRIALS = 400
"""Maximum number of measurements of the metric."""
NODE_WEIGHT = 0.01
"""Constant part of w(n), as a share of the average work of a node."""


Kind = Literal["loss", "percent", "least"]
Measure = Callable[[frozenset[str]], float]
"""The nodes kept in floating point -> metric; NaN: unusable."""
EXAMPLES = "'map50:-0.5' (in its unit), 'cosine:-1%' (of the float value) or 'sqnr:30' (at least)"


@dataclass(frozen=True, slots=True)
class Budget:
    """An accuracy budget: `metric` may lose `amount` (kind "loss", in its unit; "percent", of the
    float model's value) or must be at least `amount` (kind "least")."""

    metric: str
    kind: Kind
    amount: float

    def limit(self, float_value: float) -> float:
        """The minimum of the metric.

        Raises CalibrationError: the float model is below it, or its metric is not finite.
        """
        if self.kind != "least" and not math.isfinite(float_value):
            raise CalibrationError(
                f"the float model's {self.metric} is {float_value}, from which no loss can be "
                f"counted: give the least value instead, such as '{self.metric}:30'"
            )
        minimum = {
            "loss": float_value - self.amount,
            "percent": float_value - abs(float_value) * self.amount / 100.0,
            "least": self.amount,
        }[self.kind]
        if not float_value >= minimum:
            raise CalibrationError(
                f"the float model itself has {self.metric} {float_value:g}, but the budget asks "
                f"for at least {minimum:g}: ask for less"
            )
        return minimum


@dataclass(frozen=True, slots=True)
class NodeCost:
    """`value`: the metric with this node alone in INT8, NaN if not measured; `cost`: c(n) of the
    module (negative: noise)."""

    node: str
    macs: float
    value: float
    cost: float


@dataclass(frozen=True, slots=True)
class BudgetTrial:
    """A measurement: number of nodes in `keep_float`, `value` of the metric, `share` of the work in
    INT8, and whether it `fits` the limit."""

    action: str
    keep_float: int
    value: float
    share: float
    fits: bool


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """The nodes that stay in floating point.

    `float_value`, `int8_value`, `value`: the metric of the float model, with all nodes in INT8, and
    of the answer; `limit`: its minimum, which only `least_loss` may miss. `share`: work in INT8, 0
    to 1. `costs`: in descending order. `complete` is False if `max_trials` ended the search early.
    `added`: errors of the nodes in INT8, added, and `most_added`, their limit, of `least_loss`.
    """

    keep_float: frozenset[str]
    float_value: float
    int8_value: float
    value: float
    limit: float
    share: float
    costs: tuple[NodeCost, ...]
    path: tuple[BudgetTrial, ...]
    complete: bool
    added: float = 0.0
    most_added: float = math.inf

    @property
    def met(self) -> bool:
        """True if the metric and the added errors are within their limits."""
        return self.value >= self.limit and self.added <= self.most_added


def parse_budget(text: str) -> Budget:
    """Read 'NAME:-LOSS', 'NAME:-LOSS%' or 'NAME:LEAST'.

    Raises CalibrationError: it is none of these.
    """
    name, colon, amount = text.strip().rpartition(":")
    percent = amount.endswith("%")
    try:
        number = float(amount.removesuffix("%"))
    except ValueError:
        number = math.nan
    loss = amount.startswith("-")
    if not colon or not name.strip() or not math.isfinite(number) or (percent and not loss):
        raise CalibrationError(f"'{text}' is not a budget: write it like {EXAMPLES}")
    kind: Kind = "percent" if percent else "loss" if loss else "least"
    return Budget(name.strip(), kind, abs(number))


def largest_int8_share(
    macs: Mapping[str, float],
    measure: Measure,
    budget: Budget,
    *,
    fine: Measure | None = None,
    max_trials: int = MAX_TRIALS,
    on_progress: Progress | None = None,
) -> BudgetResult:
    """Find the nodes that must stay in floating point.

    `macs`: the work of each node that can be INT8, in any unit. `fine`: a second metric, larger is
    better, that orders nodes of equal cost. At most `max_trials` measurements.

    Raises CalibrationError: there is nothing to choose, or no limit (see `Budget.limit`).
    """
    check_work(macs, max_trials)
    search = Search(macs, measure, max_trials, on_progress)
    float_value = search.value("float", frozenset(macs))
    search.limit = budget.limit(float_value)
    int8_value = search.value("INT8", frozenset())
    costs: tuple[NodeCost, ...] = ()
    if not search.fits(int8_value):
        costs = _costs(search, float_value, fine)
        _shorten(search, [row.node for row in costs])
        _return_to_int8(search, [row.node for row in reversed(costs)])
    keep_float, value = search.best
    return search.result((float_value, int8_value, value), keep_float, costs)


class Search:
    """Measures with a cache, and keeps the best answer within the limit."""

    def __init__(
        self,
        macs: Mapping[str, float],
        measure: Measure,
        max_trials: int,
        on_progress: Progress | None,
        node_weight: float = NODE_WEIGHT,
    ) -> None:
        self.macs = macs
        self.limit = -math.inf
        self.path: list[BudgetTrial] = []
        self.refused = False
        self.best = (frozenset(macs), math.nan)
        self.trials = 0
        self._measure = measure
        self._known: dict[frozenset[str], float] = {}
        self._max_trials = max_trials
        self._on_progress = on_progress
        self._node_weight = node_weight

    def share(self, keep_float: frozenset[str]) -> float:
        """Share of the work in INT8; share of the nodes if none has work."""
        total = math.fsum(self.macs.values())
        if total == 0.0:
            return 1.0 - len(keep_float) / len(self.macs)
        return max(0.0, 1.0 - math.fsum(self.macs[name] for name in keep_float) / total)

    def weight(self, node: str) -> float:
        """w(n) of the module."""
        average = sum(self.macs.values()) / len(self.macs) or 1.0
        return self.macs[node] + self._node_weight * average

    def fits(self, value: float) -> bool:
        """Return True if a value is at least the limit."""
        return value >= self.limit  # false for NaN

    def spent(self) -> bool:
        """True if the limit is reached; then sets `refused`."""
        self.refused = self.refused or self.trials >= self._max_trials
        return self.trials >= self._max_trials

    def known(self, keep_float: frozenset[str]) -> bool:
        """True if this was measured before; then it is no better than the best."""
        return keep_float in self._known

    def count(self) -> None:
        """Count a trial, and report it."""
        self.trials += 1
        if self._on_progress is not None:
            self._on_progress(self.trials, self._max_trials)

    def value(self, action: str, keep_float: frozenset[str]) -> float:
        """Measure, unless cached; update the best."""
        if keep_float not in self._known:
            self._known[keep_float] = self._measure(keep_float)
            self.count()
        value = self._known[keep_float]
        fits = self.fits(value)
        self.path.append(BudgetTrial(action, len(keep_float), value, self.share(keep_float), fits))
        best_keep, best_value = self.best
        better = (self.share(keep_float), -len(keep_float)) > (
            self.share(best_keep),
            -len(best_keep),
        )
        if fits and (better or math.isnan(best_value)):
            self.best = (keep_float, value)
        return value

    def result(
        self,
        values: tuple[float, float, float],
        keep_float: frozenset[str],
        costs: tuple[NodeCost, ...],
    ) -> BudgetResult:
        """Return what was chosen; `values`: the metric in float, in INT8, and of `keep_float`."""
        float_value, int8_value, value = values
        return BudgetResult(
            keep_float=keep_float,
            float_value=float_value,
            int8_value=int8_value,
            value=value,
            limit=self.limit,
            share=self.share(keep_float),
            costs=costs,
            path=tuple(self.path),
            complete=not self.refused,
        )


def check_work(macs: Mapping[str, float], max_trials: int) -> None:
    """Raise CalibrationError unless two trials are allowed and each node's MACs are finite."""
    if not macs:
        raise CalibrationError("the model has no node that can be INT8: there is nothing to budget")
    invalid = next((name for name, work in macs.items() if not 0.0 <= work < math.inf), None)
    if invalid is not None:
        raise CalibrationError(
            f"node '{invalid}' has {macs[invalid]} multiplications, but they must be finite and >= "
            "0"
        )
    if max_trials < 2:
        raise CalibrationError(
            f"max_trials is {max_trials}, but the float and the INT8 model have to be measured: "
            "allow at least 2"
        )


def _costs(search: Search, float_value: float, fine: Measure | None) -> tuple[NodeCost, ...]:
    """The cost of each node alone in INT8; the largest cost per work first."""
    all_nodes = frozenset(search.macs)
    keys: dict[str, tuple[float, float]] = {}
    rows: dict[str, NodeCost] = {}
    for node, work in search.macs.items():
        if search.spent():
            break
        float_nodes = all_nodes - {node}
        value = search.value(f"only {node} in INT8", float_nodes)
        cost = _cost(float_value, value)
        tie_break = -fine(float_nodes) if fine is not None else 0.0
        rows[node] = NodeCost(node, work, value, cost)
        keys[node] = (cost / search.weight(node), tie_break)
    # Nodes that were not measured come first.
    missing = [node for node in search.macs if node not in rows]
    unknown = [NodeCost(node, search.macs[node], math.nan, math.inf) for node in missing]
    measured = sorted(rows.values(), key=lambda row: keys[row.node], reverse=True)
    return (*unknown, *measured)


def _cost(float_value: float, value: float) -> float:
    """c(n) of the module; infinite for a worthless value."""
    if math.isnan(value):
        return math.inf
    if math.isinf(float_value):
        return float(10.0 ** (-max(value, -1000.0) / 10.0))
    return float_value - value


def _shorten(search: Search, order: Sequence[str]) -> None:
    """Bisect for the shortest prefix of `order` that meets the limit in floating point."""
    low, high = 0, len(order)  # low does not fit; high, all in float, does
    while high - low > 1 and not search.spent():
        middle = (low + high) // 2
        value = search.value(f"the {middle} dearest in float", frozenset(order[:middle]))
        low, high = (low, middle) if search.fits(value) else (middle, high)


def _return_to_int8(search: Search, order: Sequence[str]) -> None:
    """Return nodes to INT8 one by one while the limit holds, until none can be returned."""
    previous: frozenset[str] | None = None
    while search.best[0] != previous and not search.refused:
        previous = search.best[0]
        for node in order:
            keep_float, _ = search.best
            if node in keep_float and not search.known(keep_float - {node}) and not search.spent():
                search.value(f"{node} back to INT8", keep_float - {node})
