"""Whole layers: how the output stages are set up, and that the fast way changes nothing."""

import numpy as np
import pytest

from device.dla_emulator.arithmetic import layers, rounding
from device.dla_emulator.arithmetic.layers import (
    Activation,
    FastPath,
    IdealPath,
    IntegerPath,
    OutputPath,
    Sums,
)


def rha(value: int, shift: int) -> int:
    size = (2 * abs(value) + 2**shift) // 2 ** (shift + 1)
    return size if value >= 0 else -size


def sat8(value: int) -> int:
    return max(-128, min(127, value))


def registers(factor: float) -> tuple[int, int]:
    """Return multiplier and shift of one factor, by doubling instead of logarithms."""
    shift = 0
    while factor * 2 ** (shift + 1) < 2**15:
        shift += 1
    return int(factor * 2**shift), shift


def sums(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Accumulators of all sizes, more near zero."""
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(0, 24, shape)).astype(np.int64)


RELU = Activation(low=0.0)


@pytest.mark.parametrize("activation", [Activation(), RELU], ids=["none", "relu"])
def test_with_one_factor_the_converter_scales(activation: Activation) -> None:
    rng = np.random.default_rng()
    a, factor = sums(rng, 3, 4, 50), float(rng.uniform(1e-6, 1e-2))
    bias = rng.integers(-20000, 20000, (3, 1, 1))
    path = layers.make_path(Sums(np.asarray(factor), bias), activation, 0.1, "hardware")
    scale, shift = registers(factor)
    expected = [sat8(rha(int(v) * scale, shift)) for v in (a + bias).reshape(-1)]
    if activation is RELU:
        expected = [max(0, value) for value in expected]
    assert layers.finish(a, path).reshape(-1).tolist() == expected


def test_with_a_factor_for_each_channel_stage_x1_scales_with_one_shift() -> None:
    rng = np.random.default_rng()
    a = sums(rng, 4, 3, 50)
    factors = np.array([3e-3, 1e-3, 1e-5, 2e-7]).reshape(-1, 1, 1)
    path = layers.make_path(Sums(factors), Activation(), 0.1, "hardware")
    _, shift = registers(3e-3)
    scales = [int(factor * 2**shift) for factor in factors.reshape(-1)]
    assert scales[-1] == int(2e-7 * 2**shift) < 4  # few bits are left
    result = layers.finish(a, path)
    for k, scale in enumerate(scales):
        expected = [sat8(rha(int(v) * scale, shift)) for v in a[k].reshape(-1)]
        assert result[k].reshape(-1).tolist() == expected


def test_a_large_bias_loses_its_low_bits() -> None:
    bias = np.array([1_000_003, 5]).reshape(-1, 1, 1)
    path = layers.make_path(Sums(np.asarray(1e-4), bias), Activation(), 0.1, "hardware")
    assert isinstance(path, OutputPath)
    # 20 bits and a sign in 16: five are cut, and 5 is none of what is left.
    assert (path.x1.operand_shift, path.x1.operand.tolist()) == (5, [[[31250]], [[0]]])


@pytest.mark.parametrize("activation", [Activation(), RELU, Activation(low=-1.0, high=6.0)])
@pytest.mark.parametrize("channels", [1, 5])
def test_the_fast_path_gives_the_same(activation: Activation, channels: int) -> None:
    rng = np.random.default_rng()
    a = sums(rng, 5, 20, 100)
    a[:, 0] = rng.integers(-40, 40, a[:, 0].shape)
    factor = 2.0 ** rng.uniform(-20, -1, (channels, 1, 1))
    factor = factor.reshape(()) if channels == 1 else factor
    bias = rng.integers(-(2**18), 2**18, (5, 1, 1))
    path = layers.make_path(Sums(factor, bias), activation, 0.06, "hardware")
    fast = layers.fast_path(path, int(np.abs(a).max()))
    whole = layers.integer_path(path, int(np.abs(a).max()))
    assert isinstance(fast, FastPath)
    assert isinstance(whole, IntegerPath)
    single = np.clip(a, -(2**24), 2**24).astype(np.float32)
    for merged in (fast, whole):
        assert (layers.finish(a, merged) == layers.finish(a, path)).all()
        assert (layers.finish(single, merged) == layers.finish(single, path)).all()


@pytest.mark.parametrize("bias", [0, 1 << 25])
@pytest.mark.parametrize("shift", range(1, 16))
def test_the_fast_path_rounds_halves_away_from_zero(shift: int, bias: int) -> None:
    halves = np.arange(-255, 256, 2) * 2 ** (shift - 1)
    near = np.concatenate([halves - 1, halves, halves + 1])
    sums = Sums(np.asarray(2.0**-shift), np.asarray(bias))
    path = layers.make_path(sums, Activation(), 1.0, "hardware")
    expected = [sat8(rha(int(value), shift)) for value in near]
    for way in (path, layers.fast_path(path, 3 << 24), layers.integer_path(path, 3 << 24)):
        assert way is not None
        assert layers.finish(near - bias, way).tolist() == expected


@pytest.mark.parametrize("wrong", [np.rint, np.floor, lambda v: np.floor(v + 0.5)])
def test_other_roundings_would_be_seen_in_ideal_layers(
    wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = np.arange(-31, 32, 2)
    path = layers.make_path(Sums(np.asarray(0.5)), Activation(), 1.0, "ideal")
    expected = [rha(int(value), 1) for value in halves]
    assert layers.finish(halves, path).tolist() == expected
    monkeypatch.setattr(rounding, "half_away", wrong)
    assert layers.finish(halves, path).tolist() != expected


def test_a_fast_path_is_not_taken_where_something_could_saturate_or_a_half_be_lost() -> None:
    path = layers.make_path(Sums(np.asarray(1e-3)), Activation(), 0.1, "hardware")
    assert layers.integer_path(path, 2**31 - 1) is not None
    assert layers.integer_path(path, 2**31) is None
    assert layers.fast_path(path, 2**26) is not None
    assert layers.fast_path(path, 2**28) is None
    slopes = layers.make_path(
        Sums(np.asarray(1e-3)), Activation(slopes=np.asarray(0.1)), 0.1, "hardware"
    )
    assert layers.fast_path(slopes, 1000) is None


def test_ideal_scales_differ_only_by_what_16_bits_lose() -> None:
    rng = np.random.default_rng()
    a, factor = rng.integers(-(2**20), 2**20, 20000), float(rng.uniform(6e-5, 1.2e-4))
    hardware = layers.finish(a, layers.make_path(Sums(np.asarray(factor)), RELU, 1.0, "hardware"))
    ideal = layers.finish(a, layers.make_path(Sums(np.asarray(factor)), RELU, 1.0, "ideal"))
    gap = ideal.astype(int) - hardware
    assert gap.min() >= 0  # the multiplier is cut downwards
    assert gap.max() <= 1
    scale, shift = registers(factor)
    lost = a * (factor - scale / 2**shift)
    assert (np.abs(lost[gap > 0]) > 0).all()


def test_a_leaky_layer_scales_only_what_is_negative_twice() -> None:
    a = np.arange(-4000, 4000)
    activation = Activation(slopes=np.asarray(0.125))
    path = layers.make_path(Sums(np.asarray(0.01)), activation, 1.0, "hardware")
    scale, shift = registers(0.01)
    expected = [
        sat8(rha((v if v > 0 else rha(v, 3)) * scale, shift)) for v in (int(one) for one in a)
    ]
    assert layers.finish(a, path).tolist() == expected


@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
@pytest.mark.parametrize("arithmetic", ["hardware", "ideal"])
def test_a_function_comes_from_its_table_to_a_tenth_of_a_step(
    function: layers.Function, arithmetic: layers.Arithmetic
) -> None:
    a = np.arange(-40000, 40000, 7)
    step_out = 1 / 127
    sums_of = Sums(np.asarray(2.5e-4 / step_out))  # real = 2.5e-4 a
    path = layers.make_path(sums_of, Activation(function=function), step_out, arithmetic)
    real = {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh}[function](2.5e-4 * a)
    error = np.abs(layers.finish(a, path) - real * 127)
    assert error.max() < 0.5 + (0.1 if arithmetic == "hardware" else 1e-6)


@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_one_table_of_results_holds_what_both_tables_give(function: layers.Function) -> None:
    a = np.concatenate([np.arange(-33000, 33000), np.array([-(2**30), -(2**24), 2**24, 2**30])])
    sums_of = Sums(np.asarray(127 * 2.0**-12), np.asarray(3))
    path = layers.make_path(sums_of, Activation(function=function), 1 / 127, "hardware")
    assert isinstance(path, OutputPath)
    assert layers.table_path(path, 2**31) is None
    merged = layers.table_path(path, 2**30)
    assert merged is not None
    assert (layers.finish(a, merged) == layers.finish(a, path)).all()


@pytest.mark.parametrize("activation", [Activation(), RELU])
def test_an_ideal_layer_in_one_step_gives_the_same(activation: Activation) -> None:
    rng = np.random.default_rng()
    a = sums(rng, 5, 20, 100).astype(np.float32)
    factor, bias = 2.0 ** rng.uniform(-20, -1, (5, 1, 1)), rng.integers(-99, 99, (5, 1, 1))
    path = layers.make_path(Sums(factor, bias), activation, 0.06, "ideal")
    assert isinstance(path, IdealPath)
    merged = layers.ideal_in_one_step(path)
    assert merged is not None
    assert (layers.finish(a, merged) == layers.finish(a, path)).all()


def test_a_scale_and_an_offset_round_once() -> None:
    rng = np.random.default_rng()
    x = rng.integers(-128, 128, (3, 2, 64))
    factor = rng.uniform(0.2, 1.5, (3, 1, 1))
    offset = rng.uniform(-3, 3, (3, 1, 1))
    step_out = 0.05
    path = layers.make_affine_path(Sums(factor), offset, Activation(), step_out, "hardware")
    ideal = np.clip(x * factor + offset / step_out, -128, 127)
    error = np.abs(layers.finish(x, path) - ideal)
    assert error.max() < 0.52  # half a step, and what 16 bits lose of 128 steps
    exact = layers.make_affine_path(Sums(factor), offset, Activation(), step_out, "ideal")
    assert np.abs(layers.finish(x, exact) - ideal).max() <= 0.5 + 1e-9


def test_an_exact_bias_keeps_the_multiplier_of_16_bits() -> None:
    """A bias of 65543 is 16385 2^2 = 65540 in 16 bits: a step and a half less at this factor."""
    sums = Sums(np.asarray(0.5), np.array(65543))
    a = np.array([-65541, -65500, -65600], np.float64)
    results = {
        how: layers.finish(a, layers.make_path(sums, Activation(), 1.0, how)).tolist()
        for how in ("hardware", "exact bias", "ideal")
    }
    assert results == {"hardware": [-1, 20, -30], "exact bias": [1, 22, -29], "ideal": [1, 22, -29]}
    third = Sums(np.asarray(1 / 6))
    nine = np.array([9.0])
    assert layers.finish(nine, layers.make_path(third, Activation(), 1.0, "exact bias")) == 1
    assert layers.finish(nine, layers.make_path(third, Activation(), 1.0, "ideal")) == 2
