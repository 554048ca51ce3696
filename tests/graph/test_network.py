"""Networks made layer by layer: numbers against NumPy and SciPy, shapes, and refusals."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from scipy import special

import tandem
from tandem import (
    ActivationType,
    ElementWiseOperation,
    GatherMode,
    InterpolationMode,
    Layer,
    MatrixOperation,
    Network,
    PaddingMode,
    PoolingType,
    ReduceOperation,
    Tensor,
    TopKOperation,
    UnaryOperation,
)
from toolkit.network_definition import operations as ops

Array = np.ndarray[Any, Any]
ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(20)


def run(network: Network, *arrays: Array) -> list[Array]:
    """Run the ONNX file of a network in onnxruntime; inputs in their order."""
    session = onnxruntime.InferenceSession(network.serialize(), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    return list(session.run(None, dict(zip(names, arrays, strict=True))))


def compute(add: Callable[..., Layer], *arrays: Array) -> list[Array]:
    """Run one layer, made by `add(network, *inputs)`, and check the shapes that it inferred."""
    network = Network()
    inputs = [
        network.add_input(f"x{number}", array.dtype, array.shape)
        for number, array in enumerate(arrays)
    ]
    layer = add(network, *inputs)
    for output in layer.outputs:
        network.mark_output(output)
    results = run(network, *arrays)
    for output, result in zip(layer.outputs, results, strict=True):
        assert output.shape == result.shape
        assert output.dtype == result.dtype.name
    return results


def uniform(*shape: int, low: float = -2.0, high: float = 2.0) -> Array:
    return RNG.uniform(low, high, shape).astype(np.float32)


def correlate(x: Array, kernel: Array, stride: int = 1, groups: int = 1) -> Array:
    """A 2-D convolution of networks, by SciPy."""
    from scipy import signal  # takes a second; all workers collect these tests

    maps, per_group = kernel.shape[0] // groups, x.shape[1] // groups
    rows = [
        [
            sum(
                signal.correlate(image[m // maps * per_group + c], kernel[m, c], mode="valid")
                for c in range(per_group)
            )
            for m in range(kernel.shape[0])
        ]
        for image in x
    ]
    return np.array(rows)[:, :, ::stride, ::stride]


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 3)])
def test_a_convolution_agrees_with_scipy(stride: int, groups: int) -> None:
    x, kernel, bias = uniform(2, 6, 9, 8), uniform(12, 6 // groups, 3, 3), uniform(12)
    (y,) = compute(
        lambda n, x: n.add_convolution_nd(
            x, 12, (3, 3), kernel.ravel(), bias, num_groups=groups,
            stride_nd=(stride, stride), padding_nd=(1, 1),
        ),
        x,
    )  # fmt: skip
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    expected = correlate(padded, kernel, stride, groups) + bias[:, None, None]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_a_dilated_convolution_with_padding_at_the_end_agrees_with_scipy() -> None:
    x, kernel = uniform(1, 2, 7, 7), uniform(3, 2, 3, 3)
    (y,) = compute(
        lambda n, x: n.add_convolution_nd(
            x, 3, (3, 3), kernel, dilation_nd=(2, 2), padding_nd=(0, 0), post_padding=(1, 2)
        ),
        x,
    )
    wide = np.zeros((3, 2, 5, 5), np.float32)
    wide[:, :, ::2, ::2] = kernel
    expected = correlate(np.pad(x, ((0, 0), (0, 0), (0, 1), (0, 2))), wide)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_a_deconvolution_agrees_with_scipy() -> None:
    from scipy import signal

    x, kernel, bias = uniform(1, 3, 4, 5), uniform(3, 2, 3, 3), uniform(2)
    (y,) = compute(
        lambda n, x: n.add_deconvolution_nd(
            x, 2, (3, 3), kernel, bias, stride_nd=(2, 2), padding_nd=(1, 1)
        ),
        x,
    )
    spread = np.zeros((3, 7, 9), np.float32)
    spread[:, ::2, ::2] = x[0]
    full = [sum(signal.convolve(spread[c], kernel[c, m]) for c in range(3)) for m in range(2)]
    expected = np.array(full)[None, :, 1:-1, 1:-1] + bias[:, None, None]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_same_padding_keeps_the_size_over_the_stride() -> None:
    network = Network()
    x = network.add_input("x", np.float32, (1, 1, 7, 9))
    mode = PaddingMode.SAME_UPPER
    conv = network.add_convolution_nd(x, 1, (3, 3), np.ones(9), stride_nd=(2, 2), padding_mode=mode)
    assert conv.get_output(0).shape == (1, 1, 4, 5)


POOL = uniform(1, 2, 5, 5)


def pooled(reduce: Callable[..., Array]) -> Array:
    padded = np.pad(POOL, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    return reduce(windows[:, :, ::2, ::2], axis=(-2, -1))


@pytest.mark.parametrize(
    ("kind", "excludes", "reduce"),
    [
        (PoolingType.MAX, True, np.nanmax),
        (PoolingType.AVERAGE, True, np.nanmean),
        (PoolingType.AVERAGE, False, lambda w, axis: np.nansum(w, axis=axis) / 9),
    ],
)
def test_poolings_agree_with_numpy(
    kind: PoolingType, excludes: bool, reduce: Callable[..., Array]
) -> None:
    (y,) = compute(
        lambda n, x: n.add_pooling_nd(
            x, kind, (3, 3), stride_nd=(2, 2), padding_nd=(1, 1),
            average_count_excludes_padding=excludes,
        ),
        POOL,
    )  # fmt: skip
    np.testing.assert_allclose(y, pooled(reduce), rtol=1e-5, atol=1e-6)


def test_a_pooling_that_rounds_up_has_one_more_row() -> None:
    network = Network()
    x = network.add_input("x", np.float32, (1, 1, 6, 6))
    down = network.add_pooling_nd(x, PoolingType.MAX, (3, 3), stride_nd=(2, 2))
    mode = PaddingMode.EXPLICIT_ROUND_UP
    up = network.add_pooling_nd(x, PoolingType.MAX, (3, 3), stride_nd=(2, 2), padding_mode=mode)
    assert (down.outputs[0].shape, up.outputs[0].shape) == ((1, 1, 2, 2), (1, 1, 3, 3))


T = MatrixOperation.TRANSPOSE


@pytest.mark.parametrize(
    ("op0", "op1", "shapes", "equation"),
    [
        (MatrixOperation.NONE, MatrixOperation.NONE, ((2, 3, 4), (2, 4, 5)), "bij,bjk->bik"),
        (T, MatrixOperation.NONE, ((2, 4, 3), (2, 4, 5)), "bji,bjk->bik"),
        (MatrixOperation.NONE, T, ((2, 3, 4), (2, 5, 4)), "bij,bkj->bik"),
        (MatrixOperation.NONE, MatrixOperation.VECTOR, ((2, 3, 4), (2, 4)), "bij,bj->bi"),
        (MatrixOperation.VECTOR, MatrixOperation.NONE, ((2, 4), (2, 4, 5)), "bj,bjk->bk"),
        (MatrixOperation.VECTOR, MatrixOperation.VECTOR, ((2, 4), (2, 4)), "bj,bj->b"),
    ],
)
def test_matrix_products_agree_with_numpy(
    op0: MatrixOperation, op1: MatrixOperation, shapes: Any, equation: str
) -> None:
    a, b = uniform(*shapes[0]), uniform(*shapes[1])
    (y,) = compute(lambda n, a, b: n.add_matrix_multiply(a, op0, b, op1), a, b)
    np.testing.assert_allclose(y, np.einsum(equation, a, b), rtol=1e-4, atol=1e-5)
    (y,) = compute(lambda n, a, b: n.add_einsum([a, b], equation), a, b)
    np.testing.assert_allclose(y, np.einsum(equation, a, b), rtol=1e-4, atol=1e-5)


def test_a_fully_connected_layer_is_a_product_with_the_transposed_kernel() -> None:
    x, kernel, bias = uniform(2, 3, 2, 2), uniform(5, 12), uniform(5)
    (y,) = compute(lambda n, x: n.add_fully_connected(x, 5, kernel, bias), x)
    np.testing.assert_allclose(y, x.reshape(2, 12) @ kernel.T + bias, rtol=1e-4, atol=1e-5)


E = ElementWiseOperation
BINARY: dict[ElementWiseOperation, Callable[[Array, Array], Array]] = {
    E.SUM: np.add, E.SUB: np.subtract, E.PROD: np.multiply, E.DIV: np.divide, E.POW: np.power,
    E.MAX: np.maximum, E.MIN: np.minimum, E.AND: np.logical_and, E.OR: np.logical_or,
    E.XOR: np.logical_xor, E.EQUAL: np.equal, E.GREATER: np.greater, E.LESS: np.less,
}  # fmt: skip
LOGICAL = {E.AND, E.OR, E.XOR}


@pytest.mark.parametrize("op", ElementWiseOperation)
def test_elementwise_operations_broadcast_as_in_numpy(op: ElementWiseOperation) -> None:
    a, b = uniform(2, 3, 4, low=0.5), uniform(3, 1, low=0.5)
    if op in LOGICAL:
        a, b = a > 1, b > 1
    (y,) = compute(lambda n, a, b: n.add_elementwise(a, b, op), a, b)
    np.testing.assert_allclose(y, BINARY[op](a, b), rtol=1e-5)


U = UnaryOperation
FUNCTIONS: dict[UnaryOperation, Callable[[Array], Array]] = {
    U.ABS: np.abs, U.ACOS: np.arccos, U.ACOSH: lambda x: np.arccosh(x + 2), U.ASIN: np.arcsin,
    U.ASINH: np.arcsinh, U.ATAN: np.arctan, U.ATANH: np.arctanh, U.CEIL: np.ceil, U.COS: np.cos,
    U.COSH: np.cosh, U.ERF: special.erf, U.EXP: np.exp, U.FLOOR: np.floor, U.ISINF: np.isinf,
    U.ISNAN: np.isnan, U.LOG: np.log, U.NEG: np.negative, U.NOT: np.logical_not,
    U.RECIP: np.reciprocal, U.ROUND: np.round, U.SIGN: np.sign, U.SIN: np.sin, U.SINH: np.sinh,
    U.SQRT: np.sqrt, U.TAN: np.tan,
}  # fmt: skip


@pytest.mark.parametrize("op", UnaryOperation)
def test_unary_operations_agree_with_numpy(op: UnaryOperation) -> None:
    x = uniform(3, 5, low=-0.9, high=0.9)
    if op in (U.LOG, U.SQRT):
        x = np.abs(x)
    if op is U.NOT:
        x = x > 0
    if op is U.ISNAN:
        x[1, 1:3] = np.nan
    if op is U.ISINF:
        x[0, 2:4] = -np.inf
    fed = x + 2 if op is U.ACOSH else x
    (y,) = compute(lambda n, x: n.add_unary(x, op), fed)
    np.testing.assert_allclose(y, FUNCTIONS[op](x), rtol=1e-4, atol=1e-6)


def gelu_tanh(x: Array) -> Array:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


A = ActivationType
# alpha, beta, function: formulas of TensorRT's ActivationType
ACTIVATIONS: dict[ActivationType, tuple[float | None, float | None, Callable[[Array], Array]]] = {
    A.RELU: (None, None, lambda x: np.maximum(x, 0)),
    A.SIGMOID: (None, None, special.expit),
    A.TANH: (None, None, np.tanh),
    A.LEAKY_RELU: (0.2, None, lambda x: np.where(x < 0, 0.2 * x, x)),
    A.ELU: (0.7, None, lambda x: np.where(x < 0, 0.7 * (np.exp(x) - 1), x)),
    A.SELU: (1.5, 1.1, lambda x: 1.1 * np.where(x > 0, x, 1.5 * np.exp(x) - 1.5)),
    A.SOFTSIGN: (None, None, lambda x: x / (1 + np.abs(x))),
    A.SOFTPLUS: (None, None, lambda x: np.log(np.exp(x) + 1)),
    A.CLIP: (-0.5, 0.8, lambda x: np.clip(x, -0.5, 0.8)),
    A.HARD_SIGMOID: (0.3, 0.4, lambda x: np.clip(0.3 * x + 0.4, 0, 1)),
    A.THRESHOLDED_RELU: (0.6, None, lambda x: np.where(x > 0.6, x, 0)),
    A.GELU_ERF: (None, None, lambda x: x / 2 * (1 + special.erf(x / np.sqrt(2)))),
    A.GELU_TANH: (None, None, gelu_tanh),
}


@pytest.mark.parametrize("kind", ActivationType)
def test_activations_agree_with_their_formulas(kind: ActivationType) -> None:
    alpha, beta, function = ACTIVATIONS[kind]
    x = uniform(4, 7)
    (y,) = compute(lambda n, x: n.add_activation(x, kind, alpha=alpha, beta=beta), x)
    np.testing.assert_allclose(y, function(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("op", "function"),
    [
        (ReduceOperation.SUM, np.sum), (ReduceOperation.PROD, np.prod),
        (ReduceOperation.MAX, np.max), (ReduceOperation.MIN, np.min),
        (ReduceOperation.AVG, np.mean),
    ],
)  # fmt: skip
def test_reductions_agree_with_numpy(op: ReduceOperation, function: Any, keep: bool) -> None:
    x = uniform(2, 3, 4)
    (y,) = compute(lambda n, x: n.add_reduce(x, op, 1 << 0 | 1 << 2, keep), x)
    np.testing.assert_allclose(y, function(x, axis=(0, 2), keepdims=keep), rtol=1e-4, atol=1e-5)


SCALED = uniform(2, 3, 4, 4, low=0.1)
BY_CHANNEL, SHIFT = uniform(3, low=0.1), uniform(3, low=0.1)
NORMALIZED = (SCALED - SCALED.mean((2, 3), keepdims=True)) / np.sqrt(
    SCALED.var((2, 3), keepdims=True) + 1e-5
)
LAST = (SCALED - SCALED.mean(3, keepdims=True)) / np.sqrt(SCALED.var(3, keepdims=True) + 1e-3)
FACTOR, OFFSET = uniform(1, 3, 1, 1), uniform(1, 3, 1, 1)
ROW, ROW_OFFSET = uniform(4), uniform(4)
MASK = RNG.random((2, 3, 4, 4)) > 0.5
ORDER = RNG.integers(0, 4, (2, 3, 2, 4))
TUPLES = np.array([[[0, 2], [1, 0]]], np.int64)
SQUARES = np.pad(SCALED**2, ((0, 0), (1, 1), (0, 0), (0, 0)))


def constant(network: Network, values: Array) -> Layer:
    return network.add_constant(values.shape, values)


# Layers on SCALED (2, 3, 4, 4), and what they give.
LAYERS: dict[str, tuple[Callable[[Network, Tensor], Layer], Array]] = {
    "scale by channel": (
        lambda n, x: n.add_scale(x, SHIFT, BY_CHANNEL, 1.5),
        (SCALED * BY_CHANNEL[:, None, None] + SHIFT[:, None, None]) ** 1.5,
    ),
    "scale by channel, the axis from the end": (
        lambda n, x: n.add_scale(x, scale=BY_CHANNEL, channel_axis=-3),
        SCALED * BY_CHANNEL[:, None, None],
    ),
    "scale of all": (lambda n, x: n.add_scale(x, scale=[2.0]), SCALED * 2),
    "instance normalization": (
        lambda n, x: n.add_normalization(x, constant(n, FACTOR), constant(n, OFFSET), [2, 3]),
        NORMALIZED * FACTOR + OFFSET,
    ),
    "layer normalization": (
        lambda n, x: n.add_normalization(
            x, constant(n, ROW), constant(n, ROW_OFFSET), 1 << 3, epsilon=1e-3
        ),
        LAST * ROW + ROW_OFFSET,
    ),
    "softmax": (lambda n, x: n.add_softmax(x, 1 << 1), special.softmax(SCALED, axis=1)),
    "shuffle": (
        lambda n, x: n.add_shuffle(
            x, first_transpose=(0, 2, 3, 1), reshape_dims=(0, -1, 3), second_transpose=(0, 2, 1)
        ),
        SCALED.reshape(2, 3, 16),
    ),
    "slice": (
        lambda n, x: n.add_slice(x, (0, 2, 0, 1), (2, 1, 2, 3), (1, 1, 2, 1)),
        SCALED[:, 2:3, 0:4:2, 1:4],
    ),
    "slice backwards": (
        lambda n, x: n.add_slice(x, (1, 0, 3, 0), (2, 3, 2, 4), (-1, 1, -2, 1)),
        SCALED[::-1, :, ::-2],
    ),
    "padding": (
        lambda n, x: n.add_padding_nd(x, (1, 0), (0, 2)),
        np.pad(SCALED, ((0, 0), (0, 0), (1, 0), (0, 2))),
    ),
    "cut by padding": (lambda n, x: n.add_padding_nd(x, (-1, 0), (0, -2)), SCALED[:, :, 1:, :2]),
    "concatenation": (
        lambda n, x: n.add_concatenation([x, constant(n, SQUARES)], 1),
        np.concatenate([SCALED, SQUARES], 1),
    ),
    "nearest resize": (
        lambda n, x: n.add_resize(x, shape=(2, 3, 8, 4)),
        SCALED.repeat(2, axis=2),
    ),
    "linear resize": (
        lambda n, x: n.add_resize(
            x, scales=(1, 1, 1, 2), resize_mode=InterpolationMode.LINEAR,
            coordinate_transformation="align_corners",
        ),
        np.apply_along_axis(
            lambda row: np.interp(np.arange(8) * 3 / 7, np.arange(4), row), 3, SCALED
        ),
    ),
    "gather": (
        lambda n, x: n.add_gather(x, constant(n, np.array([2, 0])), 1), SCALED[:, [2, 0]]
    ),
    "gather elements": (
        lambda n, x: n.add_gather(x, constant(n, ORDER), 2, mode=GatherMode.ELEMENT),
        np.take_along_axis(SCALED, ORDER, 2),
    ),
    "gather by tuples": (
        lambda n, x: n.add_gather(x, constant(n, TUPLES), mode=GatherMode.ND),
        SCALED[TUPLES[..., 0], TUPLES[..., 1]],
    ),
    "select": (
        lambda n, x: n.add_select(constant(n, MASK), x, n.add_unary(x, U.NEG)),
        np.where(MASK, SCALED, -SCALED),
    ),
    "parametric relu": (
        lambda n, x: n.add_parametric_relu(n.add_unary(x, U.NEG), constant(n, FACTOR[0])),
        -SCALED * FACTOR,
    ),
    "local response": (
        lambda n, x: n.add_lrn(x, 3, 0.3, 0.75, 2.0),
        SCALED / (2.0 + 0.1 * (SQUARES[:, :-2] + SQUARES[:, 1:-1] + SQUARES[:, 2:])) ** 0.75,
    ),
    "identity": (lambda n, x: n.add_identity(x), SCALED),
    "cast": (lambda n, x: n.add_cast(x, np.int32), SCALED.astype(np.int32)),
    "shape": (lambda n, x: n.add_shape(x), np.array(SCALED.shape)),
    "squeeze": (lambda n, x: n.add_squeeze(n.add_unsqueeze(x, [0, 2]), [0]), SCALED[:, None]),
}  # fmt: skip


@pytest.mark.parametrize("what", LAYERS)
def test_other_layers_agree_with_numpy(what: str) -> None:
    add, expected = LAYERS[what]
    (y,) = compute(add, SCALED)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", TopKOperation)
def test_topk_gives_values_and_indices(op: TopKOperation) -> None:
    x = RNG.permutation(24).reshape(2, 12).astype(np.float32)
    values, indices = compute(lambda n, x: n.add_topk(x, op, 3, 1 << 1), x)
    order = np.argsort(-x if op is TopKOperation.MAX else x, axis=1)[:, :3]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


def test_every_operation_has_a_row() -> None:
    for kind, rows in (
        (ActivationType, ops.ACTIVATIONS), (ElementWiseOperation, ops.ELEMENTWISE),
        (UnaryOperation, ops.UNARY), (ReduceOperation, ops.REDUCTIONS),
        (PoolingType, ops.POOLINGS), (InterpolationMode, ops.INTERPOLATIONS),
        (GatherMode, ops.GATHERS),
    ):  # fmt: skip
        assert set(rows) == set(kind)


def test_a_dynamic_batch_stays_in_every_shape() -> None:
    network = Network()
    x = network.add_input("x", np.float32, (-1, 3, 8, 8))
    conv = network.add_convolution_nd(x, 4, (3, 3), np.ones((4, 3, 3, 3)))
    flat = network.add_fully_connected(conv, 2, np.ones((2, 144)))
    assert x.shape == ("x_0", 3, 8, 8)
    assert flat.get_output(0).shape == ("x_0", 2)
    network.mark_output(flat, "y")
    (y,) = run(network, np.ones((5, 3, 8, 8), np.float32))
    np.testing.assert_allclose(y, np.full((5, 2), 27.0 * 144))


def test_build_and_plan_take_a_network(tmp_path: Path) -> None:
    network = Network("small")
    x = network.add_input("x", np.float32, (1, 3, 16, 16))
    kernel = uniform(8, 3, 3, 3)
    conv = network.add_convolution_nd(x, 8, (3, 3), kernel, name="stem")
    network.mark_output(network.add_activation(conv, ActivationType.RELU), "y")
    plan = tandem.plan(network, profile="agx-orin-64gb")
    assert plan.placements[0].node == "stem"
    samples = [uniform(1, 3, 16, 16) for _ in range(4)]
    engine = tandem.build(network, tmp_path / "small.engine", calibration=samples)
    assert "INT8" in engine.report.upper()
    image = samples[0]
    with tandem.open_session(engine.path) as session:
        y = session.infer({"x": image})["y"]
    expected = np.maximum(correlate(image, kernel), 0)
    assert np.abs(y - expected).max() < 0.05 * np.abs(expected).max()


def two_shapes(network: Network) -> None:
    a = network.add_input("a", np.float32, (1, 4))
    b = network.add_input("b", np.float32, (1, 3))
    network.add_elementwise(a, b, ElementWiseOperation.SUM, name="sum")


def two_types(network: Network) -> None:
    a = network.add_input("a", np.float32, (1, 4))
    b = network.add_input("b", np.int32, (1, 4))
    network.add_elementwise(a, b, ElementWiseOperation.SUM, name="sum")


def wrong_kernel(network: Network) -> None:
    x = network.add_input("x", np.float32, (1, 2, 5, 5))
    network.add_convolution_nd(x, 3, (3, 3), np.ones((3, 1, 3, 3)), name="conv")


def two_strides(network: Network) -> None:
    x = network.add_input("x", np.float32, (1, 1, 5, 5))
    network.add_pooling_nd(x, PoolingType.MAX, (2, 2), stride_nd=(2,), name="pool")


def no_channels(network: Network) -> None:
    x = network.add_input("x", np.float32, (5, 5))
    network.add_convolution_nd(x, 1, (3, 3), np.ones(9), name="conv")


def axis_beyond(network: Network) -> None:
    network.add_softmax(network.add_input("x", np.float32, (1, 4)), 1 << 2, name="softmax")


def uneven_groups(network: Network) -> None:
    x = network.add_input("x", np.float32, (1, 4, 5, 5))
    kernel = np.ones((4, 2, 2, 2))
    network.add_deconvolution_nd(x, 5, (2, 2), kernel, num_groups=2, name="up")


def float_indices(network: Network) -> None:
    x = network.add_input("x", np.float32, (1, 4))
    network.add_gather(x, network.add_constant((1,), [2.0]), 1, name="gather")


def channels_beyond(network: Network) -> None:
    x = network.add_input("x", np.float32, (1, 4))
    network.add_scale(x, scale=[1.0, 2.0], channel_axis=2, name="scale")


def slice_beyond(network: Network) -> None:
    x = network.add_input("x", np.float32, (1, 4))
    network.add_slice(x, (0, 2), (1, 3), name="slice")


def unused_beta(network: Network) -> None:
    x = network.add_input("x", np.float32, (1, 4))
    network.add_activation(x, ActivationType.ELU, alpha=1.0, beta=2.0, name="elu")


def same_name(network: Network) -> None:
    x = network.add_input("x", np.float32, (1, 4))
    network.add_identity(network.add_identity(x, name="copy"), name="copy")


def other_network(network: Network) -> None:
    network.add_identity(Network().add_input("x", np.float32, (1, 4)), name="copy")


def no_output(network: Network) -> None:
    network.add_input("x", np.float32, (1, 4))
    network.serialize()


def output_twice(network: Network) -> None:
    copy = network.add_identity(network.add_input("x", np.float32, (1, 4)))
    network.mark_output(copy, "y")
    network.mark_output(copy, "z")


def two_outputs_of_one_name(network: Network) -> None:
    x = network.add_input("x", np.float32, (1, 4))
    network.mark_output(network.add_identity(x), "y")
    network.mark_output(network.add_unary(x, U.NEG), "y")


def input_named_as_an_output(network: Network) -> None:
    x = network.add_input("x", np.float32, (1, 4))
    network.mark_output(network.add_identity(x), "y")
    network.add_input("y", np.float32, (1, 4))


def output_of_another_network(network: Network) -> None:
    network.mark_output(Network().add_input("x", np.float32, (1, 4)), "y")


def resized(network: Network, **options: Any) -> None:
    network.add_resize(network.add_input("x", np.float32, (1, 4)), name="resize", **options)


def reduced(network: Network, axes: Any) -> None:
    x = network.add_input("x", np.float32, (1, 4))
    network.add_reduce(x, ReduceOperation.SUM, axes, keep_dims=True, name="sum")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (two_shapes, ("'sum'", "'a' 1x4", "'b' 1x3")),
        (two_types, ("'sum'", "float32", "int32", "add_cast")),
        (wrong_kernel, ("'conv'", "3x1x3x3 (27 values)", "3x2x3x3 (54 values)")),
        (two_strides, ("'pool'", "stride_nd has 1 values", "2 dimensions (2x2)")),
        (no_channels, ("'conv'", "'x' is 5x5", "(N, C, ...)")),
        (axis_beyond, ("'softmax'", "[2]", "2 dimensions")),
        (uneven_groups, ("'up'", "num_output_maps is 5", "num_groups (2)")),
        (float_indices, ("'gather'", "'x' 1x4 float32", "unsupported type: tensor(float)")),
        (channels_beyond, ("'scale'", "[2]", "2 dimensions")),
        (slice_beyond, ("'slice'", "2 to 4 of dimension 1", "'x' is 1x4", "0 to 3")),
        (unused_beta, ("'elu'", "ELU has no beta", "2.0")),
        (same_name, ("'copy' already",)),
        (other_network, ("'copy'", "'x' is of another network")),
        (no_output, ("'network' has no output", "mark_output")),
        (output_twice, ("'y' is an output already",)),
        (two_outputs_of_one_name, ("a tensor 'y' already",)),
        (input_named_as_an_output, ("a tensor 'y' already",)),
        (output_of_another_network, ("'x' is of another network",)),
        (partial(resized, scales=[1, 2], coordinate_transformation="half-pixel"),
         ("'resize'", "coordinate_transformation 'half-pixel'", "asymmetric, half_pixel, ")),
        (partial(resized, shape=[1, 2], nearest_rounding="round"),
         ("'resize'", "nearest_rounding 'round'", "floor, ceil, round_prefer_floor, ")),
        (partial(resized, shape=[2]), ("'resize'", "1 sizes", "'x' is 1x4")),
        (partial(resized, scales=[1, 2, 3]), ("'resize'", "3 scales", "'x' is 1x4")),
        (partial(reduced, axes=-1), ("'sum'", "axes -1", "bit mask", "[-1]")),
        (partial(reduced, axes=np.int64(1 << 2)), ("'sum'", "axes [2]", "2 dimensions")),
        (partial(reduced, axes=[1.0]), ("'sum'", "axes [1.0]", "sequence of integers")),
        (partial(reduced, axes=[]), ("'sum'", "axes []", "2 dimensions")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_layer_and_the_shapes(
    make: Callable[[Network], None], words: tuple[str, ...]
) -> None:
    with pytest.raises(tandem.TandemError) as refusal:
        make(Network())
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize("axes", [1 << 1, np.int64(1 << 1), [1], [-1], [np.int64(-1)], (-1, 1)])
def test_axes_are_a_bit_mask_or_a_sequence_of_any_integers(axes: Any) -> None:
    x = uniform(2, 3)
    (y,) = compute(lambda n, x: n.add_reduce(x, ReduceOperation.MAX, axes, keep_dims=False), x)
    np.testing.assert_array_equal(y, x.max(axis=1))


def test_an_input_and_a_constant_as_outputs_keep_their_names() -> None:
    network = Network()
    x = network.add_input("x", np.float32, (2,))
    network.mark_output(x, "copy of x")
    network.mark_output(network.add_constant((2,), [3.0, 4.0]), "constant")
    fed = uniform(2)
    copy, constant = run(network, fed)
    np.testing.assert_array_equal(copy, fed)
    np.testing.assert_array_equal(constant, [3, 4])
    model = onnx.load_model_from_string(network.serialize())
    assert [value.name for value in model.graph.input] == ["x"]
    assert [value.name for value in model.graph.output] == ["copy of x", "constant"]


def test_names_that_layers_would_give_do_not_clash_with_those_of_the_user() -> None:
    network = Network()
    x = network.add_input("sum_output", np.float32, (1, 4))
    network.add_constant((1,), [2.0], name="sum_axes")
    total = network.add_reduce(x, ReduceOperation.SUM, [1], keep_dims=True, name="sum")
    network.mark_output(total)
    network.mark_output(network.add_unary(total, U.NEG), "unary_1_output")
    network.mark_output(network.add_unary(total, U.EXP))
    fed = uniform(1, 4)
    expected = (fed.sum(), -fed.sum(), np.exp(fed.sum()))
    for result, value in zip(run(network, fed), expected, strict=True):
        np.testing.assert_allclose(result, [[value]], rtol=1e-5)


def test_a_plugin_is_a_layer_like_others(tmp_path: Path) -> None:
    """cost[n, d, y, x] = mean over c of left[n, c, y, x] * right[n, c, y, x - d]"""
    (cost_volume, _) = tandem.load_plugins(ROOT / "examples/stereo/plugin.py")
    network = Network("stereo")
    left, right = (network.add_input(name, np.float32, (1, 4, 5, 16)) for name in ("l", "r"))
    cost = network.add_plugin([left, right], cost_volume, {"disparities": 3})
    assert cost.get_output(0).shape == (1, 3, 5, 16)
    network.mark_output(network.add_unary(cost, U.NEG), "y")
    a, b = uniform(1, 4, 5, 16), uniform(1, 4, 5, 16)
    with tandem.open_session(tandem.build(network, tmp_path / "p.engine").path) as session:
        y = session.infer({"l": a, "r": b})["y"]
    moved = [np.pad(b, ((0, 0), (0, 0), (0, 0), (d, 0)))[..., :16] for d in range(3)]
    expected = -np.stack([(a * shifted).mean(axis=1) for shifted in moved], axis=1)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_a_window_is_set_as_in_tensorrt_and_shapes_follow() -> None:
    network = tandem.Network()
    image = network.add_input("x", np.float32, (1, 1, 28, 28))
    conv = network.add_convolution_nd(image, 2, (3, 3), np.ones(18), np.zeros(2))
    output = conv.get_output(0)
    assert (conv.stride_nd, output.shape) == (None, (1, 2, 26, 26))
    conv.stride_nd = (2, 2)
    conv.padding_nd = (1, 1)
    assert (conv.stride_nd, conv.padding_nd, output.shape) == ((2, 2), (1, 1), (1, 2, 14, 14))
    conv.dilation_nd = (2, 2)
    conv.post_padding = (2, 2)
    assert output.shape == (1, 2, 14, 14)
    pool = network.add_pooling_nd(conv, PoolingType.MAX, (2, 2))
    pool.stride_nd = (2, 2)
    pool.padding_mode = PaddingMode.EXPLICIT_ROUND_UP
    back = network.add_deconvolution_nd(pool, 1, (2, 2), np.ones(8))
    back.stride_nd = (2, 2)
    network.mark_output(back, "y")
    assert back.get_output(0).shape == (1, 1, 14, 14)
    second = tandem.Network()
    image = second.add_input("x", np.float32, (1, 1, 28, 28))
    whole = second.add_convolution_nd(
        image, 2, (3, 3), np.ones(18), np.zeros(2), stride_nd=(2, 2), padding_nd=(1, 1),
        post_padding=(2, 2), dilation_nd=(2, 2),
    )  # fmt: skip
    whole = second.add_pooling_nd(
        whole, PoolingType.MAX, (2, 2), stride_nd=(2, 2), padding_mode=PaddingMode.EXPLICIT_ROUND_UP
    )
    whole = second.add_deconvolution_nd(whole, 1, (2, 2), np.ones(8), stride_nd=(2, 2))
    second.mark_output(whole, "y")
    assert network.serialize() == second.serialize()


def test_a_window_that_does_not_fit_is_refused_and_the_layer_stays_as_it_was() -> None:
    network = tandem.Network()
    image = network.add_input("x", np.float32, (1, 1, 8, 8))
    conv = network.add_convolution_nd(image, 1, (3, 3), np.ones(9), name="conv")
    with pytest.raises(
        tandem.TandemError, match="stride_nd has 1 values, but the window has 2 dim"
    ):
        conv.stride_nd = (2,)
    with pytest.raises(tandem.TandemError, match=r"'conv'.*no convolution that rounds its size up"):
        conv.padding_mode = PaddingMode.EXPLICIT_ROUND_UP
    with pytest.raises(tandem.TandemError, match=r"'conv' .*Conv.* does not take"):
        conv.stride_nd = (0, 2)
    assert (conv.stride_nd, conv.get_output(0).shape) == (None, (1, 1, 6, 6))
    network.mark_output(network.add_activation(conv, ActivationType.RELU, name="relu"))
    with pytest.raises(
        tandem.TandemError, match="'conv' cannot be changed any more, as layer 'relu'"
    ):
        conv.stride_nd = (2, 2)


def test_what_cannot_be_set_on_a_layer_is_said_with_the_way_to_pass_it() -> None:
    network = tandem.Network()
    image = network.add_input("x", np.float32, (1, 4))
    softmax = network.add_softmax(image, axes=[1], name="soft")
    with pytest.raises(
        tandem.TandemError, match="'soft' has no axes that can be set: pass axes to the"
    ):
        softmax.axes = 2  # type: ignore[attr-defined]
    with pytest.raises(tandem.TandemError, match="'soft' has no name that can be set"):
        softmax.name = "other"
