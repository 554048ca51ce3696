"""The value that the first steps of a build make for all later ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import onnx_ir as ir

from calibration.table import CalibrationTable
from toolkit.engine.options import BuildOptions
from toolkit.engine.target import Target
from toolkit.gpu.beyond_half import BeyondHalf
from toolkit.graph.passes import PassReport
from toolkit.importers.onnx import ImportedModel
from toolkit.partition.best_precision import kept_nodes
from toolkit.partition.costs.measured import Measured
from toolkit.partition.planning.batch import Batching
from toolkit.partition.planning.options import PlanOptions
from toolkit.partition.prepare_graph import Prepared
from toolkit.progress import Progress
from toolkit.quantize.qdq.importer import PlainModel
from toolkit.quantize.ranges.measure import Ranges

if TYPE_CHECKING:
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
    `wide`: tensors that FP16 does not hold, so that GPU kernels have them in FP32.
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
    wide: Mapping[str, BeyondHalf] = field(default_factory=dict)
    batching: Batching = field(default_factory=Batching)

    @property
    def kept_for_targets(self) -> frozenset[str]:
        """The nodes that the calibration keeps in floating point for its targets."""
        chosen = self.ranges.kept if self.ranges is not None else None
        return frozenset() if chosen is None else chosen.nodes

    @property
    def keep_float(self) -> frozenset[str]:
        """The nodes that stay in floating point beside INT8."""
        return frozenset(self.floating if self.table is None else self.table.keep_float)

    def kept(self) -> dict[str, str]:
        """Return the reason for each node in `keep_float`."""
        if self.table is None:
            return {}
        ranges = self.ranges
        budget = ranges.budget if ranges is not None else None
        reasons = ranges.kept.reasons() if ranges is not None and ranges.kept is not None else {}
        return kept_nodes(self.table.keep_float, {**self.floating, **reasons}, budget)

    def _node_times(self) -> Measured | None:
        """Return the times of nodes that no rewrite has replaced."""
        measured, known = self.options.node_times, {n.name for n in self.prepared.model.graph}
        if measured is None:
            return None
        times = tuple(row for row in measured.times if known.issuperset(row.nodes))
        return msgspec.structs.replace(measured, times=times)

    def to_plan(self, kernels: "KernelSupport") -> "Model":
        """Return the model as plans take it; `kernels`: which nodes have any."""
        from toolkit.partition.planning.plan import Model

        model = Model(
            self.imported.name,
            self.prepared.model.graph,
            keep_float=self.keep_float,
            cuts=self.prepared.cuts,
            kernels=kernels,
            rewrites=self.prepared.applied,
            batching=self.batching,
            measured=self._node_times(),
        )
        if self.table is None:
            return model
        return replace(model, has_scale=self.table.tensors.__contains__)
