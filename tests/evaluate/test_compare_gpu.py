"""`tandem compare`: what a GPU would do with the ranges of an engine for the DLA, and the gap.

The foreign cache is the documented case: the shipped detector, three box ranges much too narrow.
"""

import json
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from emulator_segments import SegmentBuilder
from model_fixtures import save
from onnx import helper
from random_networks import Small

import configs
from calibration.trt_cache import cache_of, write_cache
from device.dla_emulator.options import Emulation
from device.engine.file import open_engine
from device.engine.manifest import TensorInfo
from device.errors import TandemError
from device.session import open_session
from pipelines.config import load_model
from toolkit.cli.main import tandem
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.evaluate.compare.compare import Comparer, Comparison
from toolkit.evaluate.compare.gap import (
    ARITHMETIC,
    CLIPPING,
    ROUNDING,
    SHARED,
    Gap,
    GapTally,
    Stages,
)
from toolkit.evaluate.compare.gpu import GpuNetwork, int8_on_gpu
from toolkit.evaluate.compare.report import comparison_builtins, comparison_text, gap_text
from toolkit.export.joined_network import Network, network_of
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions
from toolkit.quantize.loss.parts import OutputPart, output_parts
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.ranges.data import input_specs, open_data
from toolkit.quantize.ranges.measure import RangeOptions, measure_ranges
from toolkit.quantize.ranges.table_file import read_ranges

MODEL = configs.ROOT / "models" / "robot-objects.onnx"
SETTINGS = MODEL.with_suffix(".toml")
SCENES = configs.ROOT / "scenes"
BOXES = {f"/detector/heads.{level}/box/box.1/Conv_output_0" for level in range(3)}
TOO_NARROW = 0.1

Sample = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of TensorRT whose ranges are measured, but those of the boxes."""
    imported = import_model(MODEL)
    graph, _ = run_passes(imported.model)
    preparation = load_model(SETTINGS).preprocess
    data = open_data(SCENES / "calibration", input_specs(graph), preparation, 4)
    options = RangeOptions("minmax", equalise="off", correct_biases="off")
    table = measure_ranges(graph, data, imported.sha256, options, lambda step, share: None).table
    narrow = {name: TOO_NARROW if name in BOXES else 1.0 for name in table.tensors}
    assert {name for name in narrow if narrow[name] < 1} == BOXES
    path = tmp_path_factory.mktemp("cache") / "foreign.cache"
    amax = {name: value * narrow[name] for name, value in table.tensors.items()}
    write_cache(path, cache_of(amax, "100300"))
    return path


def detector(cache: Path, folder: Path, forced: Forced) -> Path:
    options = BuildOptions(
        table=read_ranges(cache).table,
        plan=PlanOptions(forced=forced),
        precision="int8",
        kernels=False,
        accept_loss=True,
    )
    return build_engine(MODEL, "orin-nx-16gb", folder / "m.engine", options).path


@pytest.fixture(scope="module")
def on_dla(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return detector(cache, tmp_path_factory.mktemp("dla"), Forced(dla=("all",)))


@pytest.fixture(scope="module")
def on_gpu(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return detector(cache, tmp_path_factory.mktemp("gpu"), Forced(gpu=("all",)))


def compare(*arguments: object) -> str:
    done = CliRunner().invoke(tandem, ["compare", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def scene() -> Sample:
    """A held-out scene as the detector's input."""
    settings = load_model(SETTINGS)
    specs = input_specs(import_model(MODEL).model)
    return next(iter(open_data(SCENES / "heldout", specs, settings.preprocess, 1)))


