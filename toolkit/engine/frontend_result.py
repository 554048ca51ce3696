"""The value that the first steps of a build make for all later ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import onnx_ir as ir

from calibration.table import CalibrationTable
from device.engine.manifest import IMPORTED
from toolkit.engine.options import BuildOptions
from toolkit.engine.target import Target
from toolkit.gpu.beyond_half import BeyondHalf
from toolkit.graph.passes import PassReport
from toolkit.importers.onnx import ImportedModel
from toolkit.partition.best_precision import kept_nodes
from toolkit.partition.costs.measured import Measured, faster_on_gpu
from toolkit.partition.planning.batch import Batching
from toolkit.partition.planning.options import PlanOptions
from toolkit.partition.prepared import Prepared
from toolkit.progress import Progress
from toolkit.quantize.float8.model import Float8Model
from toolkit.quantize.int4.model import Int4Model
from toolkit.quantize.qdq.importer import PlainModel
from toolkit.quantize.ranges.measure import Ranges

if TYPE_CHECKING:
    from toolkit.gpu.lower import KernelPrecision
    from toolkit.partition.planning.plan import Model
    from toolkit.partition.planning.portable import KernelSupport


@dataclass(frozen=True, slots=True)
class Frontend:
    """A model for a target after the steps before the plan: import, passes, rewrites, ranges.

    `graph` has gone through the passes, `prepared` through the rewrites, too; `plain`: the model
    without its Q/DQ, where they give INT8 its ranges; `plan` has the precision that was chosen.
    `table`: None where the precision is not INT8, or where a plan takes every tensor to have a
    range. `ranges`: how they were measured, None where they were given. `floating`: nodes that stay
    in floating point unasked, and why; `off_dla`: those of them that the DLA's ranges would harm.
    `no_gain`: nodes on the GPU for which INT8 saves no time, and why, once they are known to run
    there. `wide`: tensors that FP16 does not hold, so that GPU kernels have them in FP32. `float8`:
    which products are FP8, and `int4` which have INT4 weights; None where none is asked for.
    """

    options: BuildOptions
    target: Target
    imported: ImportedModel
    graph: ir.Model
    passes: tuple[PassReport, ...]
    plain: PlainModel | None
    plan: PlanOptions
    report: Progress
    prepared: Prepared
    table: CalibrationTable | None = None
    ranges: Ranges | None = None
    notes: tuple[str, ...] = ()
    floating: Mapping[str, str] = field(default_factory=dict)
    off_dla: frozenset[str] = frozenset()
    no_gain: Mapping[str, str] = field(default_factory=dict)
    wide: Mapping[str, BeyondHalf] = field(default_factory=dict)
    batching: Batching = field(default_factory=Batching)
    float8: Float8Model | None = None
    int4: Int4Model | None = None

    @property
    def bfloat16(self) -> bool:
        """Whether kernels store floats as BF16."""
        return self.plan.bfloat16

    @property
    def kernel_precision(self) -> "KernelPrecision":
        """The precision of GPU kernels."""
        return "bf16" if self.bfloat16 else self.plan.precision

    @property
    def kept_for_targets(self) -> frozenset[str]:
        """The nodes that the calibration keeps in floating point for its targets."""
        chosen = self.ranges.float_nodes if self.ranges is not None else None
        return frozenset() if chosen is None else chosen.nodes

    @property
    def keep_float(self) -> frozenset[str]:
        """The nodes that stay in floating point beside INT8."""
        return self.kept_off_dla if self.why_all_int8 else self.kept_off_dla | self.no_gain.keys()

    @property
    def why_all_int8(self) -> str:
        """Why nodes in `no_gain` are INT8 all the same; "" where they stay in floating point."""
        if self.table is not None and self.table.method == IMPORTED:
            return "they stay INT8, because FP16 would not clip at the ranges of another tool"
        if self.options.precision == "int8":
            return "without `tandem build --precision int8` they are FP16"
        return ""

    @property
    def kept_off_dla(self) -> frozenset[str]:
        """Those of them that stay in floating point on any processor."""
        return frozenset(self.floating if self.table is None else self.table.keep_float)

    def float_reasons(self) -> dict[str, str]:
        """Return the reason for each node in `keep_float`."""
        if self.table is None:
            return {}
        ranges = self.ranges
        budget = ranges.budget if ranges is not None else None
        reasons = (
            ranges.float_nodes.reasons()
            if ranges is not None and ranges.float_nodes is not None
            else {}
        )
        floating = {**self.no_gain, **self.floating, **reasons}
        return kept_nodes(tuple(sorted(self.keep_float)), floating, budget)

    def node_times(self) -> tuple[Measured, ...]:
        """Return the measured times of nodes that no rewrite has replaced."""
        known = {n.name for n in self.prepared.model.graph}
        return tuple(
            msgspec.structs.replace(
                measured, times=tuple(row for row in measured.times if known.issuperset(row.nodes))
            )
            for measured in self.options.node_times
        )

    def _plan_times(self) -> Measured | None:
        """Return measured times as the engine computes: on the GPU those of FP16 where less."""
        by_precision = {times.precision: times for times in self.node_times()}
        times, half = by_precision.get(self.plan.precision), by_precision.get("fp16")
        if times is None or half is None or self.plan.precision != "int8" or self.why_all_int8:
            return times
        return faster_on_gpu(times, half)

    def _beyond_half(self) -> dict[str, str]:
        """Return the nodes that read or write what FP16 does not hold, and which tensor."""
        if self.bfloat16:
            why = "BF16 is for values beyond FP16"
            return {str(node.name): why for node in self.prepared.model.graph}
        nodes = {}
        for node in self.prepared.model.graph:
            for value in (*node.inputs, *node.outputs):
                if value is not None and str(value.name) in self.wide:
                    nodes[str(node.name)] = f"'{value.name}' may be beyond FP16"
        return nodes

    def to_plan(self, kernels: "KernelSupport") -> "Model":
        """Return the model as plans take it; `kernels`: which nodes have any."""
        from toolkit.partition.planning.plan import Model

        precision = self.plan.precision
        model = Model(
            self.imported.name,
            self.prepared.model.graph,
            keep_float=self.kept_off_dla,
            beyond_half=self._beyond_half() if precision == "fp16" else {},
            cuts=self.prepared.cuts,
            kernels=kernels,
            rewrites=self.prepared.applied,
            batching=self.batching,
            measured=self._plan_times(),
        )
        if self.table is None:
            return model
        return replace(model, has_scale=self.table.tensors.__contains__)
