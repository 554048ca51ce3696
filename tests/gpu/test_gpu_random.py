"""Random graphs, interpreted on the CPU, against onnxruntime; and what such graphs found wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import gpu_interpreter
import numpy as np
import onnx
import pytest
from gpu_graphs import Case, node, normal
from onnx import helper

pytest.importorskip("triton", reason="Triton is not installed")

Shape = tuple[int, ...]
SHAPES: tuple[Shape, ...] = ((1, 4, 6, 6), (2, 3, 5), (4, 6), (1, 1, 5, 4), (2, 4, 4, 4))
LARGEST = 2000  # elements of a tensor


def check(case: Case, rng: np.random.Generator) -> None:
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(case.lower("fp32"), feeds)
    for name, truth in case.truth(feeds).items():
        assert outputs[name].shape == truth.shape
        np.testing.assert_allclose(outputs[name], truth, rtol=2e-3, atol=2e-3, err_msg=name)


@dataclass
class Growing:
    """A graph in the making: each step adds an operator on tensors that are there already."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def add(
        self, op: str, inputs: Sequence[str], *shapes: Sequence[int], **attributes: object
    ) -> None:
        if any(np.prod(shape) > LARGEST for shape in shapes):
            return
        names = [f"t{len(self.shapes) + at}" for at in range(len(shapes))]
        name = f"{op}:{names[0]}"
        self.nodes.append(helper.make_node(op, inputs, names, name=name, **attributes))
        self.shapes |= {n: tuple(map(int, s)) for n, s in zip(names, shapes, strict=True)}

    def constant(self, values: object) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(values)
        return name

    def numbers(self, *shape: int) -> str:
        return self.constant(self.rng.normal(size=shape).astype(np.float32))

    def tensor(self, fits: Callable[[Shape], bool] = lambda _: True) -> str:
        results = [name for name, shape in self.shapes.items() if fits(shape)]
        return str(self.rng.choice(results))

    def axis(self, shape: Shape) -> tuple[int, int]:
        """A dimension, counted from the first and, as it happens, from the last."""
        axis = int(self.rng.integers(len(shape)))
        return axis, axis - len(shape) * int(self.rng.integers(2))