def test_clipped_boxes_are_the_cause_where_rounding_costs_little(on_dla: Path) -> None:
    """The engine's graph in onnxruntime stands for the DLA."""
    graph, _ = run_passes(import_model(MODEL).model)
    x = scene()
    exact = ActivationRunner(graph, ["boxes", "scores"])(x)
    with open_engine(on_dla) as engine, open_session(on_dla) as session:
        network = network_of(engine)
        leaving = {name.removesuffix("_int8") for name in engine.manifest.segments[0].outputs}
        gpu = GpuNetwork(network, network.amax, leaving)
        tally = GapTally(gpu, gpu, output_parts(graph))
        result = dict(session.infer(x))
        tally.add(x, exact, result, result)
    gap = tally.worst()
    assert gap is not None
    assert gap.measure == "SQNR of boxes"
    assert gap.stages.gpu > 20
    assert gap.stages.dla < 5
    assert gap.stages.causes[0][0] == CLIPPING
    assert gap.stages.causes[0][1] > 0.9 * gap.stages.lost
    assert {one.tensor for one in gap.clipped} == BOXES
    assert leaving > BOXES  # scores leave too, and are not clipped


@pytest.mark.slow
def test_boxes_that_the_dla_clips_are_whole_on_a_gpu_and_one_line_names_them(
    cache: Path, on_dla: Path
) -> None:
    sample = on_dla.parent / "sample.npz"
    np.savez(sample, allow_pickle=False, **scene())
    command = [on_dla, "--model", MODEL, "--data", sample, "--table", cache]
    document = json.loads(compare(*command, "--json"))
    (boxes,) = [row for row in document["outputs"] if row["tensor"] == "boxes"]
    assert boxes["gpu"]["sqnr_db"] > 20
    assert boxes["dla"]["sqnr_db"] < 5
    gap = document["gap"]
    assert gap["measure"] == "SQNR of boxes"
    assert gap["lost"] == pytest.approx(boxes["gpu"]["sqnr_db"] - boxes["dla"]["sqnr_db"], rel=1e-3)
    assert next(iter(gap["causes"])) == CLIPPING
    assert gap["causes"][CLIPPING] > 0.9 * gap["lost"]
    assert {tensor["tensor"] for tensor in gap["clipped"]} == BOXES
    assert all(tensor["largest"] > 3 * tensor["amax"] for tensor in gap["clipped"])
    assert all(name in gap["why"] for name in BOXES)
    assert "\n" not in gap["why"]


@pytest.mark.slow
def test_the_gap_is_in_points_where_the_task_has_a_metric(cache: Path, on_dla: Path) -> None:
    command = [on_dla, "--model", MODEL, "--data", SCENES / "heldout", "--samples", 1]
    command += ["--preprocess", SETTINGS, "--table", cache]
    document = json.loads(compare(*command, "--json"))
    metric, gap = document["metric"], document["gap"]
    assert metric["gpu"] > metric["fp32"] - 3
    assert metric["dla"] < metric["gpu"] - 20
    assert (gap["measure"], gap["unit"]) == ("mAP50", "points")
    assert gap["lost"] == pytest.approx(metric["gpu"] - metric["dla"])
    assert gap["causes"][CLIPPING] > 0.9 * gap["lost"]
    assert f"mAP50, DLA against GPU: {gap['lost']:.2f} points are lost" in gap["why"]


def rounded(model: ir.Model) -> dict[str, float]:
    """Activation that is rounded -> its scale."""
    scales = {}
    for node in model.graph:
        if node.op_type == "QuantizeLinear":
            value, scale = node.inputs[:2]
            assert value is not None
            assert scale is not None
            assert scale.const_value is not None
            scales[str(value.name)] = float(scale.const_value.numpy())
    return scales


def with_table(network: Network, cache: Path) -> dict[str, float]:
    table = read_ranges(cache).table.tensors
    return {name: table.get(name, amax) for name, amax in network.amax.items()}


