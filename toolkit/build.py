"""The host side as a library: `build`, `plan` and `calibrate`, as `import tandem` offers them.

`build_engine` is the build with every option in one value; its steps are in `toolkit.engine.build`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx

from calibration.table import CalibrationTable, write_table
from device.argument_names import naming_arguments, with_arguments
from device.engine.manifest import DimRange, Precision
from toolkit.engine.argument_names import BUILD, CALIBRATE, PLAN
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.engine.measure import CalibrateRequest, measure_model
from toolkit.engine.plan_models import PlanMember, PlanRequest, make_plan
from toolkit.errors import BuildError, ImportModelError, PlanError
from toolkit.finetune.fake_quantize import fake_quantized, parameter_names
from toolkit.graph.max_memory import limited_memory
from toolkit.importers.onnx import ModelBytes, ModelSource, source_path
from toolkit.importers.pytorch import TorchModel, export_module, is_torch
from toolkit.importers.source import ModelPath
from toolkit.network_definition import Network
from toolkit.partition.planning.plan import Plan, PlanOptions
from toolkit.partition.planning.plan_text import render_plan
from toolkit.plugins import Plugin
from toolkit.plugins.load import load_plugins
from toolkit.progress import Progress, silent
from toolkit.quantize.loss.judge import check
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import RangeOptions

__all__ = [
    "BuildOptions",
    "BuildResult",
    "DimRange",
    "Model",
    "ModelPath",
    "Plan",
    "PlanOptions",
    "RangeOptions",
    "Source",
    "TorchModel",
    "build",
    "build_engine",
    "calibrate",
    "fake_quantize",
    "load_plugins",
    "plan",
    "plan_text",
]

if TYPE_CHECKING:
    import torch

    from toolkit.finetune.trainable_network import FakeQuantized

# What exporters call every graph: PyTorch's two, tf2onnx's, skl2onnx's.
EXPORTERS_NAMES = frozenset(
    {"", "main_graph", "main", "graph", "model", "torch_jit", "torch-jit-export", "tf2onnx", "onnx"}
)

Model = str | Path | ModelPath | onnx.ModelProto | Network | TorchModel
"""A file (ONNX, PyTorch's .pt2, TensorFlow, Keras), a model in memory, or a network made layer by
layer."""


def build(
    model: "Model | torch.nn.Module | torch.export.ExportedProgram",
    example_inputs: "str | Path | tuple[Any, ...] | torch.Tensor | None" = None,
    *,
    out: str | Path | None = None,
    profile: str = "laptop",
    precision: Precision | Literal["best", "fp8"] | None = None,
    calibration: Source | CalibrationTable | None = None,
    options: BuildOptions | None = None,
    on_progress: Progress | None = None,
    max_memory_bytes: int | None = None,
) -> BuildResult:
    """Build an engine for a device profile and write it to `out`.

    `build(model, out)`, or for PyTorch `build(module, example_inputs, out=out)`: the second
    argument is `out` where it is a path. `example_inputs` are the arguments of `forward`, a tuple.

    `out` None: the model's name with the ending .engine, beside the model file. `precision` None:
    int8 with `calibration`, else fp16, or fp32 where the profile has no GPU. `calibration`: a
    table, a folder or file of pictures or arrays, a video, or samples one after the other (float32
    arrays of the input's shape, or input name -> array). `options` has everything else; `precision`
    and `calibration` go before what it says. `max_memory_bytes`: what the model may take on this
    machine, None: half of it. The result has the engine's `path` and a `report`.

    Raises TandemError: the model, the data or the profile cannot be used, or two files are given
    to write; no engine is written.
    """
    if isinstance(example_inputs, str | Path):
        if out is not None:
            raise BuildError(
                f"build has two files to write, {str(example_inputs)!r} and out={str(out)!r}; "
                "leave one of them away."
            )
        out, example_inputs = example_inputs, None
    if example_inputs is not None:
        model = _with_inputs(model, example_inputs)
    options = options or BuildOptions()
    if precision is not None:
        options = replace(options, precision=precision)
    if isinstance(calibration, CalibrationTable):
        options = replace(options, table=calibration, data=None)
    elif calibration is not None:
        options = replace(options, data=calibration, table=None)
    options = replace(options, plugins=(*options.plugins, *_plugins(model)))
    source = _source(model, out)
    name = source_path(source).with_suffix(".engine")
    with naming_arguments(BUILD), limited_memory(max_memory_bytes):
        result = build_engine(source, profile, out or name, options, on_progress)
    return replace(result, notes=tuple(with_arguments(note, BUILD) for note in result.notes))


def plan(
    model: Model,
    *,
    profile: str,
    precision: Precision = "int8",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    table: CalibrationTable | None = None,
    data: Source | None = None,
    options: PlanOptions | None = None,
    jetpack: str | None = None,
    plugins: tuple[Plugin, ...] = (),
    max_memory_bytes: int | None = None,
) -> Plan:
    """Predict which node of a model runs where on a device, why, and what it takes.

    `shapes`: sizes for inputs with dynamic ones, by input name. `table`: INT8 ranges;
    `data`: samples as in `build`, over which ranges are measured as a build does it. Without both
    every tensor is taken to have an INT8 range. `options`: objective, power mode and
    limits; `precision` goes before what it says. `max_memory_bytes` as in `build`. `plan_text`
    shows the plan.

    Raises TandemError: the model, the data or the profile cannot be used.
    """
    latency_ms = None if options is None else options.max_latency_ms
    if data is not None and (table is not None or precision != "int8" or latency_ms is not None):
        raise PlanError(
            "data calibrates INT8 as a build does: leave out table, precision and max_latency_ms"
        )
    source = _source(model)
    name = source_path(source)
    member = PlanMember(name.stem, source, table=table, shapes=dict(shapes or {}), data=data)
    request = PlanRequest(
        members=(member,),
        profile=profile,
        jetpack=jetpack,
        options=replace(options or PlanOptions(), precision=precision),
        plugins=(*plugins, *_plugins(model)),
    )
    with naming_arguments(PLAN), limited_memory(max_memory_bytes):
        return make_plan(request).shared.plans[0]


def plan_text(plan: Plan) -> str:
    """Return a plan as `tandem plan` prints it, without advice."""
    return with_arguments(render_plan(plan), PLAN)


def calibrate(
    model: Model,
    data: Source,
    *,
    method: str = "auto",
    samples: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    profile: str | None = None,
    out: str | Path | None = None,
    options: RangeOptions | None = None,
    plugins: tuple[Plugin, ...] = (),
    accept_loss: bool = False,
    on_progress: Progress | None = None,
    max_memory_bytes: int | None = None,
) -> CalibrationTable:
    """Measure the INT8 range of every tensor over data; `build` takes the table as `calibration`.

    `data` and `max_memory_bytes` as in `build`. `method`: auto, minmax, entropy, percentile or mse.
    `samples`: how many to use, None: all. `shapes` as in `plan`. `profile`: rewrite the graph
    for its DLA first. `out`: a file for the table. `options` has everything else; `method` and
    `samples` go before what it says. `accept_loss`: return the table even if INT8 loses too much;
    `build` then asks for the same.

    Raises TandemError: the model is quantized already, the data do not fit it, or INT8 loses too
    much; then `out` has the table all the same, marked as refused.
    """
    request = CalibrateRequest(
        model=_source(model),
        data=data,
        profile=profile,
        shapes=dict(shapes or {}),
        plugins=(*plugins, *_plugins(model)),
        options=replace(options or RangeOptions(), method=method, samples=samples),
        accept_loss=True,
    )
    with naming_arguments(CALIBRATE), limited_memory(max_memory_bytes):
        ranges, name = measure_model(request, on_progress or silent)
    table_file = None if out is None else Path(out)
    if table_file is not None:
        write_table(table_file, ranges.table)
    if not accept_loss:
        with naming_arguments(CALIBRATE):
            check(ranges.judgement, name, table_file)
    return ranges.table


def fake_quantize(
    model: "Model | torch.nn.Module",
    example_inputs: "tuple[Any, ...] | torch.Tensor | None" = None,
    *,
    calibration: CalibrationTable,
    profile: str,
    options: BuildOptions | None = None,
) -> "FakeQuantized":
    """Return a PyTorch network that computes as the INT8 engine of a model will, for fine-tuning.

    `model` and `example_inputs` as in `build`; the module stays as it is. The network has the graph
    that `build(model, profile=profile, calibration=calibration, options=options)` plans, its scales
    and its rounding; gradients take rounding as the identity. `model()` and `table()` of it are
    what `build` takes after the training, with the same profile and options.

    Raises TandemError: as `build`, PyTorch is missing, or an operator has no gradient here.
    """
    if example_inputs is not None:
        model = _with_inputs(model, example_inputs)
    module = model.module if isinstance(model, TorchModel) else None
    names = frozenset() if module is None else parameter_names(module)
    options = options or BuildOptions()
    options = replace(options, plugins=(*options.plugins, *_plugins(model)))
    return fake_quantized(_source(model), calibration, profile, options, names)


def _source(model: Model, out: str | Path | None = None) -> ModelSource:
    if is_torch(model):
        model = TorchModel(model)
    if isinstance(model, TorchModel):
        return ModelBytes(f"{model.title}.onnx", export_module(model).data)
    if isinstance(model, Network):
        return ModelBytes(f"{model.name}.onnx", model.serialize())
    if isinstance(model, onnx.ModelProto):
        return ModelBytes(f"{_name_of(model, out)}.onnx", model.SerializeToString())
    return model


def _name_of(model: onnx.ModelProto, out: str | Path | None) -> str:
    """Return what a model in memory is called: as its graph, unless an exporter named that, else as
    the engine."""
    if model.graph.name not in EXPORTERS_NAMES:
        return model.graph.name
    return "model" if out is None else Path(out).stem


def _with_inputs(model: object, example_inputs: object) -> TorchModel:
    """Return a PyTorch module with its inputs; one tensor may stand without a tuple."""
    if not is_torch(model):
        raise ImportModelError(
            f"example inputs belong to a PyTorch module, but the model is {type(model).__name__}; "
            "leave them out."
        )
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    return TorchModel(model, inputs)


def _plugins(model: Model) -> tuple[Plugin, ...]:
    return model.plugins if isinstance(model, Network) else ()
