"""`tandem compare`: FP32, GPU INT8 and DLA INT8 side by side, without a board."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.dataset import Sample
from device.engine.file import Engine, open_engine
from device.engine.manifest import Manifest
from device.runtime.executors.emulated import Emulation
from device.runtime.session import Dla, Scales, Session
from pipelines.config import Classification, ModelConfig, load_labels, load_model
from toolkit.cli.options.calibration import progress_bar
from toolkit.cli.options.plugin import plugin_option
from toolkit.errors import BuildError
from toolkit.evaluate.compare.compare import Comparer, Metric
from toolkit.evaluate.compare.recorded import lay_beside, load_recorded
from toolkit.evaluate.compare.report import comparison_builtins, comparison_text
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.plugins import Plugin
from toolkit.quantize.corrections.corrections import CORRECTION, EQUALISATION
from toolkit.quantize.qdq.importer import import_qdq
from toolkit.quantize.ranges.data import input_specs, open_data
from toolkit.quantize.ranges.measure import Report
from toolkit.quantize.ranges.table_file import has_qdq
from toolkit.quantize.trials.score import Infer, load_held_out, plain_model, score

SAMPLES = 8
CHANGED_WEIGHTS = (
    "the build changed weights ({steps}): inner tensors of FP32 and INT8 may differ by a factor or "
    "an offset for each channel; outputs compare as they are"
)


@click.command(
    epilog="Example: tandem compare m.engine model.onnx --data images/ "
    "--preprocess configs/models/robot-objects.toml"
)
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path),
    help="Pictures, a video, .npy or .npz samples.")  # fmt: skip
@click.option("--samples", type=click.IntRange(min=1), default=SAMPLES, show_default=True,
    help="How many samples.")  # fmt: skip
@click.option("--preprocess", type=click.Path(path_type=Path),
    help="Model file (configs/models/*.toml): how pictures become the input; a detector's brings "
    "mAP50 on the held-out scenes.")  # fmt: skip
@click.option("--recorded", type=click.Path(path_type=Path), metavar="OUT.npz",
    help="Tensors of a run on a board, by name; of inputs there or the first sample.")  # fmt: skip
@click.option("--dla", type=click.Choice(["exact", "fast"]), default="fast", show_default=True,
    help="Every stage in integers, or the proven short way.")  # fmt: skip
@click.option("--scales", type=click.Choice(["hardware", "ideal"]), default="hardware",
    show_default=True, help="Scales of the DLA: 16 bits and a shift, or exact.")  # fmt: skip
@click.option("--nodes", "every", is_flag=True, help="List every node, not the costly ones alone.")
@plugin_option
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(
    engine: Path,
    model: Path,
    data: Path | None,
    samples: int,
    preprocess: Path | None,
    recorded: Path | None,
    dla: str,
    scales: Scales,
    every: bool,
    plugins: tuple[Plugin, ...],
    as_json: bool,
) -> None:
    """Compare an ENGINE with its ONNX MODEL: FP32, GPU INT8, and the DLA's INT8 in software.

    Names the nodes where the DLA's arithmetic costs something, and why. Silicon may differ.
    """
    emulation = Emulation("exact" if dla == "exact" else "fast", scales)
    settings = load_model(preprocess) if preprocess else None
    with open_engine(engine) as opened, progress_bar(engine.name) as report:
        graph = _graph_of(model, opened, plugins)
        run = load_recorded(recorded) if recorded else {}
        found = _samples(data, graph, settings, samples, run)
        comparer = Comparer(opened, graph, emulation)
        for number, sample in enumerate(found):
            comparer.add(sample)
            report("samples", (number + 1) / len(found))
        metric = None
        if preprocess and settings and not isinstance(settings.decode, Classification):
            metric = _metric(opened, model, settings, preprocess, emulation, report)
        result = comparer.comparison(str(model), metric, _notes(opened.manifest))
        beside = None
        if recorded:
            beside = lay_beside(comparer.traces, comparer.emulations, found[0], run)
    if as_json:
        click.echo(json.dumps(comparison_builtins(result, beside)))
    else:
        click.echo(comparison_text(result, beside, every=every))


def _graph_of(path: Path, engine: Engine, plugins: tuple[Plugin, ...]) -> ir.Model:
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
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    if found is not None and found != stated.model_sha256:  # the import refuses what is no file
        raise BuildError(
            f"{engine.path} was made of {stated.model} with sha256 {stated.model_sha256[:12]}, but "
            f"{path} has {found[:12]}; give the model that the engine was built from."
        )
    imported = import_model(path, shapes=shapes, dims=manifest.dims, plugins=plugins)
    model = imported.model
    if has_qdq(model):
        model = import_qdq(model, any_weight_scale=True).model
    return run_passes(model)[0]


def _samples(
    data: Path | None,
    graph: ir.Model,
    settings: ModelConfig | None,
    count: int,
    recorded: Mapping[str, NDArray[Any]],
) -> list[Sample]:
    """Return the samples; those recorded go first, if the file holds all inputs."""
    specs = input_specs(graph)
    names = [spec.name for spec in specs]
    found: list[Sample] = []
    if recorded and all(name in recorded for name in names):
        found.append({name: recorded[name] for name in names})
    if data is not None:
        preparation = settings.preprocess if settings else None
        found += list(open_data(data, specs, preparation, count))
    if not found:
        raise BuildError(
            f"There is nothing to compare on: give --data, or a --recorded file that also holds "
            f"the inputs {', '.join(names)}."
        )
    return found


def _metric(
    engine: Engine,
    path: Path,
    settings: ModelConfig,
    preprocess: Path,
    emulation: Emulation,
    report: Report,
) -> Metric:
    """Return mAP50 of the three on the scenes that ship with Tandem."""
    held_out = load_held_out(load_labels(preprocess.parent / settings.labels))

    def points(infer: Infer, title: str) -> float:
        accuracy = score(infer, settings, held_out, lambda share: report(title, share))
        return 100 * accuracy.map50

    def of_engine(dla: Dla) -> float:
        with Session(engine, dla=dla, scales=emulation.arithmetic) as session:
            name = session.inputs[0].name
            return points(lambda blob: session.infer({name: blob}), f"mAP50 {dla}")

    fp32 = points(plain_model(path), "mAP50 FP32")
    return Metric("mAP50", fp32, of_engine("portable"), of_engine(emulation.mode))


def _notes(manifest: Manifest) -> tuple[str, ...]:
    changing = {EQUALISATION, CORRECTION}
    steps = [name for name in manifest.provenance.passes if name in changing]
    return (CHANGED_WEIGHTS.format(steps=", ".join(steps)),) if steps else ()
