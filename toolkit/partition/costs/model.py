"""The cost model of one graph on one board: time and energy of every node on every processor.

    model = CostModel(views, profile, precision="int8", power_mode="30W")
    model.node("conv1", "dla0").time_us
    model.crossing(100_352, "gpu", "dla0").time_us

The cost of a node assumes its neighbours on the same processor: of nodes fused into one kernel the
first carries the cost and the rest are free. `alone` prices a node without neighbours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np

from device.engine.manifest import Precision, Processor
from device.profile import Profile
from toolkit.graph.node_view import NodeView, TensorView
from toolkit.partition.costs.bytes import moved_bytes
from toolkit.partition.costs.constants import (
    Constant,
    Contention,
    Costs,
    gpu_errors,
    idle_power,
    load_costs,
    load_errors,
)
from toolkit.partition.costs.dla import DlaParameters, DlaRates, dla_times, dla_work
from toolkit.partition.costs.energy import EnergyParameters, active_w, work_mj
from toolkit.partition.costs.errors import ErrorRow, Part, Spread, batched, distances
from toolkit.partition.costs.float8 import read_as_stored
from toolkit.partition.costs.fusion import FusedKernel, alone, fuse
from toolkit.partition.costs.gpu import (
    LAUNCH_OF,
    PLANNED,
    ExecutorName,
    GpuParameters,
    GpuRates,
    Times,
    gpu_times,
    gpu_work,
    launch_us,
    time_parts,
    time_shares,
)
from toolkit.partition.costs.hardware import INT4_SM, Hardware, hardware
from toolkit.partition.costs.measured import Measured, check_measured

Bound = Literal["compute", "memory", "launch", "nothing", "measured"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The cost of a node on a processor; `bound_by`: the bottleneck.

    `read_bytes`, `written_bytes`: memory traffic; `energy_mj`: beyond the idle board.
    """

    time_us: float
    energy_mj: float
    read_bytes: int
    written_bytes: int
    bound_by: Bound

    @property
    def bandwidth_gbps(self) -> float:
        """The demand on the shared memory, in GB/s."""
        moved = self.read_bytes + self.written_bytes
        return moved / self.time_us / 1e3 if self.time_us else 0.0


@dataclass(frozen=True, slots=True)
class CrossingCost:
    """The cost of passing a tensor to another processor, beyond the idle board."""

    time_us: float
    energy_mj: float


FREE = NodeCost(0.0, 0.0, 0, 0, "nothing")
_Key = tuple[tuple[str, ...], ...]


