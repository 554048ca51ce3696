"""Options of a build."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from calibration.table import CalibrationTable
from device.engine.manifest import DimRange, Precision
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.partition.costs.measured import Measured
from toolkit.partition.planning.options import PlanOptions
from toolkit.plugins import Plugin
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import RangeOptions, Ranges

RequestedPrecision = Precision | Literal["best", "bf16", "fp8"]
GpuBackendName = Literal["cuda", "tensorrt", "auto"]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of a build beside the model and the profile.

    `precision`: None is int8 with `data` or `table` and of a Q/DQ model, else fp16 (fp32 without a
    GPU). A Q/DQ model brings its INT8 ranges, unless there are `data`, `table` or `dummy_ranges`.
    Nodes on the GPU stay in FP16 where INT8 saves no time, unless "int8" is asked for or the ranges
    are those of a Q/DQ model or a TensorRT cache, at which FP16 would not clip. "best" is
    None, but nodes that lose accuracy in INT8 stay in floating point, too
    (`toolkit.partition.best_precision`). "fp8": an engine of FP16 with products of FP8, by `data`
    or `table`, where that saves time and loses little (`toolkit.quantize.float8`). "bf16": an
    engine of FP16 on the GPU alone, whose kernels store BF16; `data` judge it. None is "bf16" of a
    model in BF16, where there are no ranges and the GPU has it, else "fp32".
    `data`: what `toolkit.quantize.ranges.data.open_data` reads: images, arrays, a video, or an
    iterable of samples. `ranges`: how ranges are measured. `table`: ranges in the place of `data`.
    `measured`: calibrations of other builds by what they depend on, which this one takes and adds
    to. `save_table`: file for the measured table, written before the build goes on, so that a later
    failure does not lose hours of calibration. `dummy_ranges` replace measured ranges: the engine
    is for timing only, and says so. `accept_loss`: write the engine even if INT8 or INT4 loses more
    at the outputs than the limits of `toolkit.quantize.loss.metrics`.
    `shapes`, `dims`: as in `toolkit.importers.onnx.import_model`. `plan`: objective and search of
    the plan; its precision and TensorRT version are those of the build. `plugins`: operators
    beside those of ONNX. `tactics`: which GPU kernels to choose from; `kernels` False: none, the
    engine runs portable. `fallback`: segments on a DLA have GPU kernels beside what TensorRT makes.
    `gpu_backend`: what GPU segments carry: kernels, forms for the board's TensorRT in their place,
    or both ("auto"), of which the board keeps the faster.
    `preprocess_on` "gpu": with kernels that make the input of camera frames (`toolkit.gpu.frames`).
    `node_times`: those of boards, at most one value for each precision. The plan takes those of its
    precision before predicted ones, the choice of INT8 on the GPU those of nodes measured in INT8
    and in FP16. `notes`: on where times come from, for the report. `int4_weights`: large products
    get weights of 4 bits in blocks of so many of the depth, chosen by `data`
    (`toolkit.quantize.int4`), in an engine of FP16.
    """

    precision: RequestedPrecision | None = None
    jetpack: str | None = None
    data: Source | None = None
    ranges: RangeOptions = field(default_factory=RangeOptions)
    table: CalibrationTable | None = None
    save_table: str | Path | None = None
    measured: dict[str, Ranges] | None = field(default=None, repr=False)
    dummy_ranges: bool = False
    accept_loss: bool = False
    shapes: Mapping[str, tuple[int, ...]] | None = None
    dims: tuple[DimRange, ...] = ()
    plan: PlanOptions = field(default_factory=PlanOptions)
    plugins: tuple[Plugin, ...] = ()
    tactics: TacticOptions = field(default_factory=TacticOptions)
    kernels: bool = True
    fallback: bool = True
    gpu_backend: GpuBackendName = "cuda"
    preprocess_on: Literal["cpu", "gpu"] = "cpu"
    node_times: tuple[Measured, ...] = ()
    notes: tuple[str, ...] = ()
    int4_weights: Literal[32, 128] | None = None
