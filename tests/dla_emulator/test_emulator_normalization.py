"""LRN of the DLA against Python integers, number by number, and against ONNX's formula."""

import numpy as np
import onnx
import onnxruntime
import pytest
from emulator_lookup_fixtures import drawn, expected, rha, sat
from hypothesis import given, settings
from hypothesis import strategies as st

from device.dla_emulator.arithmetic import lookup, normalization
from device.dla_emulator.arithmetic.convert import Converter
from device.dla_emulator.arithmetic.normalization import Lrn, Normalization
from device.errors import DlaError


def converted(x: int, registers: Converter) -> int:
    return rha((x - int(registers.offset)) * int(registers.scale), int(registers.shift))


def normalized(x: np.ndarray, registers: Normalization) -> np.ndarray:
    """Every channel by Python integers."""
    bits = 8 * x.dtype.itemsize
    z = [sat(converted(int(v), registers.input), bits + 1) for v in x]
    reach = registers.window // 2
    result = []
    for i in range(len(z)):
        total = sum(v * v for v in z[max(0, i - reach) : i + reach + 1])
        seen = z[i] if registers.squares_bypassed else total
        t = expected(seen, registers.tables, lookup.NORMALIZATION)
        product = t if registers.product_bypassed else t * z[i]
        result.append(sat(converted(product, registers.output), bits))
    return np.array(result, x.dtype)


def in_onnxruntime(lrn: Lrn, x: np.ndarray) -> np.ndarray:
    """ONNX's formula by an implementation of others."""
    node = onnx.helper.make_node(
        "LRN", ["x"], ["y"], size=lrn.size, alpha=lrn.alpha, beta=lrn.beta, bias=lrn.bias
    )
    values = [onnx.helper.make_tensor_value_info(name, 1, x.shape) for name in "xy"]
    graph = onnx.helper.make_graph([node], "lrn", values[:1], values[1:])
    opset = onnx.helper.make_opsetid("", 13)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (result,) = session.run(None, {"x": x})
    return np.asarray(result)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32), st.sampled_from([3, 5, 7, 9]), st.booleans(), st.booleans(),
    st.sampled_from([np.int8, np.int16]),
)  # fmt: skip
def test_every_stage_is_that_of_unlimited_integers(
    seed: int, window: int, no_squares: bool, no_product: bool, kind: type[np.signedinteger]
) -> None:
    rng = np.random.default_rng(seed)
    limits = np.iinfo(kind)
    x = rng.integers(limits.min, limits.max + 1, (1, 11, 1, 1)).astype(kind)
    scale = int(rng.integers(-(2**15), 2**15))
    registers = Normalization(
        window,
        Converter(int(rng.integers(-128, 128)), scale, int(rng.integers(0, 32))),
        drawn(rng, bool(rng.integers(2)), int(rng.integers(-4, 34)), lookup.NORMALIZATION),
        Converter(int(rng.integers(-(2**24), 2**24)), scale, int(rng.integers(0, 40))),
        no_squares,
        no_product,
    )
    result = normalization.normalize(x, registers)
    assert result.reshape(-1).tolist() == normalized(x.reshape(-1), registers).tolist()


@pytest.mark.parametrize("size", [3, 5, 7, 9])
@pytest.mark.parametrize("step", [0.02, 0.5, 3.0])
def test_registers_for_onnx_are_within_a_step_of_its_formula(size: int, step: float) -> None:
    rng = np.random.default_rng()
    x = np.clip(rng.standard_normal((2, 16, 6, 5)) * 45, -128, 127).astype(np.int8)
    lrn = Lrn(size, alpha=1e-4, beta=0.75, bias=2.0)
    real = in_onnxruntime(lrn, x.astype(np.float32) * np.float32(step))
    step_out = float(np.abs(real).max()) / 127
    result = normalization.normalize(x, normalization.lrn_registers(lrn, step, step_out))
    assert np.abs(result - real / step_out).max() <= 1.0


@pytest.mark.parametrize("window", [1, 2, 4, 11])
def test_a_window_that_the_hardware_does_not_have_is_refused(window: int) -> None:
    with pytest.raises(DlaError, match="the hardware has 3, 5, 7, 9"):
        normalization.lrn_registers(Lrn(window), 1.0, 1.0)


def test_other_types_and_shapes_are_refused() -> None:
    registers = normalization.lrn_registers(Lrn(5), 0.1, 0.1)
    with pytest.raises(DlaError, match="holds float32, this takes int16 or int8"):
        normalization.normalize(np.zeros((1, 8, 2, 2), np.float32), registers)
    with pytest.raises(DlaError, match=r"the shape \[8, 2, 2\]"):
        normalization.normalize(np.zeros((8, 2, 2), np.int8), registers)
