"""Run one engine beside FP32 and in the DLA's arithmetic on the same samples, and compare."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
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
from toolkit.cli.actions.outputs import print_page_path
from toolkit.cli.commands.compare import Compare
from toolkit.cli.options.inputs import InputOptions
from toolkit.cli.pages.compare_page import losses_page
from toolkit.cli.progress import progress_bar
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.evaluate.compare.compare import Comparer, Comparison, Metric
from toolkit.evaluate.compare.gap import GapTally, GpuStage, Stages
from toolkit.evaluate.compare.recorded import Recorded, lay_beside, load_recorded
from toolkit.evaluate.compare.report import comparison_builtins, comparison_text
from toolkit.graph.passes import run_passes
from toolkit.html.page import write_page
from toolkit.importers.onnx import import_model
from toolkit.importers.source import ModelPath, model_sha256
from toolkit.quantize.corrections.corrections import CORRECTION, EQUALISATION
from toolkit.quantize.qdq.importer import import_qdq
from toolkit.quantize.ranges.data import input_specs, open_data
from toolkit.quantize.ranges.measure import RangeOptions, Report
from toolkit.quantize.ranges.table_file import has_qdq, read_ranges
from toolkit.quantize.trials.score import HeldOut, Infer, load_held_out, plain_model, score

SAMPLES = 8  # of --data, unless --samples says how many
CHANGED_WEIGHTS = (
    "the build changed weights ({steps}): inner tensors of FP32 and INT8 may differ by a factor or "
    "an offset for each channel; outputs compare as they are"
)


def compare_one(options: Compare) -> None:
    """Compare, and print what the INT8 of one engine loses. Raises TandemError."""
    emulation = Emulation(_mode(options), options.scales or "hardware")
    with progress_bar(options.a.name) as report:
        if options.model is not None:
            comparison, tensors = _compare_engine(
                options, options.a, options.model, emulation, report
            )
        else:
            comparison, tensors = _compare_model(options, emulation, report)
    if options.html is not None:
        text = comparison_text(comparison, tensors, every=False)
        write_page(options.html, losses_page(comparison, text))
    if options.as_json:
        click.echo(json.dumps(comparison_builtins(comparison, tensors)))
    else:
        click.echo(comparison_text(comparison, tensors, every=options.nodes))
    print_page_path(options.html, as_json=options.as_json)


def _compare_engine(
    options: Compare, path: Path, model: Path, emulation: Emulation, report: Report
) -> tuple[Comparison, Recorded | None]:
    """Compare an engine with its model on every sample; second, the recorded tensors beside the
    emulated ones."""
    preprocess, recorded_path = options.inputs.preprocess, options.recorded
    settings = load_model(preprocess) if preprocess else None
    with open_engine(path) as engine:
        graph = _graph_of(options, model, engine, report)
        tensors = _recorded(recorded_path, engine) if recorded_path else {}
        preparation = settings.preprocess if settings else engine.manifest.preprocessing or None
        samples = _samples(options.inputs, graph, preparation, tensors)
        comparer = Comparer(engine, graph, emulation, _gpu_ranges(options))
        for number, (name, sample) in enumerate(samples):
            comparer.add(sample, name)
            report("samples", (number + 1) / len(samples))
        metric = None
        if preprocess and settings and isinstance(settings.decode, Scored):
            held_out = load_held_out(load_labels(preprocess.parent / settings.labels))
            metric = _metric(
                _Scoring(comparer, engine, model, emulation, settings, held_out, report)
            )
        comparison = comparer.comparison(str(model), metric, _notes(engine.manifest))
        recorded = None
        if recorded_path:
            recorded = lay_beside(comparer.traces, comparer.emulations, samples[0][1], tensors)
        return comparison, recorded


def _mode(options: Compare) -> Literal["exact", "fast"]:
    if options.dla == "portable":
        raise click.UsageError("--dla portable is for two files; one compares exact or fast.")
    return options.dla or "fast"


def _compare_model(
    options: Compare, emulation: Emulation, report: Report
) -> tuple[Comparison, Recorded | None]:
    """Build an INT8 engine of a model for its profile, without kernels, and compare that.

    Its ranges are those of `--table`, or measured on `--data`. Raises TandemError.
    """
    model, table, shapes = options.a, options.table, options.inputs.shapes
    if table is None and options.inputs.data is None:
        raise BuildError(
            f"INT8 of {model} needs ranges: give --data to measure them on, or --table."
        )
    preprocess = options.inputs.preprocess
    settings = load_model(preprocess) if preprocess else None
    build_options = BuildOptions(
        precision="int8",
        data=None if table else options.inputs.data,
        ranges=RangeOptions(preprocess=settings.preprocess if settings else None),
        table=read_ranges(table, shapes=shapes).table if table else None,
        shapes=shapes,
        plugins=options.plugins,
        kernels=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{model.stem}.engine"
        source = ModelPath(model, options.inputs_as_nchw)
        build_engine(source, options.profile or "", path, build_options, report)
        return _compare_engine(options, path, model, emulation, report)


def _recorded(path: Path, engine: Engine) -> Mapping[str, NDArray[Any]]:
    """Return the tensors of an .npz file, or those that a selftest's report has of the engine."""
    return recorded_in(path, engine.sha256) if is_report(path) else load_recorded(path)