class CostModel:
    """Costs of the nodes of one graph, computed on first use."""

    def __init__(
        self,
        views: Sequence[NodeView],
        profile: Profile,
        *,
        precision: Precision,
        power_mode: str | None = None,
        measured: Measured | None = None,
        executor: ExecutorName = PLANNED,
    ) -> None:
        """Prepare the costs of `views` (names distinct) on a profile.

        `power_mode` None: maximum clocks. `executor`: what runs segments of the GPU. Raises
        ProfileError: no such mode; ConfigError: `measured` does not match.
        """
        self._views, self._float8 = read_as_stored(views)
        self._precision: Precision = precision
        self._board = hardware(profile, power_mode)
        self._constants = load_costs()
        self._view_of = {view.name: view for view in self._views} if self._float8 else {}
        self._launch = LAUNCH_OF[executor]
        own_kernels = self._launch != "each"
        self._int4 = precision == "fp16" and own_kernels and self._board.sm >= INT4_SM
        self._kernels = fuse(self._views, copy_shared=self._launch == "each")
        self._idle = idle_power(profile.name)
        self._rows: dict[Processor, Mapping[str, NodeCost]] = {}
        self._predicted: dict[tuple[Processor, _Key], NodeCost] = {}
        self._measured = measured
        if measured is not None:
            names = [view.name for view in self._views]
            check_measured(
                measured,
                profile=profile.name,
                power_mode=power_mode,
                precision=precision,
                nodes=names,
            )

    @property
    def precision(self) -> Precision:
        """The precision of the engine."""
        return self._precision

    @property
    def board(self) -> Hardware:
        """The board at its clocks."""
        return self._board

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        """The nodes of each kernel, in execution order; the first of each carries the cost."""
        return tuple(tuple(view.name for view in kernel.nodes) for kernel in self._kernels)

    @property
    def idle(self) -> Constant | None:
        """The power of the idle board in W with its source, None where it is not known."""
        return self._idle

    @property
    def idle_w(self) -> float:
        """The power of the idle board in W, 0 where it is not known."""
        return 0.0 if self._idle is None else self._idle.value

    def spread(self, part: Part) -> Spread:
        """Return how far off figures of a part of this network are: see `costs/errors.py`."""
        if part == "gpu":
            return self._gpu_spread
        errors = load_errors()
        return (errors.dla if part == "dla" else errors.power).spread(self._board.name)

    @cached_property
    def _gpu_spread(self) -> Spread:
        board, constants, batch = self._board, self._constants, batched(self._kernels)
        apart = distances(
            self._precision,
            batch=batch,
            board_fitted=board.name in constants.fitted_devices,
            generation_fitted=board.sm in constants.fitted_sms,
        )
        work = gpu_work(self._kernels, self._precision, int4=self._int4)
        parts = np.sum(time_parts(work, self._gpu_times(self._kernels)), axis=1)
        figure = ErrorRow(board.sm, self._precision, batch, time_shares(parts))
        return gpu_errors().spread(figure, apart)

    def node(self, name: str, processor: Processor) -> NodeCost:
        """Return the cost of a node among its neighbours on the same processor.

        Raises ValueError: the board has no such processor; KeyError: the graph has no such node.
        """
        if processor not in self._rows:
            self._rows[processor] = self._priced(processor)
        return self._rows[processor][name]

    def alone(self, view: NodeView, processor: Processor) -> NodeCost:
        """Return the cost of a node as a separate kernel."""
        kernel = alone(self._view_of.get(view.name, view))
        return self._costs_of((kernel,), processor)[0]

    def pass_us(self, tensor: TensorView) -> float:
        """Return the time of a GPU kernel that reads a tensor and writes it again."""
        kernel = FusedKernel("pointwise", self._views[0], (), (tensor,), (tensor,))
        return float(self._times((kernel,), "gpu").total[0])

    def segment_overhead_us(self, processor: Processor) -> float:
        """Return the time to start a segment: submission of a loadable on the DLA."""
        if processor.startswith("dla"):
            return self._constants.dla.submission_us.value
        return 0.0

    def segment_overhead_mj(self, processor: Processor) -> float:
        """Return the energy to start a segment, beyond the idle board."""
        return self.active_w(processor) * self.segment_overhead_us(processor) * 1e-3

    def crossing(self, size: int, source: Processor, target: Processor) -> CrossingCost:
        """Return the cost of passing `size` bytes between two processors: switch and reformat.

        The bytes are read and written once more, in the other format. The GPU is busy all the time,
        with the energy of that.
        """
        if source == target:
            return CrossingCost(0.0, 0.0)
        rate = self._board.bandwidth * self._constants.gpu.bandwidth_share.value
        moved = 2.0 * size
        time_us = self._constants.crossing.us.value + moved / rate
        busy_mj = self.active_w("gpu") * time_us * 1e-3 if self._board.has_gpu else 0.0
        return CrossingCost(time_us, busy_mj + moved * self._constants.energy.byte_pj.value * 1e-9)

    def slowdown(self, own_gbps: float, other_gbps: float) -> float:
        """Return the factor by which a processor's time grows under memory contention."""
        return slowdown(
            own_gbps, other_gbps, self._board.bandwidth / 1e3, self._constants.contention
        )

    def active_w(self, processor: Processor) -> float:
        """Return the power in W that a busy processor adds, without computation and traffic."""
        return active_w(self._board, processor, energy_parameters(self._constants))

    def price(self, kernels: Sequence[FusedKernel], processor: Processor) -> list[NodeCost]:
        """Return the cost of each kernel; measured times replace predictions.

        Raises ValueError: the board has no such processor.
        """
        costs = self._costs_of(kernels, processor)
        if self._measured is None:
            return costs
        known = self._measured.by_node(processor)
        return [
            _retimed(cost, sum(times))
            if (times := [known[n] for n in names if n in known])
            else cost
            for cost, names in zip(costs, ([v.name for v in k.nodes] for k in kernels), strict=True)
        ]

    def _priced(self, processor: Processor) -> Mapping[str, NodeCost]:
        cost_of = {view.name: FREE for view in self._views}
        costs = self.price(self._kernels, processor)
        for kernel, cost in zip(self._kernels, costs, strict=True):
            cost_of[kernel.head.name] = cost
        return cost_of

    def _costs_of(self, kernels: Sequence[FusedKernel], processor: Processor) -> list[NodeCost]:
        """Return predicted costs; kernels that come again, as in other plans, are priced once.

        The first kernel, which reads an image, is priced each time.
        """
        known = self._predicted
        keys = [(processor, _key(kernel)) for kernel in kernels]
        new = [index for index, key in enumerate(keys) if index == 0 or key not in known]
        costs = self._predict([kernels[index] for index in new], processor)
        known.update({keys[index]: cost for index, cost in zip(new[1:], costs[1:], strict=True)})
        return [*costs[:1], *(known[key] for key in keys[1:])]

    def _predict(self, kernels: Sequence[FusedKernel], processor: Processor) -> list[NodeCost]:
        times = self._times(kernels, processor)
        power = self.active_w(processor)
        parameters = energy_parameters(self._constants)
        rows = []
        for index, kernel in enumerate(kernels):
            int4 = self._int4 and processor == "gpu"
            read, written = moved_bytes(kernel, self._precision, int4=int4)
            time = float(times.total[index])
            energy = power * time * 1e-3 + work_mj(
                self._board,
                processor,
                parameters,
                macs=float(kernel.head.macs or 0) if kernel.kind == "matrix" else 0.0,
                moved=read + written,
                precision="int8" if kernel.head.name in self._float8 else self._precision,
            )
            rows.append(
                NodeCost(time, energy if time else 0.0, read, written, _bound(times, index))
            )
        return rows

    def _gpu_times(self, kernels: Sequence[FusedKernel]) -> Times:
        work = gpu_work(kernels, self._precision, int4=self._int4)
        rates = GpuRates.of(self._board, self._precision, self._launch)
        if self._float8:
            narrow = GpuRates.of(self._board, "int8", self._launch)
            in_float8 = np.array([kernel.head.name in self._float8 for kernel in kernels])
            rates = replace(
                rates,
                matrix_rate=np.where(in_float8, narrow.matrix_rate, rates.matrix_rate),
                reuse=np.where(in_float8, narrow.reuse, rates.reuse),
            )
        return gpu_times(work, rates, gpu_parameters(self._constants))

    @cached_property
    def _launch_wait_us(self) -> float:
        """The time that a kernel of the graph waits for its launch, if it is all on the GPU.

        Launches run ahead of kernels: only where all of them take longer than all kernels do, the
        CPU is the bound.
        """
        launches = sum(kernel.launches for kernel in self._kernels if kernel.kind != "free")
        if self._launch == "graph" or not launches:
            return 0.0
        each_us = launch_us(gpu_parameters(self._constants), self._board)
        return max(0.0, each_us - float(np.sum(self._gpu_times(self._kernels).total)) / launches)

    def _times(self, kernels: Sequence[FusedKernel], processor: Processor) -> Times:
        board, constants = self._board, self._constants
        if processor == "cpu":
            return _cpu_times(kernels, board, constants, self._precision)
        if processor == "gpu" and board.has_gpu:
            times = self._gpu_times(kernels)
            waits = self._launch_wait_us * np.array([kernel.launches for kernel in kernels])
            is_free = np.array([kernel.kind == "free" for kernel in kernels])
            return Times(times.compute, times.memory, times.overhead + np.where(is_free, 0, waits))
        if processor in ("dla0", "dla1")[: board.dla_cores] and board.dla is not None:
            arrays = round(constants.dla.arrays.value)
            layers = dla_work(kernels, self._precision, board.dla, arrays)
            return dla_times(layers, DlaRates.of(board), dla_parameters(constants))
        raise ValueError(f"profile {board.name} has no {processor}")


