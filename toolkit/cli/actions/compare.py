"""Run an engine beside FP32 and in the DLA's arithmetic on the same samples, and compare."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from calibration.dataset import Sample
from device.dla_emulator.options import Emulation
from device.engine.file import Engine, open_engine
from device.engine.manifest import Manifest
from device.engine.preprocessing import Preprocessing
from device.runtime.session import Dla, Scales, Session
from device.selftest.report import is_report
from pipelines.config import ModelConfig, load_labels, load_model
from pipelines.decode_config import Scored
from toolkit.board_kit.recorded import recorded_in
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.engine.read import read_model
from toolkit.engine.target import HOST, choose_target
from toolkit.errors import BuildError
from toolkit.evaluate.compare.compare import Comparer, Comparison, Metric
from toolkit.evaluate.compare.gap import GapTally, GpuStage, Stages
from toolkit.evaluate.compare.recorded import Recorded, lay_beside, load_recorded
from toolkit.importers.source import ModelPath, model_sha256
from toolkit.plugins import Plugin
from toolkit.quantize.corrections.corrections import CORRECTION, EQUALISATION
from toolkit.quantize.ranges.data import input_specs, open_data
from toolkit.quantize.ranges.measure import RangeOptions, Report
from toolkit.quantize.ranges.table_file import read_ranges
from toolkit.quantize.trials.score import Infer, load_held_out, plain_model, score

CHANGED_WEIGHTS = (
    "the build changed weights ({steps}): inner tensors of FP32 and INT8 may differ by a factor or "
    "an offset for each channel; outputs compare as they are"
)


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """The command line of `tandem compare`.

    `samples`: how many to take of `data`. `recorded`: .npz of tensors from a board, or the report
    of its selftest. `profile`:
    build an INT8 engine of `model` for it, with the ranges of `table`, and compare that. `table`
    with an engine: the ranges that it was built with.
    """

    engine: Path
    model: Path
    data: Path | None
    samples: int
    preprocess: Path | None
    recorded: Path | None
    emulation: Emulation
    plugins: tuple[Plugin, ...]
    profile: str | None = None
    table: Path | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs_as_nchw: bool = False


def compare_engine(request: CompareRequest, report: Report) -> tuple[Comparison, Recorded | None]:
    """Compare on every sample; second, the recorded tensors beside the emulated ones."""
    preprocess, emulation = request.preprocess, request.emulation
    settings = load_model(preprocess) if preprocess else None
    with open_engine(request.engine) as engine:
        graph = _graph_of(request, engine, report)
        tensors = _recorded(request.recorded, engine) if request.recorded else {}
        preparation = settings.preprocess if settings else engine.manifest.preprocessing or None
        samples = _samples(request.data, graph, preparation, request.samples, tensors)
        comparer = Comparer(engine, graph, emulation, _gpu_ranges(request))
        for number, (name, sample) in enumerate(samples):
            comparer.add(sample, name)
            report("samples", (number + 1) / len(samples))
        metric = None
        if preprocess and settings and isinstance(settings.decode, Scored):
            metric = _metric(comparer, engine, request, settings, report)
        comparison = comparer.comparison(str(request.model), metric, _notes(engine.manifest))
        recorded = None
        if request.recorded:
            recorded = lay_beside(comparer.traces, comparer.emulations, samples[0][1], tensors)
        return comparison, recorded


def compare_model(request: CompareRequest, report: Report) -> tuple[Comparison, Recorded | None]:
    """Build an INT8 engine of `request.model` for its profile, without kernels, and compare that.

    Its ranges are those of `request.table`, or measured on `request.data`. Raises TandemError.
    """
    table, shapes = request.table, request.shapes
    if table is None and request.data is None:
        raise BuildError(
            f"INT8 of {request.model} needs ranges: give --data to measure them on, or --table."
        )
    preprocess = request.preprocess
    settings = load_model(preprocess) if preprocess else None
    options = BuildOptions(
        precision="int8",
        data=None if table else request.data,
        ranges=RangeOptions(preprocess=settings.preprocess if settings else None),
        table=read_ranges(table, shapes=shapes).table if table else None,
        shapes=shapes,
        plugins=request.plugins,
        kernels=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{request.model.stem}.engine"
        source = ModelPath(request.model, request.inputs_as_nchw)
        build_engine(source, request.profile or "", path, options, report)
        return compare_engine(replace(request, engine=path), report)


def _recorded(path: Path, engine: Engine) -> Mapping[str, NDArray[Any]]:
    """Return the tensors of an .npz file, or those that a selftest's report has of the engine."""
    return recorded_in(path, engine.sha256) if is_report(path) else load_recorded(path)


