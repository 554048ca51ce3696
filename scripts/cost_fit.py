"""Least squares on the published figures, for `scripts/fit_costs.py`.

Residuals are logarithms of ratios with a robust loss (soft L1): factors of 2 and 1/2 count equally,
and outliers have little influence. Rows of one kind of source share one weight.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import onnx_ir as ir
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from device.engine.manifest import Precision, Processor
from device.profile import load_profile
from scripts.cost_rows import PARTS, Board, Case
from toolkit.graph.node_view import views
from toolkit.partition.costs.dla import DlaParameters, DlaRates, DlaWork, dla_times, dla_work
from toolkit.partition.costs.energy import EnergyParameters, active_w, work_mj
from toolkit.partition.costs.fusion import FusedKernel, fuse
from toolkit.partition.costs.gpu import (
    Array,
    GpuParameters,
    GpuRates,
    GpuWork,
    Launch,
    TimeShares,
    call_us,
    gpu_times,
    gpu_work,
    launch_us,
    tile_costs,
    time_parts,
    time_shares,
)
from toolkit.partition.costs.hardware import Hardware, at_clocks, hardware

ARRAYS = 4  # of v1 that v2's peak makes: 8203 INT8 products a clock (profiles) against 2048
SCALE = 0.15  # log ratio above which the loss is less than quadratic
NEVER_ON_DLA = frozenset({"Transpose", "TopK", "Softmax", "EfficientNMS_TRT", "NMS_TRT"})

GPU_START = GpuParameters(
    array_efficiency=0.8,
    fp32_share=0.8,
    separable_efficiency=0.5,
    output_cycles=0.1,
    curve_cycles=0.1,
    bandwidth_share=0.7,
    kernel_cycles=8000.0,
    graph_share=0.5,
    launch_kilocycles=40.0,
    call_kilocycles=200.0,
)


@dataclass(frozen=True)
class DlaFit:
    """The fitted constants of the DLA; see `toolkit.partition.costs.constants.DlaCosts`."""

    array_efficiency: float = 0.8
    fp16_share: float = 0.3
    bandwidth_share_v1: float = 0.35
    bandwidth_share_v2: float = 0.4
    layer_us_v1: float = 20.0
    layer_us_v2: float = 5.0
    submission_us: float = 30.0
    crossing_us: float = 50.0

    def parameters(self) -> DlaParameters:
        """Return the constants of layer times."""
        return DlaParameters(
            array_efficiency=self.array_efficiency,
            fp16_share=self.fp16_share,
            bandwidth_share=(self.bandwidth_share_v1, self.bandwidth_share_v2),
            layer_us=(self.layer_us_v1, self.layer_us_v2),
        )


# What the loadables of a few sources hold beside the network: (source starts with, network) ->
# loadables, crossings. The study's two layers on the GPU (average pooling, flatten) cut its network
# in two; GoogLeNet's softmax ran on the GPU on Xavier.
_CUTS: tuple[tuple[str, str, int, int], ...] = (
    ("GitHub markdown", "resnet50", 2, 3),
    ("HaX-CoNN", "googlenet", 1, 1),
)


@cache
def board_of(board: Board) -> Hardware:
    """Return the hardware that a row ran on."""
    profile = load_profile(board.profile)
    if board.clocks is not None:
        return at_clocks(profile, board.clocks)
    return hardware(profile, board.mode)


@cache
def _kernels(
    network: str, side: int | None, batch: int, launch: Launch, case: "_Key"
) -> tuple[FusedKernel, ...]:
    model: ir.Model = case.case.model(batch)
    return fuse(views(model.graph), copy_shared=launch == "each")


@dataclass(frozen=True)
class _Key:
    """A case with a constant hash, so that the cache key is the network alone."""

    case: Case

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True


def kernels_of(case: Case, batch: int) -> tuple[FusedKernel, ...]:
    """Return the kernels of a case's network at a batch."""
    size = 1 if case.network in PARTS else batch
    return _kernels(case.network, case.side, size, case.launch, _Key(case))


