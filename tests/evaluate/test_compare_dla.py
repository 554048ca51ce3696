"""`tandem compare`: layers small enough that every figure is worked out by hand."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from emulator_segments import SegmentBuilder
from model_fixtures import save, small_convnet
from numpy.typing import NDArray
from onnx import helper
from selftest_reports import report

from device.dla_emulator.options import Emulation
from device.engine.file import open_engine
from device.engine.manifest import TensorInfo
from device.errors import TandemError
from device.selftest.engines import INPUT
from device.selftest.report import RECORDED, RecordedRow, write_report
from device.session import open_session
from toolkit.cli.main import tandem
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.evaluate.compare.causes import (
    POOL_SCALE,
    Variants,
    causes_of,
    clipping_cost_db,
    shared_scale_cost_db,
)
from toolkit.evaluate.compare.compare import Comparer, Comparison, OwnError, TensorRow
from toolkit.evaluate.compare.recorded import load_recorded
from toolkit.evaluate.compare.report import comparison_text, why
from toolkit.evaluate.error_tally import ErrorTally
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.partition.planning.plan import PlanOptions
from toolkit.quantize.qdq.export import export_qdq
from toolkit.quantize.quantize import calibrated_tensors, with_operands

Shape = tuple[int, ...]
SIZE = 64  # large enough for the DLA to pay
TIES = [1, 3, 5, 7, -1, 2]


def float_input(b: SegmentBuilder, shape: Shape, scale: float) -> str:
    """A float32 input of the segment, rounded to INT8 in it."""
    name = f"x{len(b.inputs)}"
    b.inputs.append(TensorInfo(name=name, dtype="float32", shape=shape))
    return b.rounded(name, scale)


def compared(
    folder: Path, b: SegmentBuilder, op: str, feeds: dict[str, np.ndarray], **attributes: Any
) -> Comparison:
    """The engine of `b`, whose one layer is its only node without Q/DQ, beside it in FP32."""
    name = next(node.output[0] for node in b.nodes if node.op_type == op)
    weights = {"w": np.ones((1, 1, 1, 1), np.float32)} if op == "Conv" else {}
    nodes = [helper.make_node(op, [*feeds, *weights], [name], "layer", **attributes)]
    out = list(next(iter(feeds.values())).shape)
    if op == "AveragePool":
        out = [1, 1, 1, out[3] // 2]
    shapes: dict[str, Sequence[int | str]] = {k: list(v.shape) for k, v in feeds.items()}
    graph: ir.Model = import_model(
        save(folder / "m.onnx", nodes, shapes, {name: out}, weights)
    ).model
    with open_engine(b.engine(folder)) as engine:
        comparer = Comparer(engine, graph, Emulation())
        comparer.add(feeds)
        return comparer.comparison("m.onnx")


def conv(folder: Path, numbers: list[int], scale: float) -> Comparison:
    """One product by 1, from steps of 1 to steps of `scale`."""
    b, shape = SegmentBuilder(), (1, 1, 1, len(numbers))
    x = float_input(b, shape, 1.0)
    b.output(b.op("Conv", x, b.weight(np.ones((1, 1, 1, 1), np.int8), 1.0)), scale)
    return compared(folder, b, "Conv", {"x0": np.array(numbers, np.float32).reshape(shape)})


def layer(comparison: Comparison, op: str) -> tuple[TensorRow, OwnError]:
    (row,) = [row for row in comparison.nodes if row.op == op]
    assert row.own is not None
    return row, row.own


def test_halves_go_away_from_zero_on_the_dla_and_to_even_on_the_gpu(tmp_path: Path) -> None:
    """In steps of 2: 0.5 1.5 2.5 3.5 -0.5 1; to even 0 2 2 4 0 1, away 1 2 3 4 -1 1."""
    row, error = layer(conv(tmp_path, TIES, 2.0), "Conv")
    assert error.causes == {"tie": 3}
    assert (error.differing, error.elements, error.largest_steps) == (3, 6, 1)
    assert error.worst is not None
    assert (error.worst.index, error.worst.expected, error.worst.found) == ((0, 0, 0, 0), 0.0, 1.0)
    # Noise is 5 halves squared on both sides, the signal is 0.25 (1 + 9 + 25 + 49 + 1) + 1.
    assert error.gpu_sqnr_db == error.dla_sqnr_db == pytest.approx(10 * np.log10(22.25 / 1.25))
    assert row.dla is not None
    assert row.dla.sqnr_db == pytest.approx(error.dla_sqnr_db)


def test_a_scale_of_16_bits_is_a_little_too_small(tmp_path: Path) -> None:
    """1/6 is trunc(2^17 / 6) / 2^17 = 0.1666641: 9 and 21 end below 1.5 and 3.5."""
    _, error = layer(conv(tmp_path, [9, 21, 1, 2], 6.0), "Conv")
    assert error.causes == {"multiplier": 2}
    assert error.differing == 2


def test_an_average_of_2x2_rounds_twice(tmp_path: Path) -> None:
    """Sums 1 2 5 4: exact 0.25 0.5 1.25 1; the DLA gives 1 1 2 1, the graph 0 0 1 1."""
    b, shape = SegmentBuilder(), (1, 1, 2, 8)
    x = float_input(b, shape, 1.0)
    b.output(b.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]), 1.0)
    feeds = {"x0": np.zeros(shape, np.float32)}
    feeds["x0"][0, 0, 0, ::2] = [1, 2, 5, 4]
    comparison = compared(tmp_path, b, "AveragePool", feeds, kernel_shape=[2, 2], strides=[2, 2])
    _, error = layer(comparison, "AveragePool")
    assert error.causes == {"twice": 2, "tie": 1}
    signal = 0.25**2 + 0.5**2 + 1.25**2 + 1
    assert error.gpu_sqnr_db == pytest.approx(10 * np.log10(signal / (2 * 0.25**2 + 0.5**2)))
    assert error.dla_sqnr_db == pytest.approx(10 * np.log10(signal / (2 * 0.75**2 + 0.5**2)))
    assert error.costs


def test_a_sum_says_what_one_scale_costs_the_small_operand(tmp_path: Path) -> None:
    """0.34 and 12.7 have noise 0.04^2 in steps of 0.1, 0.34^2 + 0.3^2 in the shared steps of 1."""
    b, shape = SegmentBuilder(), (1, 1, 1, 2)
    b.output(b.op("Add", float_input(b, shape, 1.0), float_input(b, shape, 1.0)), 1.0)
    feeds = {
        "x0": np.array([127, -100], np.float32).reshape(shape),
        "x1": np.array([0.34, 12.7], np.float32).reshape(shape),
    }
    _, error = layer(compared(tmp_path, b, "Add", feeds), "Add")
    assert error.shared_scale_db == pytest.approx(
        10 * np.log10((0.34**2 + 0.3**2) / 0.04**2), rel=1e-4
    )
    assert error.differing == 0
    assert error.costs


def test_a_range_that_clips_is_named(tmp_path: Path) -> None:
    """127 steps of 0.1 hold 12.7: of 100, 87.3 are lost, where steps of 100 / 127 lose 0.4."""
    _, error = layer(conv(tmp_path, [100, 1, 2, 3], 0.1), "Conv")
    rounded = np.rint(np.array([1, 2, 3]) / (100 / 127)) * (100 / 127)
    tensors = float(((rounded - [1, 2, 3]) ** 2).sum())
    assert error.clipped_db == pytest.approx(10 * np.log10(87.3**2 / tensors), rel=1e-3)
    assert error.costs
    assert error.leaves
    assert any("its range clips what leaves the DLA" in reason for reason in why(error))
    inside = replace(error, leaves=False)
    assert any("its range clips what the layer gives" in reason for reason in why(inside))
    assert clipping_cost_db(np.array([12.7, 3.3]), 0.1) == 0.0
    assert clipping_cost_db(np.full(1000, 1.0), 2 / 127) == 0.0


def test_a_pooling_is_named_for_the_scale_of_its_input(tmp_path: Path) -> None:
    """Averages of at most 1.5 at steps of 1, where 1.5 / 127 would serve them."""
    b, shape = SegmentBuilder(), (1, 1, 2, 8)
    x = float_input(b, shape, 1.0)
    b.output(b.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]), 1.0)
    feeds = {"x0": np.zeros(shape, np.float32)}
    feeds["x0"][0, 0, 0, ::2] = [1, 2, 5, 6]
    comparison = compared(tmp_path, b, "AveragePool", feeds, kernel_shape=[2, 2], strides=[2, 2])
    _, error = layer(comparison, "AveragePool")
    assert error.shared_scale_db > 20
    assert any(reason.startswith("a pooling rounds its averages") for reason in why(error))


def test_a_bias_of_16_bits_is_told_from_a_multiplier() -> None:
    """The first element is right with an exact bias alone, the second only with exact scales."""
    dla, gpu = np.array([1, 1, 0], np.int8), np.zeros(3, np.int8)
    variants = Variants(exact_bias=np.array([0, 1, 0], np.int8), ideal=gpu)
    causes = causes_of(dla, gpu, variants, np.array([0.1, 0.1, 0.0]), frozenset({"Conv"}))
    assert causes == {"bias": 1, "multiplier": 1}


def test_a_scale_that_is_finer_than_needed_costs_nothing() -> None:
    assert shared_scale_cost_db(np.array([127.0, 3.3]), 0.5) == 0.0
    assert shared_scale_cost_db(np.zeros(3), 0.5) == 0.0


def test_what_no_variant_shows_is_called_other() -> None:
    dla, gpu = np.array([5, 0], np.int8), np.array([4, 0], np.int8)
    assert causes_of(dla, gpu, Variants(dla, dla), np.array([4.1, 0.0]), frozenset({"Conv"})) == {
        "other": 1
    }


def test_figures_of_several_samples_are_those_of_all_numbers_together() -> None:
    rng, tally = np.random.default_rng(), ErrorTally()
    y, z = rng.normal(size=(4, 3, 5)), rng.normal(size=(4, 3, 5))
    for number, (expected, actual) in enumerate(zip(y, z, strict=True)):
        tally.add(expected, actual, number)
    error = tally.error()
    assert error.sqnr_db == pytest.approx(10 * np.log10((y**2).sum() / ((z - y) ** 2).sum()))
    cosine = (y * z).sum() / np.linalg.norm(y) / np.linalg.norm(z)
    assert error.cosine == pytest.approx(cosine)
    sample, *index = (int(i) for i in np.unravel_index(np.abs(z - y).argmax(), y.shape))
    assert error.worst is not None
    assert (error.worst.sample, error.worst.index) == (sample, tuple(index))


def test_a_tensor_with_two_scales_names_the_sample_of_its_worst_element(tmp_path: Path) -> None:
    """Each sample counts it twice: the third was called the fifth or sixth, which there is not."""
    b, shape = SegmentBuilder(), (1, 1, 1, 4)
    x = float_input(b, shape, 1.0)
    product = b.op("Conv", x, b.weight(np.ones((1, 1, 1, 1), np.int8), 1.0))
    for scale in (1.0, 2.0):
        b.output(product, scale)
    nodes = [
        helper.make_node("Conv", ["x0", "w"], [product], "layer"),
    ]
    weights = {"w": np.ones((1, 1, 1, 1), np.float32)}
    graph = import_model(
        save(tmp_path / "m.onnx", nodes, {"x0": list(shape)}, {product: list(shape)}, weights)
    ).model
    with open_engine(b.engine(tmp_path)) as engine:
        comparer = Comparer(engine, graph, Emulation())
        for value in (0.0, 2.0, 101.0):
            comparer.add({"x0": np.full(shape, value, np.float32)}, f"picture {value}")
        comparison = comparer.comparison("m.onnx")
    text = comparison_text(comparison, None, every=True)
    assert "worst, in steps: picture 101.0" in text
    assert all(
        error.worst is None or error.worst.sample < 3
        for row in comparison.nodes
        for error in (row.gpu, row.dla)
        if error is not None
    )


Built = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An engine for a board with a DLA, its model, and data."""
    folder, rng = tmp_path_factory.mktemp("compare"), np.random.default_rng(7)
    model = small_convnet(folder / "m.onnx", rng, SIZE, 64)
    data = folder / "data"
    data.mkdir()
    for number in range(2):
        np.save(data / f"{number}.npy", rng.normal(size=(1, 3, SIZE, SIZE)).astype(np.float32))
    result = build_engine(
        model,
        "agx-orin-64gb",
        folder / "m.engine",
        BuildOptions(
            data=data,
            plan=PlanOptions(objective="gpu-relief", power_mode="15W", min_gain=0.0),
            kernels=False,
        ),
    )
    return result.path, model, data


