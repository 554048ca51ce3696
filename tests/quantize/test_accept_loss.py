"""A calibration that ruins the outputs ends with an error, unless its loss is accepted."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from model_fixtures import save, small_convnet
from onnx import helper

import tandem
from calibration.table import read_table
from device.session import open_session
from toolkit.cli.commands.calibrate import calibrate
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.ranges.measure import RangeOptions, Ranges, measure_ranges
from toolkit.quantize.trials.fit import CHANCE

RUINOUS = "percentile:5"  # clips nearly all


def samples(rng: np.random.Generator, count: int = 8) -> list[dict[str, np.ndarray]]:
    return [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(count)]


def test_a_build_that_loses_too_much_writes_no_engine(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, out = small_convnet(tmp_path / "m.onnx", rng), tmp_path / "m.engine"
    options = BuildOptions(data=samples(rng), ranges=RangeOptions(RUINOUS))
    with pytest.raises(BuildError, match=r"loses too much of m\.onnx: output y: SQNR .* held out"):
        build_engine(path, "laptop", out, options)
    assert list(tmp_path.iterdir()) == [path]


def test_an_accepted_loss_is_built_and_reported(tmp_path: Path, rng: np.random.Generator) -> None:
    path, out = small_convnet(tmp_path / "m.onnx", rng), tmp_path / "m.engine"
    options = BuildOptions(data=samples(rng), ranges=RangeOptions(RUINOUS), accept_loss=True)
    result = build_engine(path, "laptop", out, options)
    assert out.exists()
    assert result.loss is not None
    assert {loss.part for loss in result.loss.broken} == {"y"}  # SQNR, and arg-max for some x
    assert (result.loss.basis, result.loss.samples) == ("engine", 4)


@pytest.mark.usefixtures("without_kernels")
def test_the_engine_is_judged_by_what_it_computes(tmp_path: Path, rng: np.random.Generator) -> None:
    path, out = small_convnet(tmp_path / "m.onnx", rng), tmp_path / "m.engine"
    data = samples(rng, 2)
    options = BuildOptions(data=data, ranges=RangeOptions("minmax"))
    result = build_engine(path, "agx-orin-64gb", out, options)
    assert result.loss is not None
    exact = onnx.reference.ReferenceEvaluator(onnx.load(path)).run(None, data[1])[0]
    with open_session(out) as session:
        noise = session.infer(data[1])["y"] - exact
    expected_db = 10 * np.log10((exact**2).sum() / (noise**2).sum())
    assert result.loss.losses[0].value == pytest.approx(expected_db, abs=0.05)


def test_the_command_names_the_output_the_limit_and_a_way_out(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    np.savez(tmp_path / "data.npz", x=np.concatenate([s["x"] for s in samples(rng)]))
    command = [str(path), "--data", str(tmp_path / "data.npz"), "--method", RUINOUS]
    refused = CliRunner().invoke(calibrate, command)
    assert refused.exit_code != 0
    assert isinstance(refused.exception, BuildError)
    assert "output y: SQNR" in str(refused.exception)
    assert "(limit: at least 3 dB)" in str(refused.exception)
    accepted = CliRunner().invoke(calibrate, [*command, "--accept-loss"])
    assert accepted.exit_code == 0, accepted.output
    assert "BEYOND THE LIMIT" in accepted.output


def test_a_refused_calibration_leaves_its_report_and_a_table_that_builds_refuse(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, page, cache = (tmp_path / name for name in ("m.onnx", "ranges.html", "m.cache"))
    small_convnet(path, rng)
    np.savez(tmp_path / "data.npz", x=np.concatenate([s["x"] for s in samples(rng)]))
    command = [str(path), "--data", str(tmp_path / "data.npz"), "--method", RUINOUS]
    files = ["--html", str(page), "--cache", str(cache)]
    refused = CliRunner().invoke(calibrate, [*command, *files])
    assert isinstance(refused.exception, BuildError)
    assert "BEYOND THE LIMIT" in refused.output
    assert "BEYOND THE LIMIT" in page.read_text()
    assert not cache.exists()  # it cannot say that it was refused
    table = read_table(path.with_suffix(".calib.json"))
    assert table.refused
    assert table.refused[0].startswith("output y: SQNR")
    out = tmp_path / "m.engine"
    with pytest.raises(BuildError, match=r"lost too much when it was measured: output y: SQNR"):
        build_engine(path, "laptop", out, BuildOptions(table=table))
    assert not out.exists()
    result = build_engine(path, "laptop", out, BuildOptions(table=table, accept_loss=True))
    assert any("lost too much" in note for note in result.notes)


def test_the_python_api_leaves_a_refused_table_too_and_says_where(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, data, out = small_convnet(tmp_path / "m.onnx", rng), samples(rng), tmp_path / "t.json"
    with pytest.raises(BuildError, match="loses too much") as refused:
        tandem.calibrate(path, data, method=RUINOUS, out=out)
    assert f"The ranges are in {out}, marked as refused." in str(refused.value)
    assert read_table(out).refused
    accepted = tandem.calibrate(path, data, method=RUINOUS, accept_loss=True)
    assert accepted == read_table(out)
    with pytest.raises(BuildError, match="lost too much when it was measured"):
        tandem.build(path, tmp_path / "m.engine", calibration=accepted)


def test_a_refused_build_saves_a_table_that_says_so(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, saved = small_convnet(tmp_path / "m.onnx", rng), tmp_path / "saved.json"
    options = BuildOptions(data=samples(rng), ranges=RangeOptions(RUINOUS), save_table=saved)
    with pytest.raises(BuildError, match="loses too much"):
        build_engine(path, "laptop", tmp_path / "m.engine", options)
    assert read_table(saved).refused


def peaked_scores(path: Path) -> Path:
    """x [1,2,400] -> boxes 300 x and sigmoid scores of which one in a thousand is not zero."""
    nodes = [
        helper.make_node("Mul", ["x", "size"], ["boxes"], "scaled"),
        helper.make_node("Conv", ["x", "w", "b"], ["logits"], "conv"),
        helper.make_node("Sigmoid", ["logits"], ["scores"], "sigmoid"),
        helper.make_node("Concat", ["boxes", "scores"], ["y"], "concat", axis=1),
    ]
    weights = {
        "size": np.full(1, 300, np.float32),
        "w": np.full((1, 2, 1), 4, np.float32),
        "b": np.full(1, -8, np.float32),
    }
    return save(path, nodes, {"x": [1, 2, 400]}, {"y": [1, 3, 400]}, weights)


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile", "mse", "auto"])
def test_no_method_clips_the_few_scores_that_are_not_zero(
    method: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    data = []
    for number in range(12):
        x = rng.uniform(-0.2, 0.2, (1, 2, 400)).astype(np.float32)
        x[0, :, 17 * number] = 1.2
        data.append({"x": x})
    imported = import_model(peaked_scores(tmp_path / "m.onnx"))
    graph, _ = run_passes(imported.model)
    ranges = measure_ranges(
        graph, data, imported.sha256, RangeOptions(method), lambda step, share: None
    )
    assert ranges.table.tensors["scores"] == 1.0  # what a sigmoid gives, whatever the samples
    drops = [loss for loss in ranges.judgement.losses if "top score" in loss.metric.name]
    assert drops
    assert ranges.sqnr_db.keys() == {"y[0:2]", "y[2:3]"}


def detection_head(path: Path, rng: np.random.Generator) -> Path:
    """x [1,3,32,32] -> y [1,5,32,32]: four boxes of some hundred pixels beside a sigmoid score."""
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c"], "stem", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "w1"], ["boxes"], "box_head"),
        helper.make_node("Conv", ["r", "w2"], ["logits"], "score_head"),
        helper.make_node("Sigmoid", ["logits"], ["scores"], "sigmoid"),
        helper.make_node("Concat", ["boxes", "scores"], ["y"], "concat", axis=1),
    ]
    weights = {
        "w0": rng.normal(size=(16, 3, 3, 3)).astype(np.float32),
        "w1": rng.normal(scale=30, size=(4, 16, 1, 1)).astype(np.float32),
        "w2": rng.normal(scale=0.2, size=(1, 16, 1, 1)).astype(np.float32),
    }
    return save(path, nodes, {"x": [1, 3, 32, 32]}, {"y": [1, 5, 32, 32]}, weights)


@pytest.mark.usefixtures("without_kernels")
def test_a_concat_of_scores_and_boxes_is_kept_off_the_dla(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, data = detection_head(tmp_path / "m.onnx", rng), samples(rng)
    options = BuildOptions(data=data, ranges=RangeOptions("minmax"))
    result = build_engine(path, "agx-orin-64gb", tmp_path / "m.engine", options)
    (concat,) = [row for row in result.manifest.plan if row.node == "concat"]
    assert (concat.processor, concat.rule) == ("gpu", "K1")
    assert "one scale" in result.kept["concat"]
    assert result.loss is not None
    scores = [loss.value for loss in result.loss.losses if loss.part == "y[4:5]"]
    assert scores[0] > 25  # dB; one step of the boxes would be larger than any score


def measured(path: Path, data: list[dict[str, np.ndarray]], options: RangeOptions) -> Ranges:
    imported = import_model(path)
    graph, _ = run_passes(imported.model)
    return measure_ranges(graph, data, imported.sha256, options, lambda step, share: None)


def test_auto_loses_no_more_of_the_scores_than_the_widest_ranges(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Few strong samples among weak ones: the mean error says clip, the scores say do not."""
    path = detection_head(tmp_path / "m.onnx", rng)
    for _ in range(3):
        data = samples(rng, 12)
        for number in (2, 5, 9):
            data[number]["x"] *= 6
        auto = measured(path, data, RangeOptions("auto"))
        widest = measured(path, data, RangeOptions("minmax"))
        assert auto.judgement.certain_spent <= CHANCE * widest.judgement.certain_spent
        assert {loss.part for loss in widest.judgement.losses} == {"y[0:4]", "y[4:5]"}


def test_auto_clips_nothing_where_the_samples_hold_no_detection(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = save(
        tmp_path / "m.onnx",
        [
            helper.make_node("Conv", ["x", "w0"], ["c"], "stem", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"], "relu"),
            helper.make_node("Conv", ["r", "w1", "b1"], ["logits"], "head"),
            helper.make_node("Sigmoid", ["logits"], ["y"], "sigmoid"),
        ],
        {"x": [1, 3, 32, 32]},
        {"y": [1, 2, 32, 32]},
        {
            "w0": rng.normal(size=(16, 3, 3, 3)).astype(np.float32),
            "w1": rng.normal(scale=0.05, size=(2, 16, 1, 1)).astype(np.float32),
            "b1": np.full(2, -9, np.float32),
        },
    )
    data = samples(rng, 8)
    # Without equalisation, so that both have one graph.
    auto = measured(path, data, RangeOptions("auto", equalise="off", correct_biases="off"))
    widest = measured(path, data, RangeOptions("minmax"))
    assert auto.judgement.nothing_to_lose == ("y",)
    assert auto.table.tensors == widest.table.tensors
