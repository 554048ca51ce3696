"""Optional steps: kept where they help on unseen samples, and the same again from the table."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from array_error import sqnr_db
from click.testing import CliRunner
from depthwise_fixtures import INPUT, depthwise_net
from model_fixtures import prepared, small_convnet
from msgspec import UNSET
from msgspec.structs import replace as replaced
from onnx import TensorProto, helper

import configs
from calibration.calibrate import observe_tensors
from calibration.dataset import memory_dataset
from calibration.errors import CalibrationError
from calibration.table import read_table
from calibration.trials import Assignment, SampleSelection
from calibration.trt_cache import amax_of, decode_cache
from device.engine.file import open_engine
from toolkit.cli.main import tandem
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.corrections import corrections
from toolkit.quantize.corrections.channel_links import unlinked_depthwise
from toolkit.quantize.corrections.corrections import (
    CHANCE,
    Switch,
    less_error,
    try_bias_correction,
    try_equalisation,
)
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.quantize import calibrated_tensors
from toolkit.quantize.ranges.measure import RangeOptions, Ranges, measure_ranges
from toolkit.quantize.ranges.report_html import ranges_html
from toolkit.quantize.ranges.report_text import correction_text, ranges_builtins, ranges_text
from toolkit.quantize.scales.rules import unify_scales
from toolkit.quantize.trials.fit import Fit, final_fit, fit
from toolkit.quantize.trials.trial import TrialModel

Samples = list[dict[str, np.ndarray]]


def noise(rng: np.random.Generator, count: int) -> Samples:
    return [{"x": rng.normal(size=INPUT).astype(np.float32)} for _ in range(count)]


def measure(path: Path, data: Samples, options: RangeOptions) -> Ranges:
    imported = import_model(path)
    graph, _ = run_passes(imported.model)
    return measure_ranges(graph, data, imported.sha256, options, lambda step, share: None)


def fitted(model: ir.Model, samples: Samples, validation: Samples) -> Fit:
    tensors = calibrated_tensors(model)
    seen = observe_tensors(ActivationRunner(model, tensors), memory_dataset(samples), tensors)
    return fit(model, seen, ("minmax",), validation)


def test_auto_equalises_a_depthwise_network_and_says_what_it_gained(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, data = depthwise_net(tmp_path / "m.onnx", rng), noise(rng, 18)
    plain = measure(path, data, RangeOptions("minmax", equalise="off"))
    result = measure(path, data, RangeOptions("minmax", equalise="auto"))
    (outcome,) = result.corrections
    assert outcome.applied
    assert outcome.worst is not None
    assert outcome.worst.gain > 6
    assert result.judgement.basis == "held out"
    assert result.sqnr_db["y"] > plain.sqnr_db["y"] + 6
    assert plain.corrections == ()
    assert result.table.format == 2
    assert f"{outcome.worst.before:.1f} -> {outcome.worst.after:.1f} dB" in ranges_text(result)
    (row,) = json.loads(json.dumps(ranges_builtins(result)))["steps"]
    assert (row["changed"], row["by_mul"]) == (outcome.changed, 0)
    assert row["sqnr_db"]["y"] == {"before": outcome.worst.before, "after": outcome.worst.after}
    assert "equalisation: kept" in ranges_html(result, "m")


@pytest.mark.parametrize(
    ("errors", "reference", "less"),
    [
        ([0.01, 5, 5, 5], [0, 1, 1, 1], False),
        ([0, 0.2, 0.2, 0.2], [1, 1, 1, 1], True),
        ([0.5, 0.5, 0.5, 0.5], [1, 1.1, 1, 1], True),
        ([0, 0, 0, 0], [0, 0, 0, 0], False),
        ([1, 1, 1, 1], [math.inf, 1, 1, 1], True),
        ([math.inf, 1, 1, 1], [2, 2, 2, 2], False),
    ],
)
def test_a_sample_without_an_error_does_not_decide(
    errors: list[float], reference: list[float], less: bool
) -> None:
    assert less_error(np.array([errors]), np.array([reference])) is less


@pytest.mark.parametrize(("method", "options"), [("auto", ["auto", "auto"]), ("minmax", [])])
def test_steps_are_tried_by_default_where_a_search_runs(
    tmp_path: Path, rng: np.random.Generator, method: str, options: list[str]
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    result = measure(path, noise(rng, 9), RangeOptions(method))
    assert [outcome.requested for outcome in result.corrections] == options


def refit_by(plain: Fit, factors: tuple[float, ...], loss: float) -> Callable[..., Fit]:
    """Doubles of equalised fits: they have the errors of the plain one, by factors."""

    def errors(ranges: Assignment, samples: SampleSelection) -> np.ndarray:
        return plain.noise.errors(ranges, samples) * factors

    def refit(changed: ir.Model, rows: object) -> Fit:
        figures = {name: value - loss for name, value in plain.sqnr_db.items()}
        double: Any = SimpleNamespace(
            errors=errors, sqnr_db=lambda *given: figures, always_float=frozenset()
        )
        return replace(plain, graph=changed, noise=double)

    return refit


@pytest.mark.parametrize(
    ("activation", "options", "loss", "factors", "applied"),
    [
        ("Relu", "auto", 0.2, (1.1, 1.1, 1.1), ""),
        ("Relu", "auto", -0.2, (0.9, 0.9, 0.9), ""),
        ("Relu", "auto", -1.2, (0.7, 0.7, 0.7), "weights"),
        ("Relu", "auto", 0.2, (0.6, 1.1, 1.2), "weights"),
        ("Relu", "auto", -0.2, (math.inf, 0.9, 0.9), ""),
        ("Relu", "on", 3.0, (2.0, 2.0, 2.0), "weights"),
        ("HardSwish", "auto", -1.9, (0.5, 0.5, 0.5), "weights"),
        ("HardSwish", "auto", -2.1, (0.3, 1.1, 1.1), "weights"),
        ("HardSwish", "auto", -2.1, (0.5, 0.5, 0.5), "weights and a Mul"),
    ],
)
def test_equalisation_by_weights_may_not_lose_and_by_a_mul_has_to_gain(
    tmp_path: Path,
    rng: np.random.Generator,
    activation: str,
    options: Switch,
    loss: float,
    factors: tuple[float, ...],
    applied: str,
) -> None:
    graph = prepared(depthwise_net(tmp_path / "m.onnx", rng, activation))
    plain = fitted(graph, noise(rng, 2), noise(rng, 1) * 3)
    refit = refit_by(plain, factors, loss)
    result, rows, outcome = try_equalisation(plain, noise(rng, 2), refit, options)
    assert (outcome.applied, bool(rows), result is not plain) == (bool(applied),) * 3
    added = rows.keys() & unlinked_depthwise(graph.graph).keys()
    assert bool(added) == ("Mul" in applied)
    assert outcome.by_mul == len(added)
    text = correction_text(outcome)
    assert (f"rescaled, {len(added)} by a Mul" in text) == bool(added)
    assert ("kept, as a loss may be chance" in text) == (bool(applied) and 0 < loss < 3)
    assert ("kept as asked, though it brings nothing" in text) == (options == "on")
    assert outcome.worst is not None
    assert outcome.worst.gain == pytest.approx(-loss)


def test_a_mul_whose_gain_may_be_chance_is_left_out(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = prepared(depthwise_net(tmp_path / "m.onnx", rng))
    plain = fitted(graph, noise(rng, 2), noise(rng, 1) * 3)
    by_mul = dict.fromkeys(calibrated_tensors(graph))
    monkeypatch.setattr(corrections, "unlinked_depthwise", lambda graph: by_mul)
    refit = refit_by(plain, (0.3, 1.1, 1.1), -2.1)
    _, rows, outcome = try_equalisation(plain, noise(rng, 2), refit, "auto")
    assert (rows, outcome.reason) == ({}, CHANCE)


def test_nodes_in_float_are_searched_only_if_equalisation_does_not_help_without(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    graph = prepared(depthwise_net(tmp_path / "m.onnx", rng))
    plain = fitted(graph, noise(rng, 2), noise(rng, 1) * 3)
    searches: list[str] = []

    def search() -> frozenset[str]:
        searches.append("nodes")
        return frozenset()

    for factor in (0.7, 1.1):
        refit = refit_by(plain, (factor,) * 3, 0.0)
        outcome = try_equalisation(plain, noise(rng, 2), refit, "auto", search)[2]
        assert (outcome.applied, searches) == (factor < 1, [] if factor < 1 else ["nodes"])


@pytest.mark.parametrize("why_not", ["", "it is forbidden"])
def test_a_correction_that_breaks_a_budget_is_left_out(
    tmp_path: Path, rng: np.random.Generator, why_not: str
) -> None:
    table = fitted(prepared(depthwise_net(tmp_path / "m.onnx", rng)), noise(rng, 2), noise(rng, 2))
    before = final_fit(table, frozenset())
    after, outcome = try_bias_correction(
        table, before, "on", samples=noise(rng, 2), forbidden=lambda end: why_not
    )
    assert outcome.applied == (not why_not)
    assert (after is before) == bool(why_not)
    assert outcome.reason == why_not


def too_few(rng: np.random.Generator) -> object:
    return noise(rng, 5)


def once_only(rng: np.random.Generator) -> object:
    return iter(noise(rng, 9))


def endless(rng: np.random.Generator) -> object:
    """Samples that can be read again, of a number that is not known beforehand."""

    class Again:
        def __init__(self) -> None:
            self.samples = noise(rng, 9)

        def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
            return iter(self.samples)

    return Again()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (too_few, "5 samples are too few to measure it"),
        (once_only, "an iterator gives them once"),
        (endless, "samples without a known number leave none unseen"),
    ],
)
def test_what_cannot_be_judged_is_left_out_with_the_reason(
    tmp_path: Path,
    rng: np.random.Generator,
    data: Callable[[np.random.Generator], Samples],
    message: str,
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    result = measure(path, data(rng), RangeOptions("auto"))
    assert [outcome.applied for outcome in result.corrections] == [False, False]
    assert ranges_text(result).count(message) == 2


def test_a_step_that_cannot_have_its_samples_is_refused(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    data = once_only(rng)
    with pytest.raises(CalibrationError, match="an iterator gives them once: give a list"):
        measure(path, data, RangeOptions("minmax", correct_biases="on"))  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("activation", ["Relu", "HardSwish"])
def test_the_table_builds_the_engine_that_the_data_built(
    tmp_path: Path, rng: np.random.Generator, activation: str
) -> None:
    path, data = depthwise_net(tmp_path / "m.onnx", rng, activation), noise(rng, 9)
    options = RangeOptions("mse", equalise="on", correct_biases="on")
    first, second = tmp_path / "data.engine", tmp_path / "table.engine"
    # Some random networks lose more than a build takes.
    built = build_engine(
        path,
        "agx-orin-64gb",
        first,
        BuildOptions(data=data, ranges=options, accept_loss=True),
    )
    assert built.calibration is not None
    table = built.calibration.table
    assert table.adjusted
    assert table.adjusted.equalised
    assert table.adjusted.biases
    build_engine(path, "agx-orin-64gb", second, BuildOptions(table=table, accept_loss=True))
    with open_engine(first) as measured, open_engine(second) as stated:
        provenance = measured.manifest.provenance
        assert provenance.passes[-2:] == ("equalisation", "bias correction")
        # A build from data says what it has measured; all else is the same.
        plain = replaced(measured.manifest, provenance=replaced(provenance, measured=UNSET))
        assert plain == stated.manifest
        assert measured.entries == stated.entries
        for name in measured.entries:
            assert measured.entry(name).tobytes() == stated.entry(name).tobytes()


def test_a_table_with_adjustments_builds_no_other_model(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, data = depthwise_net(tmp_path / "m.onnx", rng), noise(rng, 3)
    table = measure(path, data, RangeOptions("minmax", equalise="on")).table
    second = depthwise_net(tmp_path / "other.onnx", rng)
    with pytest.raises(BuildError, match="calibration table adjusts"):
        build_engine(second, "laptop", tmp_path / "m.engine", BuildOptions(table=table))


def test_both_passes_of_an_equalised_calibration_resume(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, data, state = depthwise_net(tmp_path / "m.onnx", rng), noise(rng, 6), tmp_path / "state"
    options = RangeOptions("mse", equalise="on", resume=state)
    straight = measure(path, data, replace(options, resume=None)).table
    assert measure(path, data, options).table == straight
    second = tmp_path / "state.equalised"
    assert second.exists()
    assert measure(path, data, options).table == straight
    second.write_bytes(state.read_bytes())  # of other weights: begun anew
    assert measure(path, data, options).table == straight


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    for index, sample in enumerate(noise(rng, 9)):
        np.save(path / f"{index}.npy", sample["x"])
    return path


def run(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(tandem, [*map(str, arguments)])
    return done.exit_code, f"{done.output}{done.exception or ''}"


def test_the_cache_holds_the_ranges_of_the_adjusted_model(
    tmp_path: Path, rng: np.random.Generator, folder: Path
) -> None:
    path = depthwise_net(tmp_path / "m.onnx", rng)
    cache, adjusted = tmp_path / "m.cache", tmp_path / "adjusted.onnx"
    parts = ("--cache", cache, "--adjusted-model", adjusted, "-o", tmp_path / "m.json")
    arguments = ("calibrate", path, "--data", folder, "--method", "minmax", "--equalise", "on")
    code, output = run(*arguments, *parts)
    assert code == 0, output
    table = amax_of(decode_cache(cache.read_text(), str(cache)))
    tensors = calibrated_tensors(prepared(path))
    seen, plain = dict.fromkeys(tensors, 0.0), dict.fromkeys(tensors, 0.0)
    for model, largest in ((adjusted, seen), (path, plain)):
        runner = ActivationRunner(prepared(model), tensors)
        for sample in folder.iterdir():
            for name, array in runner({"x": np.load(sample)}).items():
                largest[name] = max(largest[name], float(np.abs(array).max()))
    assert {name: table[name] for name in tensors} == pytest.approx(seen, rel=1e-3)
    assert seen != pytest.approx(plain, rel=0.5)


def test_the_exported_model_has_the_adjusted_weights(
    tmp_path: Path, rng: np.random.Generator, folder: Path
) -> None:
    path = depthwise_net(tmp_path / "m.onnx", rng)
    qdq, adjusted, table = (tmp_path / name for name in ("q.onnx", "adjusted.onnx", "m.json"))
    steps = ("--equalise", "on", "--bias-correction", "on")
    arguments = ("calibrate", path, "--data", folder, "--method", "minmax", *steps)
    code, output = run(*arguments, "--qdq", qdq, "--adjusted-model", adjusted, "-o", table)
    assert code == 0, output
    x = rng.normal(size=INPUT).astype(np.float32)
    exact, changed, int8 = (
        ort.InferenceSession(str(name), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for name in (path, adjusted, qdq)
    )
    # The biases hold what INT8 will add with its sign turned: of the size of its noise.
    assert 0 < np.linalg.norm(changed - exact) < 0.3 * np.linalg.norm(exact)
    assert np.linalg.norm(int8 - exact) < 0.3 * np.linalg.norm(exact)
    again, second = tmp_path / "again.onnx", tmp_path / "other.onnx"
    parts = ("--qdq", again, "--adjusted-model", second)
    code, output = run("ranges", table, "--model", path, *parts)
    assert code == 0, output
    assert again.read_bytes() == qdq.read_bytes()
    assert second.read_bytes() == adjusted.read_bytes()


def test_a_cache_without_its_model_leaves_weights_alone(
    tmp_path: Path, rng: np.random.Generator, folder: Path
) -> None:
    path, cache = small_convnet(tmp_path / "m.onnx", rng), tmp_path / "m.cache"
    arguments = ("calibrate", path, "--data", folder, "--cache", cache)
    code, output = run(*arguments, "--equalise", "on")
    assert code == 2
    assert "--equalise on changes weights, but a TensorRT cache holds ranges alone" in output
    assert not cache.exists()
    code, output = run(*arguments, "--method", "auto", "-o", tmp_path / "m.json")
    assert code == 0, output
    assert "were left out: the cache is for the model as it is" in " ".join(output.split())
    assert read_table(tmp_path / "m.json").format == 1


def test_a_cache_from_a_table_with_adjustments_needs_their_model(
    tmp_path: Path, rng: np.random.Generator, folder: Path
) -> None:
    path, table = depthwise_net(tmp_path / "m.onnx", rng), tmp_path / "m.json"
    code, output = run("calibrate", path, "--data", folder, "--equalise", "on", "-o", table)
    assert code == 0, output
    code, output = run("ranges", table, "--cache", tmp_path / "m.cache")
    assert code == 1
    assert "holds adjustments of weights" in " ".join(output.split())
    assert not (tmp_path / "m.cache").exists()


def test_dead_channels_are_counted_in_every_report(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    model = ir.load(path)
    bias = model.graph.initializers["b0"]
    assert bias.const_value is not None
    low = bias.const_value.numpy().copy()
    low[:3] = -1e3
    bias.const_value = ir.tensor(low, name="b0")
    ir.save(model, path)
    result = measure(path, noise(rng, 4), RangeOptions("minmax"))
    assert result.dead_channels["r0"].dead == 3
    assert "zero in all of 3 samples: r0 3 of 16" in ranges_text(result)
    assert ranges_builtins(result)["dead_channels"]["r0"] == {"dead": 3, "channels": 16}
    assert "3 of 16 channels always zero" in ranges_html(result, "m")


@pytest.mark.usefixtures("without_kernels")
def test_the_scale_rules_say_what_they_cost_where_samples_can_tell(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    data = [{"images": rng.uniform(size=(1, 3, 320, 320)).astype(np.float32)} for _ in range(2)]
    model = configs.ROOT / "models" / "robot-objects.onnx"
    out = tmp_path / "m.engine"
    options = BuildOptions(data=data, ranges=RangeOptions("minmax"))
    result = build_engine(model, "agx-orin-64gb", out, options)
    ranges, rules = result.calibration, result.scale_rules
    assert ranges is not None
    dla = [row.node for row in result.manifest.plan if row.processor.startswith("dla")]
    tied = unify_scales(ranges.model, ranges.table.tensors, dla).amax
    trial, plain = TrialModel(ranges.model), ActivationRunner(ranges.model, list(rules.effects))
    untied = ranges.table.tensors
    for name, one in rules.effects.items():
        for amax, expected in ((untied, one.before), (tied, one.after)):
            assigned = {tensor: amax[tensor] for tensor in trial.tensors}
            pairs = [(plain(s)[name], trial(assigned, s)[name]) for s, _ in ranges.judges]
            exact, tried = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
            assert expected == pytest.approx(sqnr_db(exact, tried), abs=0.1)
    (note,) = [note for note in result.notes if "share a scale because of DLA rules" in note]
    name, one = next(iter(rules.effects.items()))
    assert f"{name} {one.before:.1f} -> {one.after:.1f} dB" in note
    counted = build_engine(model, "agx-orin-64gb", out, BuildOptions(table=ranges.table))
    assert counted.scale_rules.changes == rules.changes
    assert counted.scale_rules.effects == {}
    assert any("Give --data to measure the effect" in note for note in counted.notes)


@pytest.mark.parametrize("options", [RangeOptions("minmax", equalise="auto"), RangeOptions()])
def test_equalisation_whose_effect_no_output_shows_is_left_out_and_says_so(
    tmp_path: Path, rng: np.random.Generator, options: RangeOptions
) -> None:
    path = depthwise_net(tmp_path / "m.onnx", rng)
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("ArgMax", ["y"], ["class"], axis=1, keepdims=0))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("class", TensorProto.INT64, [1]))
    onnx.save(model, path)
    ranges = measure(path, noise(rng, 18), options)
    equalisation = ranges.corrections[0]
    assert not equalisation.applied
    expected = "equalisation: left out: no output shows its effect"
    assert correction_text(equalisation) == expected