def _key(kernel: FusedKernel) -> _Key:
    """Return what tells a kernel from others of its graph: its nodes and tensors."""
    nodes = tuple(view.name for view in kernel.nodes)
    reads, writes = (tuple(t.name for t in ts) for ts in (kernel.reads, kernel.writes))
    return nodes, reads, writes


def _retimed(cost: NodeCost, time_us: float) -> NodeCost:
    """Return a cost at a measured time; a free node has no energy."""
    share = time_us / cost.time_us if cost.time_us else 0.0
    return NodeCost(
        time_us, cost.energy_mj * share, cost.read_bytes, cost.written_bytes, "measured"
    )


def _bound(times: Times, index: int) -> Bound:
    parts: dict[Bound, float] = {
        "compute": float(times.compute[index]),
        "memory": float(times.memory[index]),
        "launch": float(times.overhead[index]),
    }
    largest = max(parts, key=parts.__getitem__)
    return largest if parts[largest] > 0 else "nothing"


def _cpu_times(
    kernels: Sequence[FusedKernel], board: Hardware, constants: Costs, precision: Precision
) -> Times:
    """Return times on the CPU: estimates, no figures are published."""
    macs = np.array([float(kernel.head.macs or 0) for kernel in kernels])
    moved = np.array([float(sum(moved_bytes(kernel, precision))) for kernel in kernels])
    busy = np.array([float(kernel.kind != "free") for kernel in kernels])
    return Times(
        compute=busy * macs / (constants.cpu.gmacs.value * 1e3),
        memory=moved / (board.bandwidth * constants.cpu.bandwidth_share.value),
        overhead=busy * constants.cpu.node_us.value,
    )


