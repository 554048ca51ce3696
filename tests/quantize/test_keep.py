"""Nodes that stay in floating point because an output misses its target with them in INT8."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from model_fixtures import save
from onnx import helper

from calibration.budget import Budget, BudgetResult, NodeCost
from calibration.errors import CalibrationError
from calibration.least_loss import least_loss
from calibration.observer import Histogram, Tally
from calibration.table import read_table
from device.engine.file import open_engine
from toolkit.cli.commands.calibrate import calibrate
from toolkit.cli.commands.plan import plan
from toolkit.cli.pages.engine_card import engine_facts, engine_page
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions
from toolkit.quantize.loss.judge import Judgement
from toolkit.quantize.ranges import first_layer, steps
from toolkit.quantize.ranges.measure import RangeOptions, Ranges, half_remark, measure_ranges
from toolkit.quantize.ranges.report_text import ranges_builtins, ranges_text
from toolkit.quantize.trials.keep import FloatNodes

Samples = list[dict[str, np.ndarray]]


def lopsided(path: Path, rng: np.random.Generator, large_channel: float = 0.0) -> Path:
    """x [1,3,16,16] -> y [1,4,16,16]: the head does not read the one large channel of its input.

    `large_channel`: the factor of the weights that read it all the same.

    The step of INT8 is that of the large channel, so the head reads little else than rounding.
    """
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c"], "stem", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "w1"], ["y"], "head"),
    ]
    stem, head = rng.normal(size=(16, 3, 3, 3)), rng.normal(size=(4, 16, 1, 1))
    stem[0] *= 1e5
    head[:, 0] *= large_channel
    weights = {"w0": stem.astype(np.float32), "w1": head.astype(np.float32)}
    return save(path, nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 4, 16, 16]}, weights)


def scores(path: Path, rng: np.random.Generator) -> Path:
    """x [1,3,16,16] -> y [1,4,256]: scores with noise of INT8 that is near the target."""
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c"], "stem", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "w1"], ["l"], "head"),
        helper.make_node("Sigmoid", ["l"], ["s"], "scores"),
        helper.make_node("Reshape", ["s", "shape"], ["y"], "rows"),
    ]
    weights = {"w0": rng.normal(size=(16, 3, 3, 3)), "w1": rng.normal(size=(4, 16, 1, 1)) / 8}
    weights["w0"][0], weights["w1"][:, 0] = 4.0 * weights["w0"][0], 0.0
    stored = {name: array.astype(np.float32) for name, array in weights.items()}
    stored["shape"] = np.array([1, 4, 256])
    return save(path, nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 4, 256]}, stored)


def samples(rng: np.random.Generator, count: int) -> Samples:
    return [{"x": rng.normal(size=(1, 3, 16, 16)).astype(np.float32)} for _ in range(count)]


def measured(path: Path, data: Samples, options: RangeOptions) -> Ranges:
    imported = import_model(path)
    graph, _ = run_passes(imported.model)
    return measure_ranges(graph, data, imported.sha256, options, lambda step, share: None)


# The default without corrections of weights, which could mend the model as well.
PLAIN = RangeOptions(equalise="off", correct_biases="off")


def test_the_node_that_int8_ruins_is_kept_where_a_target_is_missed(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, data = lopsided(tmp_path / "m.onnx", rng), samples(rng, 12)
    float_nodes, all_int8 = (
        measured(path, data, PLAIN),
        measured(path, data, replace(PLAIN, keep="none")),
    )
    assert float_nodes.table.keep_float == ("head",)
    assert all_int8.table.keep_float == ()
    assert all_int8.sqnr_db["y"] < 10 < float_nodes.sqnr_db["y"]
    exact = onnx.reference.ReferenceEvaluator(onnx.load(path))
    unseen = samples(rng, 4)
    for ranges, reaches in ((float_nodes, True), (all_int8, False)):
        fit = ranges.fit
        pairs = [
            (exact.run(None, one)[0], fit.trial(fit.ranges, one, fit.keep_float)["y"])
            for one in unseen
        ]
        noise = sum(float(((y - y_int8) ** 2).sum()) for y, y_int8 in pairs)
        signal = sum(float((y**2).sum()) for y, _ in pairs)
        assert (10 * np.log10(signal / noise) > 10) == reaches


def test_the_widest_ranges_keep_nodes_of_their_own_where_equalised_ones_needed_none(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = lopsided(tmp_path / "m.onnx", rng, 1e-5), samples(rng, 12)
    options = replace(PLAIN, equalise="auto", round_weights="off")
    equalised = measured(path, data, options)
    assert equalised.table.keep_float == ()
    monkeypatch.setattr(steps, "loses_no_more", lambda *_spent: False)
    widest = measured(path, data, options)
    assert [correction.applied for correction in widest.corrections] == [False]
    assert widest.table.keep_float == ("head",)
    assert widest.float_nodes is not None
    assert "head: its INT8 makes" in ranges_text(widest)
    assert widest.judgement.target_spent <= 1.0


def test_scores_that_just_meet_their_target_have_nodes_in_float_too(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """The largest drop of a few scores says little of others."""
    path, data = scores(tmp_path / "m.onnx", rng), samples(rng, 12)
    all_int8 = measured(path, data, replace(PLAIN, keep="none"))
    assert all_int8.judgement.target_spent < 1.0
    default = measured(path, data, replace(PLAIN, most_float=0.5))
    assert default.table.keep_float
    exact = onnx.reference.ReferenceEvaluator(onnx.load(path))
    errors = []
    for fit in (default.fit, all_int8.fit):
        changes = [
            fit.trial(fit.ranges, one, fit.keep_float)["y"] - exact.run(None, one)[0]
            for one in samples(rng, 4)
        ]
        errors.append(float(np.square(changes).mean()))
    assert errors[0] < 0.7 * errors[1]


def test_scores_far_from_their_target_need_no_nodes_and_no_words(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = scores(tmp_path / "m.onnx", rng)
    model = onnx.load(path)
    (head,) = [one for one in model.graph.initializer if one.name == "w1"]
    small = 0.02 * onnx.numpy_helper.to_array(head)
    head.CopyFrom(onnx.numpy_helper.from_array(small.astype(np.float32), "w1"))
    onnx.save(model, path)
    ranges = measured(path, samples(rng, 12), PLAIN)
    assert ranges.float_nodes is not None
    assert not ranges.table.keep_float
    assert "a target" not in ranges_text(ranges)


def test_the_report_names_the_nodes_and_what_they_bring(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = lopsided(tmp_path / "m.onnx", rng)
    ranges = measured(path, samples(rng, 12), PLAIN)
    text, content = ranges_text(ranges), ranges_builtins(ranges)["kept"]
    assert "kept in floating point: 1 nodes with 12.9 % of the multiplications" in text
    assert "chosen on 6 samples that do not judge" in text
    assert "head: its INT8 makes" in text
    assert list(content["nodes"]) == ["head"]
    assert content["float_share"] == pytest.approx(64 / (64 + 432))
    assert (content["judged_apart"], content["aim_met"]) == (True, True)
    assert [row["beyond_target"] for row in content["before"]] == [True]


def test_a_larger_share_is_proposed_where_less_was_allowed(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    ranges = measured(lopsided(tmp_path / "m.onnx", rng), samples(rng, 12), PLAIN)
    float_nodes = ranges.float_nodes
    assert float_nodes is not None
    missed = replace(float_nodes.search, most_added=-1.0)
    for most_float, proposed in ((0.15, True), (0.5, False), (1.0, False)):
        tried = replace(float_nodes, search=missed, most_float=most_float)
        text = ranges_text(replace(ranges, float_nodes=tried))
        assert f"{100 * most_float:g} % of the multiplications leave less than 50 %" in text
        assert ("a larger share may lose less" in text) is proposed


def test_nodes_that_give_nan_share_the_error() -> None:
    costs = tuple(
        NodeCost(node, 1.0, math.nan, cost)
        for node, cost in (("a", math.inf), ("b", 2.0), ("c", math.inf))
    )
    search = BudgetResult(frozenset("abc"), 0.0, 0.0, 0.0, 0.0, 0.0, costs, (), complete=True)
    float_nodes = FloatNodes(search, Judgement((), 1, "seen"), 1, apart=True, most_float=0.5)
    assert float_nodes.error_shares() == {"a": 0.5, "b": 0.0, "c": 0.5}


def test_few_samples_choose_and_judge_and_the_report_says_so(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    ranges = measured(lopsided(tmp_path / "m.onnx", rng), samples(rng, 4), PLAIN)
    assert ranges.float_nodes is not None
    assert not ranges.float_nodes.apart
    assert "those that judge among them" in ranges_text(ranges)


def test_nodes_are_chosen_on_samples_that_do_not_judge(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Whatever the samples are that judge, the choice is the same."""
    path, data = lopsided(tmp_path / "m.onnx", rng), samples(rng, 12)
    others = [one if number % 2 == 0 else two for number, (one, two) in
              enumerate(zip(data, samples(rng, 12), strict=True))]  # fmt: skip
    for options in (
        replace(PLAIN, method="minmax", keep="auto"),
        replace(PLAIN, method="minmax", budget=Budget("sqnr", "least", 12)),
    ):
        first, second = (measured(path, one, options) for one in (data, others))
        assert first.table.keep_float == second.table.keep_float == ("head",)
        assert first.sqnr_db != second.sqnr_db