def _graph_of(request: CompareRequest, engine: Engine, report: Report) -> ir.Model:
    """Return the model's graph after the passes, without Q/DQ.

    Raises BuildError where the engine was made of another model.
    """
    manifest, path = engine.manifest, request.model
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    shapes = {
        name: tuple(dim for dim in tensors[name].shape if isinstance(dim, int))
        for name in manifest.inputs
        if all(isinstance(dim, int) for dim in tensors[name].shape)
    }
    stated = manifest.provenance
    sha256 = model_sha256(path)
    if sha256 != stated.model_sha256:
        raise BuildError(
            f"{engine.path} was made of {stated.model} with sha256 {stated.model_sha256[:12]}, but "
            f"{path} has {sha256[:12]}; give the model that the engine was built from."
        )
    options = BuildOptions(
        precision="int8", shapes=shapes, dims=manifest.dims, plugins=request.plugins
    )
    source = ModelPath(path, request.inputs_as_nchw)
    return read_model(source, choose_target(HOST), options, report, assume_ranges=True).graph


def _samples(
    data: Path | None,
    graph: ir.Model,
    preparation: Preprocessing | None,
    count: int,
    recorded: Mapping[str, NDArray[Any]],
) -> list[tuple[str, Sample]]:
    """Return the samples by name; those recorded go first, if the file holds all inputs."""
    specs = input_specs(graph)
    names = [spec.name for spec in specs]
    samples: list[tuple[str, Sample]] = []
    if recorded and all(name in recorded for name in names):
        samples.append(("the recorded run", {name: recorded[name] for name in names}))
    if data is not None:
        dataset = open_data(data, specs, preparation, count)
        read = list(dataset)
        titles = dataset.names or tuple(f"sample {number}" for number in range(len(read)))
        samples += zip(titles, read, strict=True)
    if not samples:
        raise BuildError(
            f"There is nothing to compare on: give --data, or a --recorded file that also holds "
            f"the inputs {', '.join(names)}."
        )
    return samples


def _gpu_ranges(request: CompareRequest) -> Mapping[str, float] | None:
    """Return the ranges that a GPU would be given, before rules of the DLA changed them."""
    if request.table is None:
        return None
    return read_ranges(request.table, shapes=request.shapes).table.tensors


def _metric(
    comparer: Comparer,
    engine: Engine,
    request: CompareRequest,
    settings: ModelConfig,
    report: Report,
) -> Metric:
    """Return mAP50 of the three on the scenes that ship with Tandem."""
    assert request.preprocess is not None
    emulation, gap = request.emulation, comparer.gap
    held_out = load_held_out(load_labels(request.preprocess.parent / settings.labels))

    def points(infer: Infer, title: str) -> float:
        accuracy = score(infer, settings, held_out, lambda share: report(f"mAP50 {title}", share))
        return 100 * accuracy.map50

    def of_engine(dla: Dla) -> float:
        scales: Scales = "ideal" if emulation.arithmetic == "ideal" else "hardware"
        with Session(engine, dla=dla, scales=scales) as session:
            name = session.inputs[0].name
            return points(lambda blob: session.infer({name: blob}), dla)

    def on_gpu(gap: GapTally, stage: GpuStage) -> float:
        (name,) = engine.manifest.inputs
        return points(lambda blob: gap.infer({name: blob}, stage), f"GPU, {stage}")

    fp32 = points(plain_model(request.model), "FP32")
    rounded, dla = of_engine("portable"), of_engine(emulation.mode)
    if gap is None:
        return Metric("mAP50", fp32, rounded, dla)
    gpu = on_gpu(gap, "gpu")
    shared = on_gpu(gap, "shared") if gap.has_own_ranges else gpu
    stages = Stages(gpu, shared, on_gpu(gap, "clipped"), rounded, dla)
    return Metric("mAP50", fp32, gpu, dla, stages)


def _notes(manifest: Manifest) -> tuple[str, ...]:
    changing = {EQUALISATION, CORRECTION}
    steps = [name for name in manifest.provenance.passes if name in changing]
    return (CHANGED_WEIGHTS.format(steps=", ".join(steps)),) if steps else ()
