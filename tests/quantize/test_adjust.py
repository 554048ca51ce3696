"""Adjusted weights: a table makes the same model again, or says why it cannot."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from depthwise_fixtures import INPUT, depthwise_net

from calibration.table import Adjustments, CalibrationTable, decode_table, encode_table
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.corrections.adjust import adjust, adjusted_for, short_changes, short_factors
from toolkit.quantize.corrections.bias import find_bias_layers
from toolkit.quantize.corrections.channel_links import find_links
from toolkit.quantize.corrections.equalise import channel_ranges, equalise, link_tensors
from toolkit.quantize.observe import ActivationRunner

Rows = dict[str, tuple[float, ...]]


@pytest.fixture
def model(tmp_path: Path, rng: np.random.Generator) -> ir.Model:
    return run_passes(import_model(depthwise_net(tmp_path / "m.onnx", rng)).model)[0]


def table(equalised: Mapping[str, tuple[float, ...]], biases: Rows) -> CalibrationTable:
    return CalibrationTable(
        format=2,
        method="minmax",
        samples=1,
        data_sha256="a" * 64,
        model_sha256="b" * 64,
        tensors={"x": 1.0},
        adjusted=Adjustments(equalised=dict(equalised), biases=biases),
    )


def constants(model: ir.Model) -> dict[str, bytes]:
    return {
        name: value.const_value.numpy().tobytes()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }


def random_rows(model: ir.Model, rng: np.random.Generator) -> tuple[Rows, Rows]:
    links, _ = find_links(model.graph)
    layers, _ = find_bias_layers(model.graph)
    channels = {}
    for link in links:
        weight = link.producer.inputs[1]
        assert weight is not None
        assert weight.const_value is not None
        channels[link.tensor] = weight.const_value.numpy().shape[0]
    factors = {name: 10 ** rng.uniform(-1, 1, count) for name, count in channels.items()}
    changes = {str(x.node.name): tuple(rng.normal(size=x.channels).tolist()) for x in layers}
    return short_factors(factors), short_changes(changes)


def test_a_table_makes_the_same_weights_to_the_last_bit_through_its_file(
    model: ir.Model, rng: np.random.Generator
) -> None:
    factors, changes = random_rows(model, rng)
    result = adjust(model, Adjustments(equalised=factors, biases=changes))
    written = table(factors, changes)
    read = decode_table(encode_table(written), "x")
    again = adjusted_for(model, read, "b" * 64)
    assert constants(again) == constants(result)
    assert constants(again) != constants(model)


def test_equalisation_keeps_the_outputs_and_a_bias_change_shifts_them(
    model: ir.Model, rng: np.random.Generator
) -> None:
    factors, _ = random_rows(model, rng)
    sample = {"x": rng.normal(size=INPUT).astype(np.float32)}
    plain = ActivationRunner(model, ["y"])(sample)["y"]
    scaled = ActivationRunner(adjust(model, Adjustments(equalised=factors)), ["y"])(sample)["y"]
    assert np.abs(scaled - plain).max() <= 1e-4 * np.abs(plain).max()
    change = rng.normal(size=10).astype(np.float32)
    last = find_bias_layers(model.graph)[0][-1]
    rows = {str(last.node.name): tuple(change.tolist())}
    moved = ActivationRunner(adjust(model, Adjustments(biases=rows)), ["y"])(sample)["y"]
    np.testing.assert_allclose(moved - plain, change[None], atol=1e-4)


def test_short_factors_still_balance_the_channels(
    model: ir.Model, rng: np.random.Generator
) -> None:
    tensors = link_tensors(model)
    samples = [{"x": rng.normal(size=INPUT).astype(np.float32)} for _ in range(4)]
    seen = channel_ranges(ActivationRunner(model, tensors), samples, tensors)
    exact = equalise(model, seen)
    short = short_factors(exact.factors)
    for name, row in short.items():
        np.testing.assert_allclose(row, exact.factors[name], rtol=0.005)
    changed = adjust(model, Adjustments(equalised=short))
    before, after = (
        channel_ranges(ActivationRunner(one, tensors), samples, tensors)
        for one in (exact.model, changed)
    )
    for name in tensors:
        np.testing.assert_allclose(after[name], before[name], rtol=0.02, atol=1e-6)


def test_rows_that_change_nothing_are_left_out() -> None:
    assert short_factors({"a": np.ones(3), "b": np.array([1.0, 2.0])}) == {"b": (1.0, 2.0)}
    assert short_changes({"a": (0.0, 0.0), "b": (0.0, -1.23456)}) == {"b": (0.0, -1.235)}


@pytest.mark.parametrize(
    ("factors", "changes", "message"),
    [
        ({"nowhere": (2.0,)}, {}, "Tensor 'nowhere' is to be equalised, but is none of the"),
        ({"link": (2.0,)}, {}, "channels, but 1 factors equalise it"),
        ({}, {"nobody": (2.0,)}, "bias of node 'nobody' is to be corrected, but this model has no"),
        ({}, {"layer": (2.0,)}, "output channels, but 1 changes of its bias are given"),
    ],
)
def test_what_the_model_lacks_is_refused_by_name(
    model: ir.Model, factors: Rows, changes: Rows, message: str
) -> None:
    names = {
        "link": link_tensors(model)[0],
        "layer": str(find_bias_layers(model.graph)[0][0].node.name),
    }
    named = [{names.get(key, key): row for key, row in rows.items()} for rows in (factors, changes)]
    with pytest.raises(BuildError, match=message):
        adjusted_for(model, table(*named), "b" * 64)


def test_a_table_adjusts_no_other_model_file(model: ir.Model, rng: np.random.Generator) -> None:
    factors, changes = random_rows(model, rng)
    with pytest.raises(BuildError, match=r"adjusts .* of the model with SHA-256 bbbbbbbbbbbb, but"):
        adjusted_for(model, table(factors, changes), "c" * 64)


def test_a_table_without_adjustments_leaves_the_model_alone(model: ir.Model) -> None:
    plain = CalibrationTable(
        method="minmax", samples=1, data_sha256="a" * 64, model_sha256="b" * 64, tensors={"x": 1.0}
    )
    assert adjusted_for(model, plain, "c" * 64) is model
