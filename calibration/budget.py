"""`--budget`: the largest INT8 share whose metric stays within an allowed loss, by measuring.

Let N be the nodes that can compute in INT8, M(F) the metric with the nodes F kept in floating point
(larger is better), and macs(n) the work of a node. Wanted is

    min over F of  sum of macs(n) over F     with   M(F) >= limit

M is known by measuring only, so the search is greedy, and every answer was measured:

1. M(N) and M({}). If all of N may be INT8, that is the answer.
2. The cost of each node on its own: c(n) = M(N) - M(N - {n}), only n in INT8. (Leaving one node
   out of INT8 would hide it behind another that ruins the metric just as well.) Where M(N) is
   infinite, as a signal to noise ratio in dB is, c(n) = 10^(-M(N - {n}) / 10), the noise. Coarse
   metrics such as mAP are flat near the float model: a fine one tells equal costs apart.
3. Nodes by c(n) / w(n), the dearest first, with w(n) the node's share of the work and a little for
   the node itself; the shortest beginning of this list that, kept in float, meets the limit is
   found by bisection.
4. Each node of it, the cheapest first, is given back to INT8 if the limit still holds then.

So no single node of the answer can be given back; a better exchange of several nodes may exist.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from calibration.errors import CalibrationError

MAX_TRIALS = 400
"""How often the metric is measured at most."""
NODE_WEIGHT = 0.01
"""What a node counts beside its work, as a share of the average work of a node."""

Kind = Literal["loss", "percent", "least"]
Measure = Callable[[frozenset[str]], float]
"""The nodes kept in floating point -> metric; not a number: worthless."""
Progress = Callable[[int, int], None]
"""Called after each trial with (trials done, trials allowed)."""

EXAMPLES = "'map50:-0.5' (in its unit), 'cosine:-1%' (of the float value) or 'sqnr:30' (at least)"


@dataclass(frozen=True, slots=True)
class Budget:
    """What is allowed: `metric` may lose `amount` (kind "loss", in its unit; "percent", of the
    float model's value) or must be `amount` at "least"."""

    metric: str
    kind: Kind
    amount: float

    def limit(self, float_value: float) -> float:
        """The least value of the metric that is allowed.

        Raises CalibrationError: the float model has less, or no loss is defined from its value.
        """
        if self.kind != "least" and not math.isfinite(float_value):
            raise CalibrationError(
                f"the float model's {self.metric} is {float_value}, from which no loss can be "
                f"counted: give the least value instead, such as '{self.metric}:30'"
            )
        least = {
            "loss": float_value - self.amount,
            "percent": float_value - abs(float_value) * self.amount / 100.0,
            "least": self.amount,
        }[self.kind]
        if not float_value >= least:
            raise CalibrationError(
                f"the float model itself has {self.metric} {float_value:g}, but the budget asks "
                f"for at least {least:g}: ask for less"
            )
        return least


@dataclass(frozen=True, slots=True)
class NodeCost:
    """`value`: the metric with this node alone in INT8, NaN if it was not measured; `cost`: c(n)
    of the module (negative: chance)."""

    node: str
    macs: float
    value: float
    cost: float


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement on the way: `keep_float` so many nodes, `value` of the metric, `share` of
    the work in INT8, and whether it `fits` the limit."""

    action: str
    keep_float: int
    value: float
    share: float
    fits: bool


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """The nodes that stay in floating point, and why.

    `float_value`, `int8_value`, `value`: the metric of the float model, with all nodes in INT8,
    and of the answer; `limit` the least allowed. `share`: of the work in INT8, 0 to 1. `costs` the
    dearest first. `complete` is False where `max_trials` ended the search early.
    """

    keep_float: frozenset[str]
    float_value: float
    int8_value: float
    value: float
    limit: float
    share: float
    costs: tuple[NodeCost, ...]
    path: tuple[Step, ...]
    complete: bool


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
    """Find which nodes have to stay in floating point.

    `macs`: the work of each node that can be INT8, in any unit. `fine` is a second metric, larger
    is better, that tells nodes of equal cost apart. At most `max_trials` measurements.

    Raises CalibrationError: there is nothing to choose, or no limit (see `Budget.limit`).
    """
    _check(macs, max_trials)
    search = _Search(macs, measure, max_trials, on_progress)
    float_value = search.value("float", frozenset(macs))
    search.limit = budget.limit(float_value)
    int8_value = search.value("INT8", frozenset())
    costs: tuple[NodeCost, ...] = ()
    if not search.fits(int8_value):
        costs = _costs(search, float_value, fine)
        _shorten(search, [row.node for row in costs])
        _give_back(search, [row.node for row in reversed(costs)])
    kept, value = search.best
    return BudgetResult(
        keep_float=kept,
        float_value=float_value,
        int8_value=int8_value,
        value=value,
        limit=search.limit,
        share=search.share(kept),
        costs=costs,
        path=tuple(search.path),
        complete=not search.refused,
    )


class _Search:
    """Measures, remembers what was measured, and keeps the best that fits."""

    def __init__(
        self,
        macs: Mapping[str, float],
        measure: Measure,
        max_trials: int,
        on_progress: Progress | None,
    ) -> None:
        self.macs = macs
        self.limit = -math.inf
        self.path: list[Step] = []
        self.refused = False
        self.best = (frozenset(macs), math.nan)
        self.trials = 0
        self._measure = measure
        self._known: dict[frozenset[str], float] = {}
        self._max_trials = max_trials
        self._on_progress = on_progress

    def share(self, keep_float: frozenset[str]) -> float:
        """Share of the work in INT8; of the nodes where none has work."""
        total = math.fsum(self.macs.values())
        if total == 0.0:
            return 1.0 - len(keep_float) / len(self.macs)
        return max(0.0, 1.0 - math.fsum(self.macs[name] for name in keep_float) / total)

    def weight(self, node: str) -> float:
        """w(n) of the module."""
        average = sum(self.macs.values()) / len(self.macs) or 1.0
        return self.macs[node] + NODE_WEIGHT * average

    def fits(self, value: float) -> bool:
        return value >= self.limit  # false for NaN

    def spent(self) -> bool:
        """Whether no trial is left; asking means that one is wanted."""
        self.refused = self.refused or self.trials >= self._max_trials
        return self.trials >= self._max_trials

    def known(self, keep_float: frozenset[str]) -> bool:
        """Whether this was measured before; then it is no better than the best."""
        return keep_float in self._known

    def value(self, action: str, keep_float: frozenset[str]) -> float:
        """Measure, unless it is known; the better of what fits is remembered."""
        if keep_float not in self._known:
            self._known[keep_float] = self._measure(keep_float)
            self.trials += 1
            if self._on_progress is not None:
                self._on_progress(self.trials, self._max_trials)
        value = self._known[keep_float]
        fits = self.fits(value)
        self.path.append(Step(action, len(keep_float), value, self.share(keep_float), fits))
        kept, before = self.best
        better = (self.share(keep_float), -len(keep_float)) > (self.share(kept), -len(kept))
        if fits and (better or math.isnan(before)):
            self.best = (keep_float, value)
        return value


def _check(macs: Mapping[str, float], max_trials: int) -> None:
    if not macs:
        raise CalibrationError("the model has no node that can be INT8: there is nothing to budget")
    wrong = next((name for name, work in macs.items() if not 0.0 <= work < math.inf), None)
    if wrong is not None:
        raise CalibrationError(
            f"node '{wrong}' has {macs[wrong]} multiplications, but they must be finite and >= 0"
        )
    if max_trials < 2:
        raise CalibrationError(
            f"max_trials is {max_trials}, but the float and the INT8 model have to be measured: "
            "allow at least 2"
        )


def _costs(search: _Search, float_value: float, fine: Measure | None) -> tuple[NodeCost, ...]:
    """Each node alone in INT8; the dearest for its work first."""
    everything = frozenset(search.macs)
    keys: dict[str, tuple[float, float]] = {}
    rows: dict[str, NodeCost] = {}
    for node, work in search.macs.items():
        if search.spent():
            break
        others = everything - {node}
        value = search.value(f"only {node} in INT8", others)
        cost = _cost(float_value, value)
        second = -fine(others) if fine is not None else 0.0
        rows[node] = NodeCost(node, work, value, cost)
        keys[node] = (cost / search.weight(node), second)
    # Nodes that could not be measured any more are trusted least.
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


def _shorten(search: _Search, order: Sequence[str]) -> None:
    """Bisect for the shortest beginning of `order` that meets the limit in floating point."""
    low, high = 0, len(order)  # low does not fit; high, all in float, does
    while high - low > 1 and not search.spent():
        middle = (low + high) // 2
        value = search.value(f"the {middle} dearest in float", frozenset(order[:middle]))
        low, high = (low, middle) if search.fits(value) else (middle, high)


def _give_back(search: _Search, order: Sequence[str]) -> None:
    """Return nodes to INT8 one by one while the limit holds, until none can be returned."""
    before: frozenset[str] | None = None
    while search.best[0] != before and not search.refused:
        before = search.best[0]
        for node in order:
            kept, _ = search.best
            if node in kept and not search.known(kept - {node}) and not search.spent():
                search.value(f"{node} back to INT8", kept - {node})