def test_nothing_is_kept_where_all_targets_are_met_or_a_method_is_named(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, data = lopsided(tmp_path / "m.onnx", rng), samples(rng, 8)
    assert measured(path, data, RangeOptions("minmax")).float_nodes is None
    easy = save(
        tmp_path / "easy.onnx",
        [helper.make_node("Conv", ["x", "w"], ["y"], "conv")],
        {"x": [1, 3, 16, 16]},
        {"y": [1, 4, 16, 16]},
        {"w": rng.normal(size=(4, 3, 1, 1)).astype(np.float32)},
    )
    ranges = measured(easy, data, PLAIN)
    assert ranges.float_nodes is None
    assert ranges.table.keep_float == ()


def test_a_build_says_what_the_kept_nodes_cost(tmp_path: Path, rng: np.random.Generator) -> None:
    path, out = lopsided(tmp_path / "m.onnx", rng), tmp_path / "m.engine"
    options = BuildOptions("int8", data=samples(rng, 8), ranges=PLAIN, kernels=False)
    result = build_engine(path, "orin-nano-8gb", out, options)
    (note,) = [note for note in result.notes if "kept in floating point" in note]
    assert "us a frame predicted" in note
    assert "makes" in result.kept["head"]
    gains = {row.node: row for row in result.gains}
    assert [row.kept for row in gains.values()] == ["", result.kept["head"]]
    assert sum(row.error_share or 0.0 for row in gains.values()) == pytest.approx(1.0)
    assert all(row.int8_us > 0 and row.half_us > 0 for row in gains.values())
    with open_engine(out) as engine:
        page = engine_page(engine_facts(engine), gains=result.gains)
    assert "What INT8 gains and loses" in page
    assert result.kept["head"] in page


@pytest.mark.parametrize(
    ("option", "nodes"), [([], ["head"]), (["--keep", "none"], []), (["--keep", "5%"], [])]
)
def test_the_command_keeps_what_it_is_told(
    option: list[str], nodes: list[str], tmp_path: Path, rng: np.random.Generator
) -> None:
    path = lopsided(tmp_path / "m.onnx", rng)
    np.savez(tmp_path / "data.npz", x=np.concatenate([s["x"] for s in samples(rng, 8)]))
    off = ["--equalise", "off", "--bias-correction", "off", "--json", "--accept-loss"]
    result = CliRunner().invoke(
        calibrate, [str(path), "--data", str(tmp_path / "data.npz"), *option, *off]
    )
    assert result.exit_code == 0, result.output
    assert list(read_table(path.with_suffix(".calib.json")).keep_float) == nodes
    float_nodes = json.loads(result.stdout)["kept"]
    assert (list(float_nodes["nodes"]) if float_nodes else []) == nodes


@pytest.mark.parametrize("value", ["some", "0%", "101%", "0.2", "nan%"])
def test_shares_that_are_none_are_a_usage_error(value: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(calibrate, ["m.onnx", "--data", "x", "--keep", value])
    assert result.exit_code == 2
    assert "auto, none or a percentage" in result.output


def limit_on(errors: dict[str, float], least: float, most_float: float) -> BudgetResult:
    """The nodes to keep where errors add up."""

    def error(keep: frozenset[str]) -> float:
        return sum(value for name, value in errors.items() if name not in keep)

    return least_loss(
        dict.fromkeys(errors, 1.0),
        lambda keep: -error(keep),
        Budget("m", "least", least),
        error=error,
        error_alone=error,
        most_float=most_float,
    )


def test_the_work_in_floating_point_goes_where_it_saves_most_error(
    rng: np.random.Generator,
) -> None:
    for _ in range(20):
        errors = {f"n{i}": float(value) for i, value in enumerate(rng.exponential(size=20) ** 4)}
        result = limit_on(errors, -1e-9, 0.25)
        largest = sorted(errors, key=lambda name: -errors[name])[:5]
        assert result.keep_float == set(largest)
        assert not result.met
        assert result.share == pytest.approx(0.75)


def test_no_more_nodes_are_kept_than_the_limit_asks_for() -> None:
    errors = dict.fromkeys((f"n{i}" for i in range(40)), 0.01) | {"n7": 5.0, "n9": 3.0}
    result = limit_on(errors, -1.0, 0.4)
    assert result.met
    assert result.keep_float == {"n7", "n9"}


def test_errors_that_cancel_are_not_torn_apart() -> None:
    """The bias of one node takes that of another away: both in INT8 are best."""
    shift = {"up": 1.0, "down": -1.0, "noisy": 0.1, "large": 0.0}

    def error(keep: frozenset[str]) -> float:
        return sum(value for name, value in shift.items() if name not in keep) ** 2

    result = least_loss(
        {"up": 1.0, "down": 8.0, "noisy": 8.0, "large": 8.0},
        lambda keep: -error(keep),
        Budget("m", "least", -1e-9),
        error=error,
        error_alone=error,
        most_float=0.1,
    )
    assert result.keep_float == frozenset()
    assert result.value == result.int8_value


def test_nodes_are_kept_also_where_all_in_int8_give_nan() -> None:
    def error(keep: frozenset[str]) -> float:
        return math.nan if "ruins" not in keep else 2.0 - len(keep)

    result = least_loss(
        {"ruins": 1.0, "harmless": 9.0},
        lambda keep: -error(keep),
        Budget("m", "least", -1e-9),
        error=error,
        error_alone=lambda keep: math.nan if "ruins" not in keep else 0.5,
        most_float=0.2,
    )
    assert result.keep_float == {"ruins"}


@pytest.mark.parametrize(
    ("most_added", "most_float", "floats", "met"),
    [(0.5, 1.0, 5, True), (0.499, 1.0, 6, True), (1.0, 1.0, 0, True), (0.5, 0.3, 3, False)],
)
def test_a_metric_that_fits_by_luck_ends_no_search(
    most_added: float, most_float: float, floats: int, met: bool
) -> None:
    """The metric finds no loss at all; the errors of single nodes, added, do."""
    result = least_loss(
        {f"n{i}": 1.0 for i in range(10)},
        lambda keep: 1.0,
        Budget("m", "least", 0.5),
        error=lambda keep: 10.0 - len(keep),
        error_alone=lambda keep: 0.1,
        added_alone=lambda keep: 0.1,
        most_added=most_added,
        most_float=most_float,
    )
    assert (len(result.keep_float), result.met) == (floats, met)
    assert result.added == pytest.approx(0.1 * (10 - floats))


def test_nodes_that_only_add_to_the_error_are_not_kept() -> None:
    result = least_loss(
        {f"n{i}": 1.0 for i in range(20)},
        lambda keep: float(len(keep) == 20),
        Budget("m", "least", 0.5),
        error=lambda keep: 1.0 + 0.1 * len(keep),
        error_alone=lambda keep: 0.1,
        most_float=0.15,
    )
    assert result.keep_float == frozenset()


def test_nodes_of_unknown_sizes_count_alike() -> None:
    result = least_loss(
        {f"n{i}": 0.0 for i in range(20)},
        lambda keep: float(len(keep) == 20),
        Budget("m", "least", 0.5),
        error=lambda keep: 20.0 - len(keep),
        error_alone=lambda keep: 0.1,
        most_float=0.15,
    )
    assert len(result.keep_float) == 3


@pytest.mark.parametrize(("last", "floats"), [(1.4, 5), (1.6, 3)])
def test_a_larger_set_is_taken_where_its_error_is_not_clearly_larger(
    last: float, floats: int
) -> None:
    errors = {3: 1.0, 4: 2.0, 5: last}
    result = least_loss(
        {f"n{i}": 1.0 for i in range(10)},
        lambda keep: 1.0 if len(keep) == 10 else 0.0,
        Budget("m", "least", 0.5),
        error=lambda keep: errors.get(len(keep), 10.0),
        error_alone=lambda keep: 0.1,
        most_float=0.5,
    )
    assert len(result.keep_float) == floats


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_beyond_its_ends_is_refused(share: float) -> None:
    with pytest.raises(CalibrationError, match="a share lies above 0 and up to 1"):
        least_loss(
            {"n": 1.0},
            lambda keep: 0.0,
            Budget("m", "least", 0.0),
            error=lambda keep: 0.0,
            error_alone=lambda keep: 0.0,
            most_float=share,
        )


def histogram_of(largest: float) -> Histogram:
    tally = Tally("t", None, Histogram())
    tally.add(np.array([0.0, largest], np.float32), 0)
    return tally.histogram()


@pytest.mark.parametrize(("largest", "remarked"), [(65504.0, False), (66000.0, True)])
def test_values_that_fp16_does_not_hold_are_remarked(
    largest: float, remarked: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    graph, _ = run_passes(import_model(lopsided(tmp_path / "m.onnx", rng)).model)
    sentence = half_remark(graph, {"y": histogram_of(largest), "x": histogram_of(1e6)})
    assert (sentence is not None) == remarked
    if sentence is not None:
        assert sentence.startswith("1 node gave values above 65504, the largest of FP16: head")


def test_a_remark_that_cannot_be_made_ends_no_calibration(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    layer = first_layer.first_layer(import_model(lopsided(tmp_path / "m.onnx", rng)).model)
    if layer is None:  # a layer without statistics is not compared
        nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], "conv")]
        weights = {"w": rng.normal(size=(8, 3, 1, 1)), "b": rng.normal(size=8)}
        path = save(
            tmp_path / "b.onnx", nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 8, 16, 16]},
            {name: array.astype(np.float32) for name, array in weights.items()},
        )  # fmt: skip
        layer = first_layer.first_layer(import_model(path).model)
    sentence = first_layer.remark(layer, [{"x": np.zeros((1, 5, 16, 16), np.float32)}])
    assert sentence is not None
    assert "were not compared" in sentence