def test_the_gpu_column_is_what_a_build_for_the_gpu_makes_of_the_table(
    cache: Path, on_dla: Path, on_gpu: Path
) -> None:
    """The same tensors are rounded with the same scales, and no box is."""
    with open_engine(on_dla) as for_dla, open_engine(on_gpu) as for_gpu:
        dla, gpu = network_of(for_dla), network_of(for_gpu)
        expected = rounded(int8_on_gpu(gpu, gpu.amax))
        result = rounded(int8_on_gpu(dla, with_table(dla, cache)))
        assert result == pytest.approx(expected)
        assert BOXES.isdisjoint(result)
        x = np.random.default_rng().uniform(size=(1, 3, 320, 320)).astype(np.float32)
        column = GpuNetwork(gpu, gpu.amax).run({"images": x})
        with open_session(on_gpu) as session:
            built = session.infer({"images": x})
        assert np.array_equal(column["boxes"], built["boxes"])
        assert np.array_equal(column["scores"], built["scores"])


def test_losses_of_all_steps_add_up_and_the_largest_comes_first() -> None:
    stages = Stages(gpu=90.0, shared=88.0, clipped=70.0, rounded=71.0, dla=68.0)
    assert stages.lost == 22.0
    assert stages.causes == ((CLIPPING, 18.0), (ARITHMETIC, 3.0), (SHARED, 2.0), (ROUNDING, -1.0))
    text = gap_text(Gap("mAP50", "points", stages, ()))
    assert text == (
        "mAP50, DLA against GPU: 22.00 points are lost (68.00 on the DLA, 90.00 on a GPU): "
        f"18.00 by {CLIPPING}; 3.00 by {ARITHMETIC}; 2.00 by {SHARED}"
    )


def test_a_dla_that_loses_nothing_is_said_to() -> None:
    text = gap_text(Gap("SQNR of y", "dB", Stages(30.0, 30.0, 30.0, 30.5, 30.2), ()))
    assert text == (
        "SQNR of y, DLA against GPU: nothing is lost, 30.20 dB on the DLA, 30.00 dB on a GPU"
    )


def test_the_table_of_another_model_is_refused(on_dla: Path) -> None:
    graph, _ = run_passes(import_model(MODEL).model)
    with (
        open_engine(on_dla) as engine,
        pytest.raises(TandemError, match=r"1 tensors, but none .* that the engine was built with"),
    ):
        Comparer(engine, graph, Emulation(), {"alien": 1.0})


def test_an_engine_that_gives_int8_has_no_graph_for_a_gpu_and_says_why(tmp_path: Path) -> None:
    b = SegmentBuilder()
    b.inputs.append(TensorInfo(name="x0", dtype="float32", shape=(1, 1, 1, 4)))
    product = b.op("Conv", b.rounded("x0", 1.0), b.weight(np.ones((1, 1, 1, 1), np.int8), 1.0))
    b.output(product, 0.1)
    weights = {"w": np.ones((1, 1, 1, 1), np.float32)}
    nodes = [helper.make_node("Conv", ["x0", "w"], [product], "layer")]
    shape = [1, 1, 1, 4]
    model = save(tmp_path / "m.onnx", nodes, {"x0": shape}, {product: shape}, weights)
    with open_engine(b.engine(tmp_path)) as engine:
        comparer = Comparer(engine, import_model(model).model, Emulation())
        comparer.add({"x0": np.array([100, 1, 2, 3], np.float32).reshape(shape)})
        comparison = comparer.comparison("m.onnx")
    assert comparison.gap is None
    assert any("gives integers to the model's output" in note for note in comparison.notes)
    (row,) = [row for row in comparison.nodes if row.op == "Conv"]
    assert row.gpu is not None
    assert row.gpu.sqnr_db < 5  # the graph of the engine clips 100 to 12.7


