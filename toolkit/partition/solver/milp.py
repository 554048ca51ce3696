"""A mixed-integer linear program, built term by term and solved by HiGHS.

One thread, a fixed seed, and limits that count steps of the solver: the same program gives the same
solution on every machine, however busy.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toolkit.errors import PlanError

if TYPE_CHECKING:
    import highspy

GAP = 1e-7  # relative; a smaller gap counts as proven
# A second of search is this many steps of HiGHS (the points where it asks whether to go on, about
# one per linear program) times the coefficients of the program: measured on one core of a desktop,
# within a factor of 4. CPU time only ends what takes far longer in each step.
WORK_PER_SECOND = 400_000
_SLOWEST = 5.0  # CPU seconds for one of search
_SEED = 1
_INTEGRALITY = 1e-6  # the integer tolerance of HiGHS


Values = npt.NDArray[np.float64]


@dataclass(slots=True)
class Expr:
    """A linear expression: a constant and coefficients of columns."""

    constant: float = 0.0
    terms: dict[int, float] = field(default_factory=dict)

    def add(self, other: "Expr", factor: float = 1.0) -> "Expr":
        """Add `factor` times another expression in place."""
        self.constant += factor * other.constant
        for column, value in other.terms.items():
            self.terms[column] = self.terms.get(column, 0.0) + factor * value
        return self

    def __add__(self, other: "Expr") -> "Expr":
        return Expr(self.constant, dict(self.terms)).add(other)

    def __sub__(self, other: "Expr") -> "Expr":
        return Expr(self.constant, dict(self.terms)).add(other, -1.0)

    def at(self, values: Values) -> float:
        """Return the value of the expression at a solution."""
        return self.constant + sum(factor * float(values[c]) for c, factor in self.terms.items())


def total(exprs: Iterable[Expr]) -> Expr:
    """Return the sum of expressions."""
    result = Expr()
    for expr in exprs:
        result.add(expr)
    return result


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the solver; `values` None: infeasible, or no solution in time.

    `seconds`: what the search took, in the unit of its limit.
    """

    values: Values | None
    bound: float
    infeasible: bool
    seconds: float = 0.0