def dla_kernels(case: Case) -> tuple[FusedKernel, ...]:
    """Return the kernels of one frame that run on the DLA."""
    return tuple(k for k in kernels_of(case, 1) if k.head.op not in NEVER_ON_DLA)


def half_heads(case: Case) -> frozenset[str]:
    """Return the nodes that compute in FP16: the heads of cuDLA's YOLOv5 make FP16 outputs."""
    if case.family != "cuDLA" or case.engine == "gpu":
        return frozenset()
    ends = {tensor.name for k in kernels_of(case, 1)[-3:] for tensor in k.writes}
    return frozenset(
        k.head.name for k in kernels_of(case, 1) if any(t.name in ends for t in k.writes)
    )


def _concatenated(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)


class GpuRows:
    """GPU cases as one array of kernels."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = tuple(cases)
        work_of = [gpu_work(kernels_of(case, case.batch), case.precision) for case in cases]
        self.at = np.repeat(np.arange(len(cases)), [len(work.bytes) for work in work_of])
        work_columns = [
            _concatenated([getattr(w, f.name) for w in work_of]) for f in fields(GpuWork)
        ]
        rates = [GpuRates.of(board_of(c.board), c.precision, c.launch) for c in cases]
        rate_columns = [
            np.array([getattr(r, f.name) for r in rates])[self.at] for f in fields(GpuRates)
        ]
        # Networks repeat blocks and sources repeat boards: every distinct kernel is priced once.
        kinds, self.kind = np.unique(
            np.array([*work_columns, *rate_columns]), axis=1, return_inverse=True
        )
        self.work = GpuWork(*kinds[: len(work_columns)])
        self.rates = GpuRates(*kinds[len(work_columns) :])
        self.tile_costs = tile_costs(self.work, self.rates)
        self.launches = np.array([float(np.sum(work.launches)) for work in work_of])
        self.boards = [board_of(case.board) for case in cases]
        self.launches *= np.array([case.launch == "each" for case in cases])
        self.called = np.array([case.called for case in cases])
        self.share = np.array([1 / c.batch if c.measure != "latency" else 1.0 for c in cases])

    def predicted(self, parameters: GpuParameters) -> Array:
        """Return ms of each case: of a run (latency) or of an image (rate)."""
        total = gpu_times(self.work, self.rates, parameters, self.tile_costs).total
        summed = np.bincount(self.at, total[self.kind], minlength=len(self.cases))
        launching = self.launches * np.array([launch_us(parameters, b) for b in self.boards])
        called = self.called * np.array([call_us(parameters, b) for b in self.boards])
        return np.asarray((np.maximum(summed, launching) + called) / 1e3 * self.share)

    def shares(self, parameters: GpuParameters) -> list[TimeShares]:
        """Return what the time of each case consists of."""
        parts = time_parts(self.work, gpu_times(self.work, self.rates, parameters, self.tile_costs))
        sums = [np.bincount(self.at, part[self.kind], len(self.cases)) for part in parts]
        return [time_shares(column) for column in np.array(sums).T]


class DlaRows:
    """DLA cases as one array of layers; two cores share the work of a rate equally."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = tuple(cases)
        boards = [board_of(case.board) for case in cases]
        works = [
            dla_work(dla_kernels(case), case.precision, board.dla or "v1", ARRAYS, half_heads(case))
            for case, board in zip(cases, boards, strict=True)
        ]
        self.at = np.repeat(np.arange(len(cases)), [len(work.bytes) for work in works])
        self.work = DlaWork(
            *[_concatenated([getattr(w, f.name) for w in works]) for f in fields(DlaWork)]
        )
        rates = [DlaRates.of(board) for board in boards]
        self.rates = DlaRates(
            *[np.array([getattr(r, f.name) for r in rates])[self.at] for f in fields(DlaRates)]
        )
        self.frames = np.array([c.batch if c.measure == "latency" else 1 for c in cases])
        self.cores = np.array([2 if "2dla" in c.engine else 1 for c in cases])
        self.runs = np.array([c.dla_batch if c.measure != "latency" else 1 for c in cases])
        cuts = [_cuts_of(case) for case in cases]
        self.loadables = np.array([loadables for loadables, _ in cuts])
        self.crossings = np.array([crossings for _, crossings in cuts])

    def predicted(self, fitted: DlaFit) -> Array:
        """Return ms of each case: of a run (latency) or of an image (rate)."""
        total = dla_times(self.work, self.rates, fitted.parameters()).total
        layers = np.bincount(self.at, total, minlength=len(self.cases)) * self.frames
        fixed = self.loadables * fitted.submission_us + self.crossings * fitted.crossing_us
        return np.asarray((layers + fixed / self.runs) / 1e3 / self.cores)


