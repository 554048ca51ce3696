"""Options of a build, and the job that its steps read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from calibration.table import CalibrationTable
from device.engine.manifest import DimRange, Precision
from toolkit.engine.target import Target
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.graph.passes import PassReport
from toolkit.importers.onnx import ImportedModel
from toolkit.partition.planning.plan import PlanOptions
from toolkit.plugins import Plugin
from toolkit.quantize.qdq.importer import PlainModel
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import RangeOptions

Progress = Callable[[str, float], None]
"""Called with the step's name and the share of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of a build beside the model and the profile.

    `precision` None: int8 with `data` or `table`, else fp16 (fp32 where there is no GPU). A Q/DQ
    model gives INT8 its ranges, unless there are `data`, `table` or `dummy_ranges`. "best": the
    same, but nodes that INT8 does not serve stay in floating point
    (`toolkit.partition.best_precision`). `data` is what `toolkit.quantize.ranges.data.open_data`
    takes: a folder or file of pictures or arrays, a video, or samples one after the other; `ranges`
    says how their ranges are found. `table` goes before `data`. `save_table`: the file that takes
    the table measured, as soon as it is, so that hours of calibration outlive a failure later.
    `dummy_ranges` stand in for measured
    ones: the engine is good for timing only, and says so. `shapes` and `dims` as in
    `toolkit.importers.onnx.import_model`. `plan`: what the plan aims at; its precision and TensorRT
    are those of the build. `accept_loss`: write the engine even if INT8 loses more at the outputs
    than the limits of `toolkit.quantize.loss.metrics`. `plugins`: operators that the model has
    beside those of ONNX. `tactics`: what GPU kernels to choose among.
    """

    precision: Precision | Literal["best"] | None = None
    jetpack: str | None = None
    data: Source | None = None
    ranges: RangeOptions = field(default_factory=RangeOptions)
    table: CalibrationTable | None = None
    save_table: str | Path | None = None
    dummy_ranges: bool = False
    accept_loss: bool = False
    shapes: Mapping[str, tuple[int, ...]] | None = None
    dims: tuple[DimRange, ...] = ()
    plan: PlanOptions = field(default_factory=PlanOptions)
    plugins: tuple[Plugin, ...] = ()
    tactics: TacticOptions = field(default_factory=TacticOptions)


@dataclass(frozen=True, slots=True)
class BuildJob:
    """The model that a build is made of, for a target.

    `graph` has gone through the passes; `plain`: the model without its Q/DQ, where they give INT8
    its ranges; `plan` has the precision that was chosen.
    """

    options: BuildOptions
    target: Target
    imported: ImportedModel
    graph: ir.Model
    passes: tuple[PassReport, ...]
    plain: PlainModel | None
    plan: PlanOptions
    report: Progress
