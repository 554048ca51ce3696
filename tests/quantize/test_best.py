"""Which nodes stay in floating point beside INT8, and what is said of each."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from model_fixtures import save, small_convnet
from onnx import helper

from calibration.budget import parse_budget
from device.engine.manifest import Precision
from device.profile import load_profile
from scripts.networks import NETWORKS
from toolkit.cli.commands.build import build
from toolkit.engine.build import BuildOptions, BuildResult, build_engine, plan_engine
from toolkit.engine.frontend import run_frontend
from toolkit.engine.target import choose_target
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.partition.best_precision import GpuNodes, no_gain_nodes
from toolkit.partition.costs.measured import Measured, MeasuredTime, measured_in_both
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.options import PlanOptions
from toolkit.progress import silent
from toolkit.quantize.ranges.measure import RangeOptions
from toolkit.quantize.ranges.table_file import read_ranges

PRECISIONS: tuple[Precision, ...] = ("int8", "fp16")

pytestmark = pytest.mark.usefixtures("without_kernels")


def graph_of(path: Path) -> ir.Model:
    graph, _ = run_passes(import_model(path).model)
    return graph


def no_gain_on(graph: ir.Model, profile: str, times: tuple[Measured, ...] = ()) -> dict[str, str]:
    """The nodes that INT8 does not speed up, where the GPU has all of them."""
    nodes = GpuNodes([str(node.name) for node in graph.graph], times=times)
    return no_gain_nodes(graph, nodes, load_profile(profile), None)


def chain(tmp_path: Path, rng: np.random.Generator, channels: int, size: int, group: int) -> Path:
    """Two convolutions 3x3, the second in groups."""
    shape = (channels, channels // group, 3, 3)
    weights = {
        "v": rng.normal(size=(channels, channels, 3, 3)).astype(np.float32),
        "w": rng.normal(size=shape).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], name="first", pads=[1] * 4),
        helper.make_node("Conv", ["a", "w"], ["y"], name="second", pads=[1] * 4, group=group),
    ]
    sizes = [1, channels, size, size]
    return save(tmp_path / "m.onnx", nodes, {"x": sizes}, {"y": sizes}, weights)


def test_nodes_bound_by_their_launch_gain_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    no_gain = no_gain_on(graph_of(small_convnet(tmp_path / "m.onnx", rng)), "h200")
    assert {"conv0", "pool", "fc"} <= no_gain.keys()
    assert all(" saves " in why for why in no_gain.values())


def test_products_that_keep_the_gpu_busy_are_int8(tmp_path: Path, rng: np.random.Generator) -> None:
    graph = graph_of(chain(tmp_path, rng, 256, 56, group=1))
    assert no_gain_on(graph, "orin-nano-8gb") == {}


def test_a_gain_below_the_least_is_called_so(tmp_path: Path, rng: np.random.Generator) -> None:
    graph = graph_of(chain(tmp_path, rng, 256, 56, group=1))

    def reasons(int8_us: float) -> set[str]:
        times = times_of(graph, "int8", lambda _: int8_us), times_of(graph, "fp16", lambda _: 50.0)
        return set(no_gain_on(graph, "orin-nano-8gb", times).values())

    together = "INT8 of 2 kernels together saves"
    assert reasons(49.5) == {
        f"{together} less than 2 %: 99.0 us and 0.0 us to convert, FP16 100.0 us measured"
    }
    assert reasons(50.0) == {
        f"{together} nothing: 100.0 us and 0.0 us to convert, FP16 100.0 us measured"
    }


def test_without_a_gpu_all_stay_int8(tmp_path: Path, rng: np.random.Generator) -> None:
    assert no_gain_on(graph_of(small_convnet(tmp_path / "m.onnx", rng)), "laptop") == {}


def best(tmp_path: Path, rng: np.random.Generator, profile: str, budget: str | None) -> BuildResult:
    model = small_convnet(tmp_path / "m.onnx", rng)
    data = [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(8)]
    ranges = RangeOptions("minmax", budget=parse_budget(budget) if budget else None)
    options = BuildOptions("best", data=data, ranges=ranges)
    return build_engine(model, profile, tmp_path / "m.engine", options)


def test_the_noise_stays_within_a_hundredth_of_the_signal(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    result = best(tmp_path, rng, "h200", None)
    assert result.manifest.provenance.precision == "int8"
    assert result.calibration is not None
    assert min(result.calibration.sqnr_db.values()) >= 20
    assert result.calibration.table.keep_float == ()  # it holds for other boards, too
    assert " saves " in result.kept["conv0"]


ALONE = "the budget: INT8 of it alone "


def test_a_budget_names_the_nodes_that_it_cost(tmp_path: Path, rng: np.random.Generator) -> None:
    plain = best(tmp_path, rng, "agx-orin-64gb", "sqnr:0")
    assert all(" saves " in why for why in plain.kept.values())
    assert plain.calibration is not None
    # What the node that saves nothing keeps may do for the first limit already.
    for more_db in (10, 20):
        expected = min(plain.calibration.sqnr_db.values()) + more_db
        result = best(tmp_path, rng, "agx-orin-64gb", f"sqnr:{expected}")
        spent = [why for why in result.kept.values() if why.startswith(ALONE)]
        if spent:
            break
    assert spent
    assert all(" saves " in why for why in result.kept.values() if why not in spent)


@pytest.mark.parametrize(("profile", "precision"), [("orin-nano-8gb", "fp16"), ("laptop", "fp32")])
def test_without_ranges_it_is_floating_point(
    profile: str, precision: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    result = build_engine(model, profile, tmp_path / "m.engine", BuildOptions("best"))
    assert result.manifest.provenance.precision == precision
    assert result.kept == {}


def test_a_table_without_samples_keeps_no_gain_nodes_too(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    measured = best(tmp_path, rng, "agx-orin-64gb", "sqnr:0").calibration
    assert measured is not None
    options = BuildOptions("best", table=measured.table)
    result = build_engine(tmp_path / "m.onnx", "h200", tmp_path / "m.engine", options)
    assert " saves " in result.kept["conv0"]


def swamped(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Two convolutions 3x3; the second reads what one large channel hides in INT8."""
    weights = {name: rng.normal(size=(16, 16, 3, 3)).astype(np.float32) for name in "vw"}
    weights["v"][0] *= 3000
    weights["w"][:, 0] *= 1e-4
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], name="first", pads=[1] * 4),
        helper.make_node("Conv", ["a", "w"], ["y"], name="second", pads=[1] * 4),
    ]
    return save(tmp_path / "m.onnx", nodes, {"x": [1, 16, 8, 8]}, {"y": [1, 16, 8, 8]}, weights)