def test_scores_beside_boxes_in_pixels_are_judged_by_themselves() -> None:
    """Each part of y loses alone: its boxes nothing, its scores all but 2 dB."""
    parts = (
        OutputPart("y[0:1]", "y", "values", 1, 0, 1),
        OutputPart("y[1:2]", "y", "values", 1, 1, 2),
    )

    class Same:
        """A GPU that gives what FP32 gives."""

        scales: ClassVar[dict[str, float]] = {}
        outputs = ("y",)

        def run(self, feeds: Sample, clipped: object = ()) -> Sample:
            return {"y": y}

    y = np.array([[300.0, 0.9]], np.float32)
    low = np.array([[300.0, 0.2]], np.float32)
    gpu = cast(GpuNetwork, Same())
    tally = GapTally(gpu, gpu, parts)
    tally.add({}, {"y": y}, {"y": y}, {"y": low})
    gap = tally.worst()
    assert gap is not None
    assert gap.measure == "SQNR of y[1:2]"
    assert gap.stages.dla == pytest.approx(20 * np.log10(0.9 / 0.7), rel=1e-4)
    assert gap.stages.causes[0][0] == ARITHMETIC


def random_engine(seed: int, folder: Path) -> tuple[Path, Path, list[Sample]]:
    """An engine of a small random network, as much of it on the DLA as may, and three samples.

    The ranges clip in some of them.
    """
    rng = np.random.default_rng(seed)
    net = Small(rng).net()
    model = folder / "m.onnx"
    onnx.save(net.proto(), model)
    samples = [
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in net.inputs.items()}
        for _ in range(3)
    ]
    options = BuildOptions(
        data=samples,
        precision="int8",
        ranges=RangeOptions(str(rng.choice(("minmax", "percentile:80")))),
        plan=PlanOptions(forced=Forced(dla=("all",))),
        kernels=False,
        accept_loss=True,
    )
    return build_engine(model, "orin-nx-16gb", folder / "m.engine", options).path, model, samples


def check_comparison(actual: Comparison, exact: list[Sample]) -> None:
    """Every worst element is that of the sample that it names, and the steps add up."""
    for row in (*actual.outputs, *actual.nodes):
        for error in (row.gpu, row.dla):
            worst = None if error is None else error.worst
            if worst is not None:
                assert exact[worst.sample][row.tensor][worst.index] == worst.expected, row.tensor
        if row.own is not None and row.own.worst is not None:
            assert row.own.worst.sample < len(exact)
    if actual.gap is not None:
        stages = actual.gap.stages
        assert sum(lost for _, lost in stages.causes) == pytest.approx(stages.lost)
        largest = [tensor.lost_db for tensor in actual.gap.clipped]
        assert largest == sorted(largest, reverse=True)
        (output,) = actual.outputs
        assert output.gpu is not None
        if actual.gap.measure == f"SQNR of {output.tensor}" and abs(output.gpu.sqnr_db) < 60:
            assert stages.gpu == pytest.approx(output.gpu.sqnr_db)
    text = comparison_text(actual, None, every=True)
    assert all(name in text for name in (actual.engine, actual.model))
    json.dumps(comparison_builtins(actual, None), allow_nan=False)


def fuzz(seed: int, folder: Path) -> bool:
    """Compare a random engine on three samples; returns whether it has a DLA segment."""
    path, model, samples = random_engine(seed, folder)
    graph, _ = run_passes(import_model(model).model)
    with open_engine(path) as engine:
        comparer = Comparer(engine, graph, Emulation())
        for number, sample in enumerate(samples):
            comparer.add(sample, f"picture {number}")
        comparison = comparer.comparison(str(model))
    tensors = [str(v.name) for node in graph.graph for v in node.outputs]
    runner = ActivationRunner(graph, [*tensors, *samples[0]])
    check_comparison(comparison, [runner(sample) for sample in samples])
    return comparison.dla_segments > 0


# A tensor of the last two counts twice a sample on the DLA, which once took it for two samples.
@pytest.mark.parametrize("seed", [103, 118, 122])
def test_random_engines_compare_and_name_the_right_picture(seed: int, tmp_path: Path) -> None:
    fuzz(seed, tmp_path)


@pytest.mark.slow
def test_thirty_random_engines_compare_and_name_the_right_picture(tmp_path: Path) -> None:
    with_dla = 0
    for seed in range(100, 130):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            with_dla += fuzz(seed, folder)
        except (TandemError, AssertionError) as error:
            raise AssertionError(f"network {seed}: {error}") from error
    assert with_dla > 15