def _cuts_of(case: Case) -> tuple[int, int]:
    """Return loadables and crossings of a case; a part of a network is neither."""
    if case.network in PARTS:
        return 0, 0
    for start, network, loadables, crossings in _CUTS:
        first = board_of(case.board).dla == "v1" or start != "HaX-CoNN"
        if case.source.startswith(start) and case.network == network and first:
            return loadables, crossings
    return 1, 0


def weights(cases: Sequence[Case], group: Callable[[Case], object]) -> Array:
    """Return weights so that each group counts as the square root of its rows."""
    count = Counter(group(case) for case in cases)
    raw = np.array([count[group(case)] ** -0.5 for case in cases])
    return np.asarray(raw / np.sqrt(np.mean(raw**2)))


@dataclass(frozen=True)
class Fitted:
    """A solution in logarithms, and the standard error of each of its values."""

    values: tuple[float, ...]
    errors: tuple[float, ...]


def solve(
    residuals: Callable[[Array], Array], start: Sequence[float], upper: Sequence[float]
) -> Fitted:
    """Minimise residuals over positive values, each at most `most`."""
    logs = np.log(np.array(start))
    solution = least_squares(
        lambda q: residuals(np.exp(q)),
        np.minimum(logs, np.log(upper) - 1e-6),
        bounds=(np.log(1e-6), np.log(upper)),
        loss="soft_l1",
        f_scale=SCALE,
        xtol=1e-6,
        ftol=1e-6,
    )
    freedom = max(1, len(solution.fun) - len(solution.x))
    hessian = solution.jac.T @ solution.jac + 1e-9 * np.eye(len(solution.x))
    spread = np.linalg.inv(hessian) * 2 * solution.cost / freedom
    return Fitted(tuple(np.exp(solution.x)), tuple(np.sqrt(np.maximum(0, np.diag(spread)))))


GPU_UPPER = (1.0, 1.0, 1.0, 10.0, 10.0, 1.0, 1e5, 1.0, 1e3, 1e4)
DLA_UPPER = (1.0, 1.0, 1.0, 1.0, 100.0, 100.0, 200.0, 200.0)


def fit_gpu(
    rows: GpuRows, keep: Array | None = None, start: GpuParameters = GPU_START
) -> tuple[GpuParameters, Fitted]:
    """Fit the GPU's constants to the rows, or to those that `keep` marks."""
    weight = weights(rows.cases, lambda case: case.family)
    weight = weight if keep is None else weight * keep
    logs = np.log([case.value for case in rows.cases])

    def residuals(values: Array) -> Array:
        return np.asarray(weight * (np.log(rows.predicted(GpuParameters(*values))) - logs))

    names = [field.name for field in fields(GpuParameters)]
    fitted = solve(residuals, [getattr(start, name) for name in names], GPU_UPPER)
    return GpuParameters(*fitted.values), fitted