def add_convolution(g: Growing, x: str, shape: Shape) -> None:
    taps, pad = int(g.rng.choice([1, 3])), int(g.rng.integers(2))
    if len(shape) != 4 or min(shape[2:]) + 2 * pad < taps:
        return
    filters = int(g.rng.choice([1, 4, shape[1]]))
    group = shape[1] if filters == shape[1] else 1
    sides = [n + 2 * pad - taps + 1 for n in shape[2:]]
    weights = g.constant(normal(g.rng, filters, shape[1] // group, taps, taps))
    inputs = [x, weights, g.numbers(filters)]
    g.add("Conv", inputs, (shape[0], filters, *sides), pads=[pad] * 4, group=group)


def add_pooling(g: Growing, x: str, shape: Shape) -> None:
    if len(shape) == 4 and min(shape[2:]) >= 2:
        op = str(g.rng.choice(["MaxPool", "AveragePool"]))
        g.add(op, [x], (*shape[:2], shape[2] - 1, shape[3] - 1), kernel_shape=[2, 2])


def add_two(g: Growing, x: str, shape: Shape) -> None:
    op = str(g.rng.choice(["Add", "Sub", "Mul", "Max"]))
    g.add(op, [x, g.tensor(lambda second: second == shape)], shape)


def add_constant(g: Growing, x: str, shape: Shape) -> None:
    sizes = [int(g.rng.choice([1, size])) for size in shape]
    inputs = [x, g.numbers(*sizes)]
    g.add(str(g.rng.choice(["Add", "Mul"])), inputs[:: g.rng.choice([1, -1])], shape)


def add_concatenation(g: Growing, x: str, shape: Shape) -> None:
    axis, attributes = g.axis(shape)
    rest = shape[:axis] + shape[axis + 1 :]

    def fits(second: Shape) -> bool:
        return len(second) == len(shape) and second[:axis] + second[axis + 1 :] == rest

    parts = [x, *(g.tensor(fits) for _ in range(g.rng.integers(1, 3)))]
    size = sum(g.shapes[part][axis] for part in parts)
    g.add("Concat", parts, (*shape[:axis], size, *shape[axis + 1 :]), axis=attributes)


def add_split(g: Growing, x: str, shape: Shape) -> None:
    axis, attributes = g.axis(shape)
    if shape[axis] < 2:
        return
    first = int(g.rng.integers(1, shape[axis]))
    sizes = (first, shape[axis] - first)
    shapes = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
    g.add("Split", [x, g.constant(np.array(sizes))], *shapes, axis=attributes)


def add_slice(g: Growing, x: str, shape: Shape) -> None:
    axis, attributes = g.axis(shape)
    start, end = (int(n) for n in g.rng.integers(-shape[axis], shape[axis] + 1, 2))
    step = int(g.rng.choice([1, 2, -1]))
    size = len(range(shape[axis])[start:end:step])
    limits = [g.constant(np.array([n])) for n in (start, end, attributes, step)]
    if size:
        g.add("Slice", [x, *limits], (*shape[:axis], size, *shape[axis + 1 :]))


def add_transposition(g: Growing, x: str, shape: Shape) -> None:
    order = g.rng.permutation(len(shape)).tolist()
    g.add("Transpose", [x], [shape[at] for at in order], perm=order)


def add_reshape(g: Growing, x: str, shape: Shape) -> None:
    elements = int(np.prod(shape))
    first = int(g.rng.choice([n for n in range(1, elements + 1) if elements % n == 0]))
    expected = [(first, elements // first), (1, first, elements // first, 1)][g.rng.integers(2)]
    g.add("Reshape", [x, g.constant(np.array(expected))], expected)


def add_softmax(g: Growing, x: str, shape: Shape) -> None:
    g.add("Softmax", [x], shape, axis=g.axis(shape)[1])


def add_product(g: Growing, x: str, shape: Shape) -> None:
    if len(shape) >= 2:
        second = g.constant(normal(g.rng, 5, shape[-1]).T.copy())
        g.add("MatMul", [x, second], (*shape[:-1], 5))


def add_rectifier(g: Growing, x: str, shape: Shape) -> None:
    g.add(str(g.rng.choice(["Relu", "Sigmoid"])), [x], shape)


EPILOGUE = (
    add_convolution,
    add_pooling,
    add_two,
    add_constant,
    add_concatenation,
    add_split,
    add_slice,
    add_transposition,
    add_reshape,
    add_softmax,
    add_product,
    add_rectifier,
)


def grown(rng: np.random.Generator) -> Case:
    """Return 5 to 12 random operators; what nobody reads leaves, and some that others read."""
    graph = Growing(rng)
    inputs = {f"x{at}": SHAPES[rng.integers(len(SHAPES))] for at in range(2)}
    graph.shapes |= inputs
    expected = rng.integers(5, 13)
    while len(graph.nodes) < expected:
        x = graph.tensor()
        EPILOGUE[rng.integers(len(EPILOGUE))](graph, x, graph.shapes[x])
    read = {name for one in graph.nodes for name in one.input}
    outputs = [name for one in graph.nodes for name in one.output]
    leaving = [name for name in outputs if name not in read or rng.random() < 0.15]
    fed = {name: shape for name, shape in inputs.items() if name in read}
    return Case(graph.nodes, fed, graph.weights, leaving)


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(grown(rng), rng)


def test_one_filter_on_one_channel(rng: np.random.Generator) -> None:
    for taps in (2, 3):
        conv = node("Conv", "x w", "y", pads=[1, 1, 1, 1])
        check(Case([conv], {"x": (2, 1, 6, 5)}, {"w": normal(rng, 1, 1, taps, taps)}), rng)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
def test_a_constant_with_more_channels_than_the_convolution(
    op: str, rng: np.random.Generator
) -> None:
    nodes = [node("Conv", "x w", "c"), node(op, "c k", "y")]
    weights = {"w": normal(rng, 1, 4, 1, 1), "k": rng.uniform(1, 2, (8, 1, 1)).astype(np.float32)}
    check(Case(nodes, {"x": (1, 4, 5, 5)}, weights), rng)


def test_constants_added_one_after_the_other(rng: np.random.Generator) -> None:
    nodes = [node("Add", "x a", "p"), node("Add", "p b", "q"), node("Add", "q c", "y")]
    check(Case(nodes, {"x": (2, 3)}, {name: normal(rng, 3) for name in "abc"}), rng)


def test_constants_added_between_reshapes_that_share_one(rng: np.random.Generator) -> None:
    nodes = [
        node("Reshape", "x s", "p"),
        node("Add", "p a", "q"),
        node("Reshape", "q t", "r"),
        node("Add", "r b", "u"),
        node("Reshape", "u s", "y"),
    ]
    shapes = {"s": np.array([3, 4]), "t": np.array([2, 6])}
    constants = {"a": normal(rng, 3, 4), "b": normal(rng, 2, 6)}
    check(Case(nodes, {"x": (2, 6)}, shapes | constants), rng)


@pytest.mark.parametrize(("rows", "keys"), [(4, 6), (1, 6), (4, 1)])
def test_a_mask_with_more_rows_or_keys_than_the_scores(
    rows: int, keys: int, rng: np.random.Generator
) -> None:
    nodes = [
        node("Transpose", "k", "columns", perm=[0, 2, 1]),
        node("MatMul", "q columns", "scores"),
        node("Add", "scores mask", "masked"),
        node("Softmax", "masked", "shares", axis=-1),
        node("MatMul", "shares v", "y"),
    ]
    inputs = {"q": (2, rows, 8), "k": (2, keys, 8), "v": (2, 6, 8), "mask": (2, 4, 6)}
    check(Case(nodes, inputs, {}), rng)


def test_nearest_resize_requantizes_int8(rng: np.random.Generator) -> None:
    nodes = [
        node("QuantizeLinear", "x coarse zero", "p"),
        node("DequantizeLinear", "p coarse zero", "q"),
        node(
            "Resize", "q factors", "r", mode="nearest", coordinate_transformation_mode="asymmetric"
        ),
        node("QuantizeLinear", "r fine zero", "s"),
        node("DequantizeLinear", "s fine zero", "y"),
        node("Relu", "q", "z"),
    ]
    nodes[2].input[:] = ["q", "", "factors"]
    weights = {
        "coarse": np.float32(1 / 8),
        "fine": np.float32(1 / 64),
        "zero": np.int8(0),
        "factors": np.array([1, 1, 2, 2], np.float32),
    }
    check(Case(nodes, {"x": (2, 3, 4, 6)}, weights, ("y", "z")), rng)


def test_a_concatenation_rounds_to_both_scales_that_follow_it(rng: np.random.Generator) -> None:
    nodes = [
        node("QuantizeLinear", "x fine zero", "p"),
        node("DequantizeLinear", "p fine zero", "q"),
        node("Relu", "q", "z"),
        node("Concat", "q w", "r", axis=1),
        node("QuantizeLinear", "r coarse zero", "s"),
        node("DequantizeLinear", "s coarse zero", "t"),
        node("QuantizeLinear", "t middle zero", "u"),
        node("DequantizeLinear", "u middle zero", "y"),
    ]
    weights = {
        "fine": np.float32(1 / 32),
        "coarse": np.float32(1 / 8),
        "middle": np.float32(1 / 16),
        "zero": np.int8(0),
    }
    case = Case(nodes, {"x": (1, 3, 4, 4), "w": (1, 2, 4, 4)}, weights, ("y", "z"))
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(case.lower("fp32"), feeds)

    def rounded(x: np.ndarray, scale: float) -> np.ndarray:  # onnxruntime leaves some out
        return np.clip(np.rint(x / scale), -128, 127) * scale

    q = rounded(feeds["x"], 1 / 32)
    joined = rounded(np.concatenate([q, feeds["w"]], axis=1), 1 / 8)
    np.testing.assert_array_equal(outputs["y"], rounded(joined, 1 / 16))
    np.testing.assert_array_equal(outputs["z"], np.maximum(q, 0))