def _numbers(build: Callable[..., T], group: object, names: Sequence[str]) -> T:
    values = {}
    for name in names:
        constant = getattr(group, name)
        assert isinstance(constant, Constant)
        values[name] = constant.value
    return build(**values)


def gpu_parameters(costs: Costs) -> GpuParameters:
    """Return the GPU's constants as numbers."""
    return _numbers(GpuParameters, costs.gpu, tuple(GpuParameters.__dataclass_fields__))


def dla_parameters(costs: Costs) -> DlaParameters:
    """Return the DLA's constants as numbers."""
    v1, v2 = costs.dla.v1, costs.dla.v2
    return DlaParameters(
        array_efficiency=costs.dla.array_efficiency.value,
        fp16_share=costs.dla.fp16_share.value,
        bandwidth_share=(v1.bandwidth_share.value, v2.bandwidth_share.value),
        layer_us=(v1.layer_us.value, v2.layer_us.value),
    )


def energy_parameters(costs: Costs) -> EnergyParameters:
    """Return the constants of energy as numbers."""
    return _numbers(EnergyParameters, costs.energy, tuple(EnergyParameters.__dataclass_fields__))


def slowdown(own_gbps: float, other_gbps: float, peak_gbps: float, constants: Contention) -> float:
    """Return the factor by which a processor's time grows, at least 1.

    `own_gbps`: its demand when alone; `other_gbps`: the demand of all others. The form is that of
    PCCS (Xu et al., MICRO 2021): no slowdown at low demand; above, the factor grows with both
    demands, until that of the others saturates. Piecewise linear in each.
    """
    own_excess = max(0.0, own_gbps / peak_gbps - constants.free_share.value)
    other_share = min(max(0.0, other_gbps / peak_gbps), constants.full_share.value)
    return 1.0 + constants.slope.value * own_excess * other_share