def fit_dla(
    rows: DlaRows, crossing_us: float, keep: Array | None = None, start: DlaFit | None = None
) -> tuple[DlaFit, Fitted]:
    """Fit the DLA's constants; the crossing stays near what transitions of networks give.

    A generation without rows takes the other's values.
    """
    weight = weights(rows.cases, lambda c: (c.family, c.network, c.precision, c.device))
    weight = weight if keep is None else weight * keep
    logs = np.log([case.value for case in rows.cases])
    v2 = np.array([board_of(case.board).dla == "v2" for case in rows.cases])
    has = [bool(np.any(weight[v2 == side] > 0)) for side in (False, True)]

    def both(values: Array) -> DlaFit:
        fitted_values = list(values)
        for first in (2, 4):
            if not all(has):
                fitted_values[first] = fitted_values[first + 1] = fitted_values[first + int(has[1])]
        return DlaFit(*fitted_values)

    def residuals(values: Array) -> Array:
        fitted_values = both(values)
        rest = [
            (np.log(fitted_values.crossing_us) - np.log(crossing_us)) / 0.25,
            (np.log(fitted_values.submission_us) - np.log(30.0)) / 1.0,
            *[(np.log(v) - np.log(d)) / 3 for v, d in zip(values, _START_DLA, strict=True)],
        ]
        return np.concatenate(
            [weight * (np.log(rows.predicted(fitted_values)) - logs), np.array(rest)]
        )

    initial = start or DlaFit()
    fitted = solve(residuals, [getattr(initial, f.name) for f in fields(DlaFit)], DLA_UPPER)
    return both(np.array(fitted.values)), fitted


_START_DLA = tuple(getattr(DlaFit(), field.name) for field in fields(DlaFit))


def together(gpu_ms: float, dla_ms: float) -> float:
    """Return ms per image if the GPU and two DLA cores share the images."""
    return 1 / (1 / gpu_ms + 1 / dla_ms)


@dataclass(frozen=True)
class PowerDraw:
    """A row of power: board, busy processors, and their work per second."""

    board: Hardware
    gpu: bool
    cores: int
    precision: Precision
    gpu_macs: float
    dla_macs: float
    gpu_bytes: float
    dla_bytes: float

    def watts(self, parameters: EnergyParameters, *, idle: bool = True) -> float:
        """Return the power of the board, or of the engines alone."""
        power = parameters.idle_w if idle else 0.0
        engines: tuple[tuple[Processor, int, float, float], ...] = (
            ("gpu", int(self.gpu), self.gpu_macs, self.gpu_bytes),
            ("dla0", self.cores, self.dla_macs, self.dla_bytes),
        )
        for engine, cores, macs, moved in engines:
            power += cores * active_w(self.board, engine, parameters)
            work = work_mj(
                self.board, engine, parameters, macs=macs, moved=moved, precision=self.precision
            )
            power += 1e-3 * work
        return power


def fit_energy(
    drawn: Sequence[tuple[PowerDraw, float]],
    ratios: Sequence[tuple[PowerDraw, PowerDraw, float, float]],
) -> tuple[EnergyParameters, Fitted]:
    """Fit powers in W, and ratios of work for each joule: (dla, gpu, ratio of rates, published)."""

    def residuals(values: Array) -> Array:
        parameters = EnergyParameters(*values)
        power = [np.log(row.watts(parameters) / watts) for row, watts in drawn]
        share = [
            np.log(
                rate
                * gpu.watts(parameters, idle=False)
                / dla.watts(parameters, idle=False)
                / published
            )
            for dla, gpu, rate, published in ratios
        ]
        prior = [(np.log(v) - np.log(s)) / 1.5 for v, s in zip(values, _START_ENERGY, strict=True)]
        return np.array([*power, *[0.5 * value for value in share], *[0.3 * v for v in prior]])

    fitted = solve(residuals, _START_ENERGY, (50, 10, 50, 50, 50, 500, 3))
    return EnergyParameters(*fitted.values), fitted


# Idle power from the one measured board; bytes as LPDDR5 with controller; the rest by size.
_START_ENERGY = (7.6, 0.4, 1.0, 0.5, 0.3, 60.0, 2.0)