@pytest.mark.parametrize(("together", "runs"), [(1, 5), (2, 3), (5, 1), (9, 1)])
def test_neighbours_are_measured_together_where_runs_are_few(together: int, runs: int) -> None:
    macs = {f"n{number}": 100.0 for number in range(5)}
    costs = dict(zip(macs, (1.0, 2.0, 8.0, 4.0, 16.0), strict=True))
    requests: list[frozenset[str]] = []

    def error(keep: frozenset[str]) -> float:
        requests.append(keep)
        return sum(cost for node, cost in costs.items() if node not in keep)

    result = least_loss(
        macs,
        lambda keep: 1.0 if "n4" in keep else 0.0,
        Budget("m", "least", 1.0),
        error=lambda keep: 0.0,
        error_alone=error,
        most_float=1.0,
        together=together,
    )
    assert len(requests) == runs
    assert "n4" in result.keep_float
    assert {row.node for row in result.costs} == set(macs)
    assert math.isclose(sum(row.cost for row in result.costs), sum(costs.values()))
    if together == 2:
        cost = {row.node: row.cost for row in result.costs}
        assert (cost["n2"], cost["n3"], cost["n4"]) == (6.0, 6.0, 16.0)


def test_a_plan_over_data_has_the_nodes_where_the_build_has_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    path, folder = lopsided(tmp_path / "m.onnx", rng), tmp_path / "data"
    folder.mkdir()
    for number, sample in enumerate(samples(rng, 12)):
        np.save(folder / f"{number:02d}.npy", sample["x"])
    # The DLA hands its large channel on in INT8, whatever the head computes in.
    forced = PlanOptions(forced=Forced(("all",)))
    options = BuildOptions(data=folder, plan=forced, kernels=False, accept_loss=True)
    built = build_engine(path, "orin-nx-16gb", tmp_path / "m.engine", options)
    for_accuracy = {node for node, why in built.kept.items() if " saves " not in why}
    assert for_accuracy == {"head"}
    arguments = [str(path), "--profile", "orin-nx-16gb", "--force-dla", "all", "--json"]
    result = CliRunner().invoke(plan, [*arguments, "--data", str(folder)])
    assert result.exit_code == 0, result.output
    planned, blind = (
        json.loads(text)["plans"][0]
        for text in (result.stdout, CliRunner().invoke(plan, arguments).stdout)
    )
    rules = [
        {row["node"]: (row["processor"], row["rule"]) for row in one["nodes"]}
        for one in (planned, blind)
    ]
    assert rules[0] == {row.node: (row.processor, row.rule) for row in built.plan.placements}
    assert rules[0] != rules[1]  # without data the plan takes all nodes to be in INT8