def test_the_table_of_a_build_is_judged_with_all_in_int8(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Both convolutions are FP16 on this board, and on others INT8 by the same table."""
    model, table = swamped(tmp_path, rng), tmp_path / "m.calib.json"
    data = [{"x": rng.normal(size=(1, 16, 8, 8)).astype(np.float32)} for _ in range(8)]
    options = BuildOptions(data=data, ranges=RangeOptions("minmax"), save_table=table)
    with pytest.raises(BuildError, match="INT8 loses too much"):
        build_engine(model, "h200", tmp_path / "m.engine", options)
    assert read_ranges(table).table.refused
    accepted = replace(options, accept_loss=True)
    result = build_engine(model, "h200", tmp_path / "m.engine", accepted)
    assert result.kept.keys() == {"first", "second"}


def test_data_and_the_table_measured_on_it_make_the_same_choice(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """The budget keeps "second", so that "third" alone would read its operand in INT8."""
    sizes, file = [1, 64, 28, 28], tmp_path / "m.calib.json"
    weights = {name: rng.normal(size=(64, 64, 3, 3)).astype(np.float32) for name in "vw"}
    weights["v"][0] *= 3000
    weights["w"][:, 0] *= 1e-4
    weights["u"] = rng.normal(size=(64, 64, 1, 1)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], name="first", pads=[1] * 4),
        helper.make_node("Conv", ["a", "w"], ["y"], name="second", pads=[1] * 4),
        helper.make_node("Conv", ["a", "u"], ["z"], name="third"),
    ]
    model = save(tmp_path / "m.onnx", nodes, {"x": sizes}, {"y": sizes, "z": sizes}, weights)
    data = [{"x": rng.normal(size=sizes).astype(np.float32)} for _ in range(4)]
    plain = RangeOptions("minmax", equalise="off")
    options = BuildOptions("best", data=data, ranges=plain, save_table=file, accept_loss=True)
    target = choose_target("orin-nano-8gb")
    measured = run_frontend(model, target, options)
    given = BuildOptions("best", table=read_ranges(file).table, accept_loss=True)
    assert measured.keep_float == run_frontend(model, target, given).keep_float
    assert measured.keep_float == {"second", "third"}
    assert measured.kept_off_dla == {"second"}  # what the table says, for any board


def test_the_command_says_why(tmp_path: Path, rng: np.random.Generator) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    for at in range(4):
        np.save(tmp_path / f"{at}.npy", rng.normal(size=(1, 3, 32, 32)).astype(np.float32))
    arguments = [str(model), "--profile", "h200", "--precision", "best", "--data", str(tmp_path)]
    text = CliRunner().invoke(build, arguments, catch_exceptions=False).output
    assert re.search("conv0 stays in floating point: INT8.* saves ", text)
    result = CliRunner().invoke(build, [*arguments, "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)
    assert " saves " in report["keep_float"]["conv0"]
    (row,) = (row for row in report["gains"] if row["node"] == "conv0")
    assert row["kept"] == report["keep_float"]["conv0"]
    assert row["int8_us"] > 0
    assert row["half_us"] > 0


def beside_softmax(tmp_path: Path, rng: np.random.Generator, size: int) -> ir.Model:
    """A convolution 1x1 of what a Softmax makes, which an Add in floating point reads, too."""
    nodes = [
        helper.make_node("Softmax", ["x"], ["s"], name="softmax", axis=1),
        helper.make_node("Conv", ["s", "w"], ["a"], name="conv"),
        helper.make_node("Sigmoid", ["s"], ["g"], name="gate"),
        helper.make_node("Softmax", ["a"], ["b"], name="after", axis=1),
        helper.make_node("Mul", ["b", "g"], ["y"], name="mul"),
    ]
    sizes = [1, 128, size, size]
    weights = {"w": rng.normal(size=(128, 128, 1, 1)).astype(np.float32)}
    return graph_of(save(tmp_path / "m.onnx", nodes, {"x": sizes}, {"y": sizes}, weights))


def test_a_second_copy_of_an_operand_counts(tmp_path: Path, rng: np.random.Generator) -> None:
    """The convolution alone gains, and loses with what makes INT8 of its operand."""
    no_gain = no_gain_on(beside_softmax(tmp_path, rng, 56), "orin-nano-8gb")
    assert no_gain.keys() == {"conv"}
    int8_us, to_convert_us, half_us = (
        float(number) for number in re.findall(r"([0-9.]+) us", no_gain["conv"])
    )
    assert int8_us < 0.98 * half_us < int8_us + to_convert_us


def test_a_gate_reads_either_type(tmp_path: Path, rng: np.random.Generator) -> None:
    """The Mul of squeeze-and-excitation has no INT8 arithmetic, and may read INT8."""
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], name="before", pads=[1] * 4),
        helper.make_node("GlobalAveragePool", ["a"], ["p"], name="pool"),
        helper.make_node("Sigmoid", ["p"], ["g"], name="curve"),
        helper.make_node("Mul", ["a", "g"], ["m"], name="gate"),
        helper.make_node("Conv", ["m", "v"], ["y"], name="after", pads=[1] * 4),
    ]
    weights = {"v": rng.normal(size=(256, 256, 3, 3)).astype(np.float32)}
    sizes = [1, 256, 56, 56]
    graph = graph_of(save(tmp_path / "m.onnx", nodes, {"x": sizes}, {"y": sizes}, weights))
    assert not {"before", "after"} & no_gain_on(graph, "orin-nano-8gb").keys()


def mobilenet() -> ir.Model:
    graph, _ = run_passes(NETWORKS["mobilenet_v2"].model(1, None))
    return graph


def times_of(graph: ir.Model, precision: Precision, time_us: Callable[[str], float]) -> Measured:
    """Times as if a board had measured each convolution by itself."""
    rows = tuple(
        MeasuredTime(nodes=(str(node.name),), processor="gpu", time_us=time_us(str(node.name)))
        for node in graph.graph
        if node.op_type == "Conv"
    )
    return Measured(profile="orin-nano-8gb", precision=precision, source="test", times=rows)


@pytest.mark.parametrize(("factor", "in_int8"), [(1.09, True), (1.021, True), (1.019, False)])
def test_mobilenet_is_int8_where_measured_times_gain(factor: float, in_int8: bool) -> None:
    """MobileNetV2 in INT8 on Orin Nano: 1.09x of FP16 (onnxsim/onnxsim#1727, #1742)."""
    graph = mobilenet()
    convolutions = {str(node.name) for node in graph.graph if node.op_type == "Conv"}
    times = (
        times_of(graph, "int8", lambda _: 100.0 / factor),
        times_of(graph, "fp16", lambda _: 100.0),
    )
    no_gain = no_gain_on(graph, "orin-nano-8gb", times)
    assert (convolutions & no_gain.keys() == set()) == in_int8
    if not in_int8:
        assert convolutions <= no_gain.keys()
        assert all(why.endswith("us measured") for why in no_gain.values() if "kernels" in why)


def test_measured_times_of_one_precision_are_not_compared_with_predicted_ones() -> None:
    graph = mobilenet()
    slow = times_of(graph, "int8", lambda _: 1e6)
    assert no_gain_on(graph, "orin-nano-8gb", (slow,)) == no_gain_on(graph, "orin-nano-8gb")


def test_rows_are_compared_where_both_files_have_all_their_nodes() -> None:
    """A row gives its first node the time of all: half of it is no time of the others."""

    def times(precision: Precision, *rows: str) -> Measured:
        each = (MeasuredTime(nodes=tuple(row), processor="gpu", time_us=1.0) for row in rows)
        return Measured(profile="h200", precision=precision, source="test", times=tuple(each))

    int8 = times("int8", "ab", "cd", "e", "fg")
    half = times("fp16", "a", "bc", "e", "f", "g")
    assert set(measured_in_both(int8, half)) == {frozenset("e"), frozenset("fg")}


def test_a_row_of_two_kernels_is_not_compared_with_one_of_them(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    graph = graph_of(chain(tmp_path, rng, 256, 56, group=1))

    def times(precision: Precision, *nodes: str) -> Measured:
        row = MeasuredTime(nodes=nodes, processor="gpu", time_us=50.0)
        return Measured(profile="orin-nano-8gb", precision=precision, source="test", times=(row,))

    apart = times("int8", "first", "second"), times("fp16", "first")
    assert no_gain_on(graph, "orin-nano-8gb", apart) == {}
    alone = times("int8", "first"), times("fp16", "first")
    assert no_gain_on(graph, "orin-nano-8gb", alone)["first"].endswith(" us measured")


def test_times_of_an_island_say_what_is_measured(tmp_path: Path, rng: np.random.Generator) -> None:
    graph = graph_of(chain(tmp_path, rng, 16, 8, group=1))
    row = MeasuredTime(nodes=("first",), processor="gpu", time_us=5.0)
    times = tuple(
        Measured(profile="orin-nano-8gb", precision=name, source="test", times=(row,))
        for name in PRECISIONS
    )
    no_gain = no_gain_on(graph, "orin-nano-8gb", times)
    assert no_gain["first"] == no_gain["second"]
    assert no_gain["first"].endswith(" us in part measured, in part predicted")


@pytest.mark.parametrize(("precision", "total_us"), [(None, 20.0), ("int8", 10000.0)])
def test_the_plan_prices_what_goes_back_to_fp16_as_fp16(
    precision: Literal["int8"] | None, total_us: float, tmp_path: Path, rng: np.random.Generator
) -> None:
    model, target = chain(tmp_path, rng, 64, 28, group=1), choose_target("orin-nano-8gb")
    times = tuple(
        Measured(
            profile="orin-nano-8gb",
            precision=name,
            source="test",
            times=tuple(
                MeasuredTime(nodes=(node,), processor="gpu", time_us=time_us)
                for node in ("first", "second")
            ),
        )
        for name, time_us in zip(PRECISIONS, (5000.0, 10.0), strict=True)
    )
    options = BuildOptions(precision, dummy_ranges=True, node_times=times)
    planned = plan_engine(model, target, options, silent)
    assert planned.shared.plans[0].total_us == pytest.approx(total_us, abs=5.0)


def test_measured_times_that_nothing_reads_are_named(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = chain(tmp_path, rng, 16, 8, group=1)

    def notes(precision: Precision, profile: str, *nodes: str) -> list[str]:
        rows = tuple(MeasuredTime(nodes=(n,), processor="gpu", time_us=1.0) for n in nodes)
        times = Measured(profile=profile, precision=precision, source="a test", times=rows)
        options = BuildOptions(dummy_ranges=True, node_times=(times,))
        built = build_engine(model, "orin-nano-8gb", tmp_path / "m.engine", options)
        return [note for note in built.notes if "were not read" in note]

    assert notes("int8", "orin-nano-8gb", "first") == []
    assert notes("fp16", "tx2", "first") == [
        "the times in fp16 on tx2 (a test) were not read: the engine is int8 and no times in int8 "
        "are given"
    ]
    assert notes("int8", "orin-nano-8gb", "first", "third") == [
        "1 of 2 rows of the times in int8 on orin-nano-8gb (a test) were not read: they name nodes "
        "that the engine does not have, such as third"
    ]


def test_times_of_two_precisions_that_share_no_node_are_named(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = chain(tmp_path, rng, 16, 8, group=1)

    def notes(half_node: str, processor: Literal["gpu", "dla"] = "gpu") -> list[str]:
        times = tuple(
            Measured(
                profile="orin-nano-8gb",
                precision=precision,
                source=f"{precision}.toml",
                times=(MeasuredTime(nodes=(node,), processor=processor, time_us=1.0),),
            )
            for precision, node in zip(PRECISIONS, ("first", half_node), strict=True)
        )
        options = BuildOptions(dummy_ranges=True, node_times=times)
        built = build_engine(model, "orin-nano-8gb", tmp_path / "m.engine", options)
        return [note for note in built.notes if "no rows on the GPU time the same nodes" in note]

    assert notes("first") == []
    assert notes("second", "dla") == []
    (note,) = notes("second")
    assert "int8.toml has 1 in int8 and fp16.toml has 1 in fp16" in note


def test_only_what_measured_slower_goes_back_to_fp16() -> None:
    """Depthwise convolutions gain nothing; FP16 of one costs no copy, as they are in a chain."""
    graph = mobilenet()
    depthwise = {
        str(node.name)
        for node in graph.graph
        if node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1
    }
    times = (
        times_of(graph, "int8", lambda name: 130.0 if name in depthwise else 60.0),
        times_of(graph, "fp16", lambda _: 100.0),
    )
    convolutions = {str(node.name) for node in graph.graph if node.op_type == "Conv"}
    assert convolutions & no_gain_on(graph, "orin-nano-8gb", times).keys() == depthwise


@pytest.mark.parametrize(("precision", "stays"), [(None, True), ("best", True), ("int8", False)])
def test_int8_that_saves_nothing_is_fp16_unless_it_is_asked_for(
    precision: Literal["int8", "best"] | None,
    stays: bool,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    options = BuildOptions(precision, dummy_ranges=True)
    result = build_engine(model, "orin-nano-8gb", tmp_path / "m.engine", options)
    assert ("fc" in result.kept) == stays
    gains = {row.node: row for row in result.gains}
    assert gains["fc"].kept == result.kept.get("fc", "")
    notes = [note for note in result.notes if "gains nothing by INT8, such as fc" in note]
    assert bool(notes) != stays


def test_nodes_on_the_gpu_beside_a_dla_go_back_too(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    options = BuildOptions(dummy_ranges=True, plan=PlanOptions(forced=Forced(gpu=("all",))))
    on_gpu = build_engine(model, "agx-orin-64gb", tmp_path / "m.engine", options)
    assert "fc" in on_gpu.kept
    options = BuildOptions(
        dummy_ranges=True, plan=PlanOptions(forced=Forced(dla=("all",)), min_gain=0.0)
    )
    on_dla = build_engine(model, "agx-orin-64gb", tmp_path / "m.engine", options)
    processors = {row.node: row.processor for row in on_dla.plan.placements}
    assert any(processor.startswith("dla") for processor in processors.values())
    assert all(processors[node] == "gpu" for node in on_dla.kept)


def test_the_command_takes_times_of_a_board(tmp_path: Path, rng: np.random.Generator) -> None:
    """The second convolution measured slower in INT8; predicted, both gain."""
    model = chain(tmp_path, rng, 256, 56, group=1)
    times = {"int8": {"first": 40.0, "second": 90.0}, "fp16": {"first": 80.0, "second": 80.0}}
    for precision, rows in times.items():
        measured = {
            "profile": "orin-nano-8gb",
            "precision": precision,
            "source": "a test",
            "times": [
                {"nodes": [name], "processor": "gpu", "time_us": time_us}
                for name, time_us in rows.items()
            ],
        }
        (tmp_path / f"{precision}.json").write_text(json.dumps(measured))
    arguments = [str(model), "--profile", "orin-nano-8gb", "--dummy-ranges", "--json"]
    int8, half = (["--measured", str(tmp_path / f"{name}.json")] for name in times)

    def keep_float(*more: str) -> dict[str, str]:
        result = CliRunner().invoke(build, [*arguments, *more], catch_exceptions=False)
        float_nodes: dict[str, str] = json.loads(result.stdout)["keep_float"]
        return float_nodes

    assert keep_float() == keep_float(*int8) == {}
    assert keep_float(*int8, *half) == {
        "second": "INT8 saves nothing: 90.0 us and 0.0 us to convert, FP16 80.0 us measured"
    }
    twice = CliRunner().invoke(build, [*arguments, *int8, *int8])
    assert "hold times in int8: give one for each precision" in str(twice.exception)
    board = CliRunner().invoke(build, [*arguments, *half, "--profile", "h200"])
    assert "fp16.json holds times of profile 'orin-nano-8gb'" in str(board.exception)
