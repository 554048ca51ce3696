"""Compare two files; or run one engine beside FP32 and in the DLA's arithmetic, and compare."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from toolkit.cli.actions.compare_files import compare_two
from toolkit.cli.actions.outputs import need_folders, print_page_path, status_2
from toolkit.cli.command import given
from toolkit.cli.commands.compare import Compare
from toolkit.cli.options.inputs import InputOptions
from toolkit.cli.pages.compare_page import losses_page
from toolkit.cli.progress import progress_bar
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.engine.read import read_model
from toolkit.engine.target import HOST, choose_target
from toolkit.errors import BuildError
from toolkit.evaluate.compare.compare import Comparer, Comparison, Metric
from toolkit.evaluate.compare.gap import GapTally, GpuStage, Stages
from toolkit.evaluate.compare.recorded import Recorded, lay_beside, load_recorded
from toolkit.evaluate.compare.report import comparison_builtins, comparison_text
from toolkit.html.page import write_page
from toolkit.importers.source import ModelPath, model_sha256
from toolkit.progress import Progress
from toolkit.quantize.corrections.corrections import CORRECTION, EQUALISATION
from toolkit.quantize.ranges.data import input_specs, open_data
from toolkit.quantize.ranges.measure import RangeOptions
from toolkit.quantize.ranges.table_file import read_ranges
from toolkit.quantize.trials.score import Infer, load_held_out, plain_model, score

SAMPLES = 8  # of --data, unless --samples says how many
CHANGED_WEIGHTS = (
    "the build changed weights ({steps}): inner tensors of FP32 and INT8 may differ by a factor or "
    "an offset for each channel; outputs compare as they are"
)
# Options of one form alone: name of the field -> the option.
_OF_TWO = {
    "files": "--input", "seed": "--random", "ranges": "--range", "atol": "--atol",
    "rtol": "--rtol", "min_sqnr": "--min-sqnr", "layers": "--layers", "bisect": "--bisect",
    "out": "--out",
}  # fmt: skip
_OF_ONE = {
    "model": "--model", "profile": "--profile", "table": "--table", "recorded": "--recorded",
    "scales": "--scales", "inputs_as_nchw": "--inputs-as-nchw",
}  # fmt: skip


def compare(options: Compare) -> None:
    """Compare and print the report; exits with 1 where two files differ.

    Raises NotComparedError, click.UsageError.
    """
    with status_2():
        need_folders(options.html)
        if options.b is not None:
            _refuse(_OF_ONE, "one file: an engine with --model, or a model with --profile")
            if options.out is not None and not options.bisect:
                raise click.UsageError("--out is where --bisect writes; give --bisect too.")
            raise click.exceptions.Exit(0 if compare_two(options, options.b) else 1)
        _refuse(_OF_TWO, "two files")
        if (options.model is None) == (options.profile is None):
            raise click.UsageError(
                "Give two files to compare, or an engine with --model M.onnx, or a model with "
                "--profile NAME."
            )
        if options.dla == "portable":
            raise click.UsageError("--dla portable is for two files; one compares exact or fast.")
        _compare_one(options)


def _refuse(options: dict[str, str], form: str) -> None:
    """Refuse what only the other form of the command has a use for."""
    used = [option for name, option in options.items() if given(name)]
    if used:
        raise click.UsageError(f"{used[0]} is for {form}.")


def _compare_one(options: Compare) -> None:
    """Compare, and print what the INT8 of one engine loses. Raises TandemError."""
    with progress_bar(options.a.name) as report:
        if options.model is not None:
            comparison, tensors = _compare_engine(options, options.a, report)
        else:
            comparison, tensors = _compare_model(options, report)
    if options.html is not None:
        text = comparison_text(comparison, tensors, every=False)
        write_page(options.html, losses_page(comparison, text))
    text = comparison_text(comparison, tensors, every=options.nodes)
    click.echo(json.dumps(comparison_builtins(comparison, tensors)) if options.as_json else text)
    print_page_path(options.html, as_json=options.as_json)


def _compare_engine(
    options: Compare, path: Path, report: Progress
) -> tuple[Comparison, Recorded | None]:
    """Compare an engine with its model on every sample; second, the recorded tensors beside the
    emulated ones."""
    preprocess, recorded_path = options.inputs.preprocess, options.recorded
    model = options.model or options.a
    settings = load_model(preprocess) if preprocess else None
    with open_engine(path) as engine:
        graph = _graph_of(options, model, engine, report)
        tensors = _recorded(recorded_path, engine) if recorded_path else {}
        preparation = settings.preprocess if settings else engine.manifest.preprocessing or None
        samples = _samples(options.inputs, graph, preparation, tensors)
        comparer = Comparer(engine, graph, _emulation(options), _gpu_ranges(options))
        for number, (name, sample) in enumerate(samples):
            comparer.add(sample, name)
            report("samples", (number + 1) / len(samples))
        metric = None
        if preprocess and settings and isinstance(settings.decode, Scored):
            metric = _metric(comparer, engine, options, settings, report)
        comparison = comparer.comparison(str(model), metric, _notes(engine.manifest))
        recorded = None
        if recorded_path:
            recorded = lay_beside(comparer.traces, comparer.emulations, samples[0][1], tensors)
        return comparison, recorded


def _emulation(options: Compare) -> Emulation:
    return Emulation("exact" if options.dla == "exact" else "fast", options.scales or "hardware")


def _compare_model(options: Compare, report: Progress) -> tuple[Comparison, Recorded | None]:
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
        table=read_ranges(table, shapes=shapes, any_weight_scale=True).table if table else None,
        shapes=shapes,
        plugins=options.plugins,
        kernels=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{model.stem}.engine"
        source = ModelPath(model, options.inputs_as_nchw)
        build_engine(source, options.profile or "", path, build_options, report)
        return _compare_engine(options, path, report)


def _recorded(path: Path, engine: Engine) -> Mapping[str, NDArray[Any]]:
    """Return the tensors of an .npz file, or those that a selftest's report has of the engine."""
    return recorded_in(path, engine.sha256) if is_report(path) else load_recorded(path)


def _graph_of(options: Compare, path: Path, engine: Engine, report: Progress) -> ir.Model:
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
    build_options = BuildOptions(
        precision="int8", shapes=shapes, dims=manifest.dims, plugins=options.plugins
    )
    source = ModelPath(path, options.inputs_as_nchw)
    return read_model(source, choose_target(HOST), build_options, report, assume_ranges=True).graph


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
    shapes = options.inputs.shapes
    return read_ranges(options.table, shapes=shapes, any_weight_scale=True).table.tensors


def _metric(
    comparer: Comparer,
    engine: Engine,
    options: Compare,
    settings: ModelConfig,
    report: Progress,
) -> Metric:
    """Return mAP50 of the three on the scenes that ship with Tandem."""
    preprocess, emulation, gap = options.inputs.preprocess, _emulation(options), comparer.gap
    assert preprocess is not None
    held_out = load_held_out(load_labels(preprocess.parent / settings.labels))

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

    fp32 = points(plain_model(options.model or options.a), "FP32")
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