class Program:
    """Columns, rows and an objective to minimise."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[tuple[float, float, dict[int, float]]] = []  # lower, upper, factors

    def column(self, lower: float, upper: float, *, whole: bool = False) -> Expr:
        """Add a variable."""
        self._lower.append(lower)
        self._upper.append(upper)
        self._whole.append(whole)
        return Expr(0.0, {len(self._lower) - 1: 1.0})

    def binary(self) -> Expr:
        """Add a variable that is 0 or 1."""
        return self.column(0.0, 1.0, whole=True)

    def at_least(self, expr: Expr, lower: float = 0.0) -> None:
        """Require that an expression is at least a number; trivial constraints are dropped."""
        terms = {column: factor for column, factor in expr.terms.items() if factor}
        if terms:
            self._rows.append((lower - expr.constant, math.inf, terms))
        elif expr.constant < lower - _INTEGRALITY:
            self._rows.append((1.0, 0.0, {}))  # cannot be met

    def at_most(self, expr: Expr, upper: float) -> None:
        """Require that an expression is at most a number."""
        self.at_least(Expr(upper).add(expr, -1.0))

    def minimise(
        self,
        goal: Expr,
        seconds: float,
        start: Mapping[int, float] | None = None,
        gap: float = GAP,
        *,
        near: bool = False,
    ) -> Outcome:
        """Solve to optimality within a relative gap, or as far as `seconds` of search allow.

        `start`: the binaries of a feasible solution; `near`: it is almost as good as the
        relaxation. The outcome has the seconds that were used.
        """
        if any(lower > upper for lower, upper, _ in self._rows):
            return Outcome(None, math.inf, infeasible=True)
        from toolkit.partition.solver.quiet_highs import QuietHighs

        solver = QuietHighs()
        for name, value in (*_options(gap), *(_PROOF if near else ())):
            solver.setOptionValue(name, value)
        solver.passModel(self._model(goal))
        if start:
            columns = np.array(sorted(start), np.int32)
            solver.setSolution(len(columns), columns, np.array([start[c] for c in sorted(start)]))
        meter = _Meter(seconds, sum(len(terms) for _, _, terms in self._rows))
        solver.cbMipInterrupt += meter.step
        solver.run()
        return _outcome(solver, meter.seconds)

    def relaxed(self, goal: Expr) -> tuple[Values, float] | None:
        """Return a solution without integrality and its value, None if there is none.

        No solution of the program has a smaller value.
        """
        import highspy

        from toolkit.partition.solver.quiet_highs import QuietHighs

        solver = QuietHighs()
        solver.setOptionValue("threads", 1)
        model = self._model(goal)
        model.integrality_ = []
        solver.passModel(model)
        solver.run()
        optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        if not optimal:
            return None
        return np.array(solver.getSolution().col_value), solver.getInfo().objective_function_value

    def _model(self, goal: Expr) -> "highspy.HighsLp":
        import highspy

        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._lower), len(self._rows)
        cost = np.zeros(len(self._lower))
        for column, factor in goal.terms.items():
            cost[column] = factor
        lp.col_cost_, lp.offset_ = cost, goal.constant
        lp.col_lower_, lp.col_upper_ = np.array(self._lower), np.array(self._upper)
        lp.row_lower_ = np.array([lower for lower, _, _ in self._rows])
        lp.row_upper_ = np.array([upper for _, upper, _ in self._rows])
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in self._whole]
        starts = np.cumsum([0, *(len(terms) for _, _, terms in self._rows)])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = starts.astype(np.int32)
        lp.a_matrix_.index_ = np.array([c for _, _, t in self._rows for c in t], np.int32)
        lp.a_matrix_.value_ = np.array([v for _, _, t in self._rows for v in t.values()], float)
        return lp


class _Meter:
    """Counts the steps of a solver, and interrupts it when its seconds are used up."""

    def __init__(self, seconds: float, coefficients: int) -> None:
        self._limit, self._coefficients = seconds, max(1, coefficients)
        self._steps = 0
        self._cpu_end = time.process_time() + _SLOWEST * seconds

    @property
    def seconds(self) -> float:
        """The seconds of search so far."""
        return self._steps * self._coefficients / WORK_PER_SECOND

    def step(self, event: "highspy.HighsCallbackEvent") -> None:
        """Count a step."""
        self._steps += 1
        if self.seconds >= self._limit or time.process_time() > self._cpu_end:
            event.interrupt()


# What is left for a start that is `near` is the proof, which neither presolving nor looking for
# better solutions in smaller programs shortens: they took half of the time on EfficientNet-B7.
_PROOF = (("presolve", "off"), ("mip_heuristic_run_root_reduced_cost", False))


def _options(gap: float) -> tuple[tuple[str, bool | int | float | str], ...]:
    return (
        ("threads", 1),
        ("parallel", "off"),
        ("random_seed", _SEED),
        ("mip_rel_gap", gap),
        ("mip_abs_gap", 0.0),
        ("mip_allow_restart", False),
        ("mip_pscost_minreliable", 1),
        # Separating cuts took half of the time, for ten cuts that stayed.
        ("mip_pool_soft_limit", 10),
        ("mip_allow_cut_separation_at_nodes", False),
        # Improvement heuristics: good solutions are known at the start, and these took two thirds
        # of the time on DenseNet-121.
        ("mip_heuristic_run_rins", False),
        ("mip_heuristic_run_rens", False),
    )


def _outcome(solver: "highspy.Highs", seconds: float) -> Outcome:
    import highspy

    status = solver.getModelStatus()
    if status in (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
    ):
        return Outcome(None, math.inf, infeasible=True, seconds=seconds)
    known = (
        highspy.HighsModelStatus.kOptimal,
        highspy.HighsModelStatus.kInterrupt,
    )
    if status not in known:
        raise PlanError(f"HiGHS stopped with '{solver.modelStatusToString(status)}'; report it")
    info = solver.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(solver.getSolution().col_value) if feasible else None
    integral = solver.getLp().integrality_
    bound = info.mip_dual_bound if len(integral) else info.objective_function_value
    return Outcome(values, bound, infeasible=False, seconds=seconds)