def run(*arguments: object) -> str:
    done = CliRunner().invoke(tandem, ["compare", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_says_it_all(built: Built) -> None:
    engine, model, data = built
    document = json.loads(run(engine, "--model", model, "--data", data, "--json"))
    assert (document["samples"], document["sample_names"]) == (2, ["0.npy", "1.npy"])
    costs = {
        row["tensor"]: max(row["own"]["cost_db"], row["own"]["shared_scale_db"])
        for row in document["nodes"]
        if row["own"] and not row["own"]["clipped_db"]
    }
    listed = [costs[tensor] for tensor in document["by_cost"] if tensor in costs]
    assert listed == sorted(listed, reverse=True)
    assert document["dla_segments"] >= 1
    assert document["outputs"][0]["dla"]["sqnr_db"] > 10
    assert any(row["own"] for row in document["nodes"])
    text = run(engine, "--model", model, "--data", data, "--samples", "1", "--nodes")
    assert "silicon may differ" in text
    assert all(row["node"] in text for row in document["nodes"])


def test_the_model_of_another_engine_is_refused(built: Built, tmp_path: Path) -> None:
    engine, _, data = built
    second = small_convnet(tmp_path / "other.onnx", np.random.default_rng(8))
    with pytest.raises(TandemError, match="give the model that the engine was built from"):
        run(engine, "--model", second, "--data", data)


def test_an_engine_without_dla_says_so(built: Built, tmp_path: Path) -> None:
    _, model, data = built
    result = build_engine(model, "laptop", tmp_path / "cpu.engine", BuildOptions(dummy_ranges=True))
    text = run(result.path, "--model", model, "--data", data, "--samples", "1")
    assert "no segment on the DLA" in text
    assert text.startswith("UNCALIBRATED")
    assert "CPU INT8" in text


def test_an_engine_in_fp32_is_not_called_int8(built: Built, tmp_path: Path) -> None:
    _, model, data = built
    options = BuildOptions(precision="fp32")
    path = build_engine(model, "laptop", tmp_path / "f.engine", options).path
    text = run(path, "--model", model, "--data", data, "--samples", "1")
    assert "CPU FP32" in text
    assert "INT8" not in text


def test_a_model_with_a_profile_is_built_and_compared(built: Built) -> None:
    _, model, data = built
    document = json.loads(run(model, "--profile", "agx-orin-64gb", "--data", data, "--json"))
    assert (document["graph"], document["precision"], document["samples"]) == (
        "GPU INT8",
        "int8",
        2,
    )
    assert document["outputs"][0]["gpu"]["sqnr_db"] > 10


def test_a_q_dq_model_with_other_weight_scales_gives_ranges_as_in_a_build(
    built: Built, tmp_path: Path
) -> None:
    _, model, data = built
    graph, _ = run_passes(import_model(model).model)
    ranges = with_operands(graph, dict.fromkeys(calibrated_tensors(graph), 4.0))
    quantized = export_qdq(graph, ranges)
    weights = quantized.graph.initializers
    scale = next(
        node.inputs[1]
        for node in quantized.graph
        if node.op_type == "QuantizeLinear" and node.inputs[0].name in weights
    )
    scale.const_value = ir.tensor(0.9 * scale.const_value.numpy(), name=scale.name)
    ir.save(quantized, tmp_path / "qdq.onnx")
    document = json.loads(
        run(model, "--profile", "agx-orin-64gb", "--table", tmp_path / "qdq.onnx", "--data", data,
            "--json")
    )  # fmt: skip
    assert (document["precision"], document["samples"]) == ("int8", 2)


def recorded_run(engine: Path, model: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the emulation makes, by tensor, as if a board had made it."""
    with open_engine(engine) as opened:
        comparer = Comparer(opened, import_model(model).model, Emulation())
        values, actual = dict(feeds), dict(feeds)
        for trace in comparer.traces:
            emulations = comparer.emulations.get(trace.segment.name)
            if emulations is None:
                result = trace.run(values)
            else:
                given = {name: values[name] for name in trace.segment.inputs}
                steps = emulations.requested.trace(given)
                actual |= {one.tensor: one.real() for one in steps if " " not in one.tensor}
                result = emulations.requested.run(given, dict.fromkeys(trace.segment.outputs), {})
            values |= {name: result[name] for name in trace.segment.outputs}
    return actual


def test_one_changed_element_of_a_recorded_run_is_found(built: Built, tmp_path: Path) -> None:
    engine, model, data = built
    feeds = {"x": np.load(data / "1.npy")}
    run_of = recorded_run(engine, model, feeds)
    same = tmp_path / "same.npz"
    np.savez(same, allow_pickle=False, **run_of)
    actual = json.loads(run(engine, "--model", model, "--recorded", same, "--json"))["recorded"]
    assert actual["first"] is None
    assert len(actual["tensors"]) == len(run_of) - 1
    row = actual["tensors"][len(actual["tensors"]) // 2]
    changed = run_of[row["tensor"]].copy()
    changed.flat[3] -= 2 * row["scale"] * np.sign(changed.flat[3] or 1)
    second = tmp_path / "other.npz"
    run_of |= {row["tensor"]: changed, "alien": np.zeros(2)}
    np.savez(second, allow_pickle=False, **run_of)
    actual = json.loads(run(engine, "--model", model, "--recorded", second, "--json"))["recorded"]
    assert actual["first"]["tensor"] == row["tensor"]
    assert (actual["first"]["differing"], actual["first"]["largest"]) == (1, 2.0)
    assert actual["first"]["worst"]["index"] == list(np.unravel_index(3, changed.shape))
    assert actual["unknown"] == ["alien"]


def board_report(path: Path, engine: Path, run_of: dict[str, np.ndarray]) -> Path:
    """A report as a board writes it: `x` and what came of it, beside what is of other engines."""
    data = io.BytesIO()
    np.savez(data, allow_pickle=False, **{INPUT + "x" if n == "x" else n: a
                                          for n, a in run_of.items()})  # fmt: skip
    with open_engine(engine) as opened:
        rows = (
            RecordedRow(item="dla-int8", engine_sha256=opened.sha256),
            RecordedRow(item="other", engine_sha256="cd" * 32),
            RecordedRow(item="gone", engine_sha256=opened.sha256, problem="it hung"),
        )
    written = msgspec.structs.replace(report(), recorded=rows)
    write_report(path, written, {f"{RECORDED}dla-int8.npz": data.getvalue()})
    return path


def test_the_report_of_a_board_is_laid_beside_the_emulation(built: Built, tmp_path: Path) -> None:
    engine, model, data = built
    feeds = {"x": np.load(data / "1.npy")}
    with open_session(engine, dla="exact") as session:  # the board computes what we say of it
        tensors = feeds | session.infer(feeds)
    path = board_report(tmp_path / "same.tandem-report", engine, tensors)
    document = json.loads(run(engine, "--model", model, "--recorded", path, "--json"))
    assert document["sample_names"] == ["the recorded run"]
    assert document["recorded"]["first"] is None
    assert [row["tensor"] for row in document["recorded"]["tensors"]] == ["y"]
    tensors["y"].flat[3] += 100.0
    path = board_report(tmp_path / "other.tandem-report", engine, tensors)
    document = json.loads(run(engine, "--model", model, "--recorded", path, "--json"))["recorded"]
    assert (document["first"]["tensor"], document["first"]["differing"]) == ("y", 1)
    assert document["first"]["largest"] == pytest.approx(100.0, rel=1e-3)
    write_report(path, report(), {})
    with pytest.raises(TandemError, match=r"no outputs of this engine; it has those of none"):
        run(engine, "--model", model, "--recorded", path)


@pytest.mark.parametrize("content", [b"no archive", b"PK\x03\x04 cut"])
def test_a_recorded_file_that_is_none_is_refused(
    built: Built, tmp_path: Path, content: bytes
) -> None:
    engine, model, _ = built
    path = tmp_path / "r.npz"
    path.write_bytes(content)
    with pytest.raises(TandemError, match=r"numpy\.savez"):
        run(engine, "--model", model, "--recorded", path)


@pytest.mark.parametrize(
    ("array", "says"),
    [(np.array(["a"]), "not numbers"), (np.array([1.0, np.nan]), "holds NaN")],
)
def test_recorded_arrays_that_cannot_be_compared_are_refused_by_name(
    array: NDArray[Any], says: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "out.npz", fine=np.array([np.inf, 1.0]), bad=array)
    with pytest.raises(TandemError, match=f"'bad' .*{says}|'bad' {says}"):
        load_recorded(tmp_path / "out.npz")


def test_a_shared_scale_is_named_for_a_concatenation_too() -> None:
    error = OwnError(40.0, 40.0, 1, 0, 0, None, {}, shared_scale_db=3.0)
    assert why(error) == ("a layer shares one scale among its operands (3.00 dB for one of them)",)


def test_a_pooling_has_one_scale_that_is_too_coarse() -> None:
    error = OwnError(40.0, 40.0, 1, 0, 0, None, {}, shared_scale_db=3.0, shared_reason=POOL_SCALE)
    assert why(error) == (f"{POOL_SCALE} (3.00 dB)",)