def _graph_of(options: Compare, path: Path, engine: Engine, report: Report) -> ir.Model:
    """Return the model's graph after the passes, without Q/DQ.

    Raises BuildError where the engine was made of another model.
    """
    manifest = engine.manifest
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
    imported = import_model(
        ModelPath(path, options.inputs_as_nchw),
        shapes=shapes,
        dims=manifest.dims,
        plugins=options.plugins,
        report=report,
    )
    model = imported.model
    if has_qdq(model):
        model = import_qdq(model, any_weight_scale=True).model
    return run_passes(model)[0]


def _samples(
    inputs: InputOptions,
    graph: ir.Model,
    preparation: Preprocessing | None,
    recorded: Mapping[str, NDArray[Any]],
) -> list[tuple[str, Sample]]:
    """Return the samples by name; those recorded go first, if the file holds all inputs."""
    specs = input_specs(graph)
    names = [spec.name for spec in specs]
    samples: list[tuple[str, Sample]] = []
    if recorded and all(name in recorded for name in names):
        samples.append(("the recorded run", {name: recorded[name] for name in names}))
    if inputs.data is not None:
        dataset = open_data(inputs.data, specs, preparation, inputs.samples or SAMPLES)
        read = list(dataset)
        titles = dataset.names or tuple(f"sample {number}" for number in range(len(read)))
        samples += zip(titles, read, strict=True)
    if not samples:
        raise BuildError(
            f"There is nothing to compare on: give --data, or a --recorded file that also holds "
            f"the inputs {', '.join(names)}."
        )
    return samples


def _gpu_ranges(options: Compare) -> Mapping[str, float] | None:
    """Return the ranges that a GPU would be given, before rules of the DLA changed them."""
    if options.table is None:
        return None
    return read_ranges(options.table, shapes=options.inputs.shapes).table.tensors


@dataclass(frozen=True, slots=True)
class _Scoring:
    """What mAP50 is measured of: an engine and its model, on `held_out` scenes."""

    comparer: Comparer
    engine: Engine
    model: Path
    emulation: Emulation
    settings: ModelConfig
    held_out: HeldOut
    report: Report

    def points(self, infer: Infer, title: str) -> float:
        """Return mAP50 in percent."""

        def report(share: float) -> None:
            self.report(f"mAP50 {title}", share)

        return 100 * score(infer, self.settings, self.held_out, report).map50

    def of_engine(self, dla: Dla) -> float:
        """Return that of the engine."""
        scales: Scales = "ideal" if self.emulation.arithmetic == "ideal" else "hardware"
        with Session(self.engine, dla=dla, scales=scales) as session:
            name = session.inputs[0].name
            return self.points(lambda blob: session.infer({name: blob}), dla)

    def on_gpu(self, gap: GapTally, stage: GpuStage) -> float:
        """Return that of INT8 as on a GPU."""
        (name,) = self.engine.manifest.inputs
        return self.points(lambda blob: gap.infer({name: blob}, stage), f"GPU, {stage}")


def _metric(scoring: _Scoring) -> Metric:
    """Return mAP50 of FP32, GPU and DLA on the scenes that ship with Tandem."""
    gap = scoring.comparer.gap
    fp32 = scoring.points(plain_model(scoring.model), "FP32")
    rounded, dla = scoring.of_engine("portable"), scoring.of_engine(scoring.emulation.mode)
    if gap is None:
        return Metric("mAP50", fp32, rounded, dla)
    gpu = scoring.on_gpu(gap, "gpu")
    shared = scoring.on_gpu(gap, "shared") if gap.has_own_ranges else gpu
    stages = Stages(gpu, shared, scoring.on_gpu(gap, "clipped"), rounded, dla)
    return Metric("mAP50", fp32, gpu, dla, stages)


def _notes(manifest: Manifest) -> tuple[str, ...]:
    changing = {EQUALISATION, CORRECTION}
    steps = [name for name in manifest.provenance.passes if name in changing]
    return (CHANGED_WEIGHTS.format(steps=", ".join(steps)),) if steps else ()
