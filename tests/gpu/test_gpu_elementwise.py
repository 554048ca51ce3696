"""Element-wise operators in Triton's interpreter, against the reference evaluator of ONNX."""

import math

import gpu_interpreter
import numpy as np
import onnx
import pytest
from gpu_graphs import Case, convolution, node, normal
from onnx.reference import ReferenceEvaluator

from toolkit.gpu.ir.dtypes import ELEMENT_TYPES, OPERAND_TYPES
from toolkit.gpu.ir.elementwise_ops import OPERATORS

pytest.importorskip("triton", reason="Triton is not installed")

SHAPE = (3, 5, 7)
EDGES = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan], np.float32)
INTEGERS = [n for n, row in ELEMENT_TYPES.items() if row.kind == "integer"]
SIGNED = [n for n in INTEGERS if not n.startswith("u")]
REL = 1e-5  # of FP32

# Attributes, and what operands are drawn from: least and largest.
FLOATS = {
    "Abs": ({}, (-3, 3)),
    "Acos": ({}, (-1, 1)),
    "Acosh": ({}, (1, 9)),
    "Asin": ({}, (-1, 1)),
    "Asinh": ({}, (-9, 9)),
    "Atan": ({}, (-9, 9)),
    "Atanh": ({}, (-0.99, 0.99)),
    "Ceil": ({}, (-3, 3)),
    "Celu": ({"alpha": 0.7}, (-3, 3)),
    "Cos": ({}, (-300, 300)),
    "Cosh": ({}, (-5, 5)),
    "Elu": ({"alpha": 1.3}, (-3, 3)),
    "Erf": ({}, (-3, 3)),
    "Exp": ({}, (-9, 9)),
    "Floor": ({}, (-3, 3)),
    "HardSigmoid": ({"alpha": 0.3, "beta": 0.4}, (-4, 4)),
    "HardSwish": ({}, (-5, 5)),
    "LeakyRelu": ({"alpha": 0.2}, (-3, 3)),
    "Log": ({}, (0.01, 9)),
    "Mish": ({}, (-9, 30)),
    "Neg": ({}, (-3, 3)),
    "Reciprocal": ({}, (0.1, 3)),
    "Relu": ({}, (-3, 3)),
    "Round": ({}, (-9, 9)),
    "Selu": ({}, (-3, 3)),
    "Shrink": ({"lambd": 0.6, "bias": 0.2}, (-2, 2)),
    "Sigmoid": ({}, (-9, 9)),
    "Sign": ({}, (-1, 1)),
    "Sin": ({}, (-300, 300)),
    "Sinh": ({}, (-5, 5)),
    "Softplus": ({}, (-9, 30)),
    "Softsign": ({}, (-9, 9)),
    "Sqrt": ({}, (0, 9)),
    "Tan": ({}, (-1.5, 1.5)),
    "Tanh": ({}, (-9, 9)),
    "ThresholdedRelu": ({"alpha": 0.7}, (-2, 2)),
}
PAIRS = ("Add", "Div", "Mod", "Mul", "PRelu", "Sub", "Max", "Min", "Mean", "Sum")
WHOLE_PAIRS = {
    "Add": ("Add", {}),
    "Div": ("Div", {}),
    "Mod": ("Mod", {}),
    "Mod as in C": ("Mod", {"fmod": 1}),
    "Mul": ("Mul", {}),
    "Sub": ("Sub", {}),
    "Max": ("Max", {}),
    "Min": ("Min", {}),
    "BitwiseAnd": ("BitwiseAnd", {}),
    "BitwiseOr": ("BitwiseOr", {}),
    "BitwiseXor": ("BitwiseXor", {}),
}
COMPARISONS = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")


def run(case: Case, feeds: dict[str, np.ndarray], precision: str = "fp32") -> np.ndarray:
    return gpu_interpreter.run(case.lower(precision), feeds)["y"]


def reference(case: Case, feeds: dict[str, np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        (truth,) = ReferenceEvaluator(case.model()).run(["y"], feeds)
    return np.asarray(truth)


def agree(case: Case, feeds: dict[str, np.ndarray], rel: float = REL) -> None:
    result, truth = run(case, feeds), reference(case, feeds)
    assert result.shape == truth.shape
    assert result.dtype == truth.dtype
    if truth.dtype.kind == "f":
        np.testing.assert_allclose(result, truth, rtol=rel, atol=1e-6)
    else:
        np.testing.assert_array_equal(result, truth)


def uniform(rng: np.random.Generator, limits: tuple[float, float]) -> np.ndarray:
    return rng.uniform(*limits, SHAPE).astype(np.float32)


def integers(rng: np.random.Generator, dtype: str) -> np.ndarray:
    """Numbers over the whole range of the type, and its ends."""
    limits = np.iinfo(dtype)
    numbers = rng.integers(limits.min, limits.max, SHAPE, dtype, endpoint=True)
    numbers.flat[:2] = limits.min, limits.max
    return numbers


@pytest.mark.parametrize("name", FLOATS)
def test_functions_of_floats(name: str, rng: np.random.Generator) -> None:
    attributes, limits = FLOATS[name]
    case = Case([node(name, "x", "y", **attributes)], {"x": SHAPE}, {})
    agree(case, {"x": uniform(rng, limits)}, rel=2e-5)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str, rng: np.random.Generator) -> None:
    case = Case([node("Gelu", "x", "y", approximate=approximate)], {"x": SHAPE}, {}, opset=20)
    agree(case, {"x": uniform(rng, (-4, 4))})


def test_gelu_far_from_zero_is_zero_or_its_operand(rng: np.random.Generator) -> None:
    """Of the width of its polynomial, beyond it, and of what is no number."""
    case = Case([node("Gelu", "x", "y")], {"x": (2003,)}, {}, opset=20)
    x = np.concatenate([np.linspace(-9, 9, 2000), [-1e30, 1e30, np.nan]]).astype(np.float32)
    result = run(case, {"x": x})
    phi = np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in x.astype(np.float64)])
    np.testing.assert_allclose(result, x * phi, rtol=2e-5, atol=3e-7)


@pytest.mark.parametrize(
    "name",
    ["Abs", "Ceil", "Floor", "Neg", "Relu", "Round", "Sign", "Sqrt", "IsNaN", "IsInf", "Exp"],
)
def test_edges_of_floats(name: str) -> None:
    dtypes = {"y": "bool"} if name.startswith("Is") else {}
    case = Case([node(name, "x", "y")], {"x": EDGES.shape}, {}, dtypes=dtypes)
    result, truth = run(case, {"x": EDGES}), reference(case, {"x": EDGES})
    np.testing.assert_array_equal(result, truth)
    if name in ("Abs", "Neg", "Ceil", "Floor", "Sqrt"):
        np.testing.assert_array_equal(np.signbit(result[:6]), np.signbit(truth[:6]))


@pytest.mark.parametrize("sides", [{"detect_negative": 0}, {"detect_positive": 0}])
def test_infinities_of_one_sign(sides: dict[str, int]) -> None:
    case = Case([node("IsInf", "x", "y", **sides)], {"x": EDGES.shape}, {}, dtypes={"y": "bool"})
    agree(case, {"x": EDGES})


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", [SHAPE, (5, 1), (7,), (1, 1, 1)])
def test_two_floats(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    attributes = {"fmod": 1} if name == "Mod" else {}
    case = Case([node(name, "a b", "y", **attributes)], {"a": SHAPE, "b": shape}, {})
    feeds = {n: rng.normal(size=s).astype(np.float32) for n, s in case.inputs.items()}
    agree(case, feeds)


@pytest.mark.parametrize("name", ["Max", "Min", *COMPARISONS])
def test_two_floats_at_edges(name: str) -> None:
    left, right = (a.reshape(-1) for a in np.meshgrid(EDGES, EDGES))
    dtypes = {"y": "bool"} if name in COMPARISONS else {}
    inputs = {"a": left.shape, "b": left.shape}
    agree(Case([node(name, "a b", "y")], inputs, {}, dtypes=dtypes), {"a": left, "b": right})


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", WHOLE_PAIRS)
def test_two_integers(name: str, dtype: str, rng: np.random.Generator) -> None:
    kind, attributes = WHOLE_PAIRS[name]
    left, right = integers(rng, dtype), integers(rng, dtype)
    right[right == 0] = 3
    if dtype in SIGNED:
        right[right == -1] = 5  # the least number by -1 has no result
    case = Case(
        [node(kind, "a b", "y", **attributes)],
        {"a": SHAPE, "b": SHAPE},
        {},
        dtypes={"a": dtype, "b": dtype, "y": dtype},
    )
    if kind != "Div":
        agree(case, {"a": left, "b": right})
        return
    whole = [int(a) // int(b) if (a < 0) == (b < 0) else -(-int(a) // int(b))
             for a, b in zip(left.flat, right.flat, strict=True)]  # fmt: skip
    truth = np.array(whole, dtype).reshape(SHAPE)
    np.testing.assert_array_equal(run(case, {"a": left, "b": right}), truth)


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_of_integers(name: str, dtype: str, rng: np.random.Generator) -> None:
    if dtype == "bool" and name != "Equal":
        pytest.skip("bools have no order in ONNX")
    draw = rng.integers(0, 2, (2, *SHAPE))
    left, right = (integers(rng, dtype) for _ in "ab") if dtype != "bool" else draw.astype(bool)
    same = rng.random(SHAPE) < 0.3
    right = np.where(same, left, right)
    dtypes = {"a": dtype, "b": dtype, "y": "bool"}
    case = Case([node(name, "a b", "y")], {"a": SHAPE, "b": SHAPE}, {}, dtypes=dtypes)
    agree(case, {"a": left, "b": right})


@pytest.mark.parametrize("dtype", SIGNED)
@pytest.mark.parametrize("name", ["Abs", "Neg", "Sign", "Relu", "BitwiseNot"])
def test_functions_of_integers(name: str, dtype: str, rng: np.random.Generator) -> None:
    case = Case([node(name, "x", "y")], {"x": SHAPE}, {}, dtypes={"x": dtype, "y": dtype})
    agree(case, {"x": integers(rng, dtype)})


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_shifts(direction: str, dtype: str, rng: np.random.Generator) -> None:
    dtypes = dict.fromkeys("aby", dtype)
    shift = node("BitShift", "a b", "y", direction=direction)
    case = Case([shift], {"a": SHAPE, "b": SHAPE}, {}, dtypes=dtypes)
    count = rng.integers(0, np.iinfo(dtype).bits, SHAPE).astype(dtype)
    agree(case, {"a": integers(rng, dtype), "b": count})


@pytest.mark.parametrize("name", ["And", "Or", "Xor"])
def test_logic(name: str, rng: np.random.Generator) -> None:
    nodes = [node(name, "a b", "c"), node("Not", "c", "y")]
    case = Case(nodes, {"a": SHAPE, "b": (7,)}, {}, dtypes=dict.fromkeys("aby", "bool"))
    feeds = {"a": rng.random(SHAPE) < 0.5, "b": rng.random(7) < 0.5}
    agree(case, feeds)
    assert len(case.lower().launches) == 1


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool"])
def test_where(dtype: str, rng: np.random.Generator) -> None:
    dtypes = {"c": "bool", "a": dtype, "b": dtype, "y": dtype}
    inputs = {"c": (5, 1), "a": SHAPE, "b": (7,)}
    case = Case([node("Where", "c a b", "y")], inputs, {}, dtypes=dtypes)
    feeds = {"c": rng.random((5, 1)) < 0.5}
    feeds |= {n: (rng.normal(size=inputs[n]) * 9).astype(dtype) for n in "ab"}
    agree(case, feeds)


@pytest.mark.parametrize("target", OPERAND_TYPES)
@pytest.mark.parametrize("source", OPERAND_TYPES)
def test_casts(source: str, target: str, rng: np.random.Generator) -> None:
    if source == target:
        pytest.skip("nothing to do")
    to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(target))
    dtypes = {"x": source, "y": target}
    case = Case([node("Cast", "x", "y", to=to)], {"x": SHAPE}, {}, dtypes=dtypes)
    low = 0 if "u" in source + target or "bool" in (source, target) else -100
    values = rng.uniform(low, 100, SHAPE)
    if ELEMENT_TYPES[source].kind == "integer" and ELEMENT_TYPES[target].kind == "integer":
        values = integers(rng, source)  # the low bits are kept
    if source == "float64":
        values = values.astype(np.float32)  # doubles are computed with as FP32
    with np.errstate(all="ignore"):
        feeds = {"x": values.astype(source)}
    result = run(case, feeds)
    with np.errstate(all="ignore"):
        truth = feeds["x"].astype(target)
    assert result.dtype == truth.dtype
    if target == "float64":
        truth = truth.astype(np.float32)
    np.testing.assert_array_equal(result, truth)


def test_a_cast_to_fp16_rounds(rng: np.random.Generator) -> None:
    nodes = [node("Cast", "x", "h", to=onnx.TensorProto.FLOAT16), node("Cast", "h", "y", to=1)]
    case = Case(nodes, {"x": SHAPE}, {})
    x = uniform(rng, (-3, 3))
    result = run(case, {"x": x})
    np.testing.assert_array_equal(result, x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("exponent", [2.0, 3.0, 0.5, -1.0, 1.7, None])
def test_powers(exponent: float | None, rng: np.random.Generator) -> None:
    x = uniform(rng, (0.1, 4))
    inputs, weights, feeds = {"x": SHAPE}, {}, {"x": x}
    if exponent is None:
        inputs["e"] = (7,)
        feeds["e"] = rng.uniform(-3, 3, 7).astype(np.float32)
    else:
        weights["e"] = np.array(exponent, np.float32)
    agree(Case([node("Pow", "x e", "y")], inputs, weights), feeds)


def test_powers_of_negative_numbers() -> None:
    x = np.array([-2, -2, -2, -0.5, 0, 0, 0, 5, -1], np.float32)
    e = np.array([3, 2, 0.5, -3, 2, 0, -1, 0, 1e6], np.float32)
    agree(Case([node("Pow", "x e", "y")], {"x": x.shape, "e": e.shape}, {}), {"x": x, "e": e})


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("exponents", ["int64", "float32"])
def test_powers_of_integers(dtype: str, exponents: str, rng: np.random.Generator) -> None:
    x = rng.integers(-9, 10, SHAPE).astype(dtype)
    e = rng.integers(0, 7, SHAPE).astype(exponents)
    dtypes = {"x": dtype, "e": exponents, "y": dtype}
    case = Case([node("Pow", "x e", "y")], {"x": SHAPE, "e": SHAPE}, {}, dtypes=dtypes)
    np.testing.assert_array_equal(run(case, {"x": x, "e": e}), x ** e.astype(np.int64))


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("limits", ["low high", "low", "-high"])
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_clip(limits: str, fixed: bool, dtype: str, rng: np.random.Generator) -> None:
    values = {"low": np.array(2, dtype), "high": np.array(5, dtype)}
    clip = node("Clip", "x", "y")
    clip.input.extend(["", "high"] if limits == "-high" else limits.split())
    used = {n: v for n, v in values.items() if n in clip.input}
    inputs = {"x": SHAPE, **({} if fixed else dict.fromkeys(used, ()))}
    dtypes = dict.fromkeys(("x", "low", "high", "y"), dtype)
    case = Case([clip], inputs, used if fixed else {}, dtypes=dtypes)
    x = rng.integers(0, 8, SHAPE).astype(dtype)
    agree(case, {"x": x, **({} if fixed else used)})


@pytest.mark.parametrize("kind", ["Sum", "Max", "Min", "Mean"])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_operators_of_many_tensors(kind: str, count: int, rng: np.random.Generator) -> None:
    names = [f"x{at}" for at in range(count)]
    case = Case([node(kind, " ".join(names), "y")], dict.fromkeys(names, SHAPE), {})
    agree(case, {name: uniform(rng, (-3, 3)) for name in names})


FUSED = {
    "gelu": [
        node("Div", "x root", "d"),
        node("Erf", "d", "e"),
        node("Add", "e one", "f"),
        node("Mul", "x f", "g"),
        node("Mul", "g half", "y"),
    ],
    "silu": [node("Sigmoid", "x", "s"), node("Mul", "x s", "y")],
    "mish": [node("Softplus", "x", "p"), node("Tanh", "p", "t"), node("Mul", "x t", "y")],
    "hard swish": [
        node("Add", "x three", "a"),
        node("Clip", "a zero six", "c"),
        node("Div", "c six", "d"),
        node("Mul", "x d", "y"),
    ],
    "masked": [
        node("Greater", "x zero", "m"),
        node("Where", "m x zero", "w"),
        node("Cast", "m", "c", to=1),
        node("Add", "w c", "y"),
    ],
}
SCALARS = {"zero": 0.0, "half": 0.5, "one": 1.0, "three": 3.0, "six": 6.0, "root": 2**0.5}


@pytest.mark.parametrize("name", FUSED)
def test_a_chain_is_one_kernel(name: str, rng: np.random.Generator) -> None:
    read = {one for part in FUSED[name] for one in part.input}
    weights = {n: np.array(v, np.float32) for n, v in SCALARS.items() if n in read}
    case = Case(FUSED[name], {"x": SHAPE}, weights)
    assert len(case.lower().launches) == 1
    agree(case, {"x": uniform(rng, (-4, 4))})


@pytest.mark.parametrize("name", FUSED)
def test_a_chain_ends_a_product(name: str, rng: np.random.Generator) -> None:
    read = {one for part in FUSED[name] for one in part.input}
    weights = {n: np.array(v, np.float32) for n, v in SCALARS.items() if n in read}
    weights["v"] = normal(rng, 7, 7)
    nodes = [node("MatMul", "u v", "x"), *FUSED[name]]
    case = Case(nodes, {"u": (7, 7)}, weights)
    assert len(case.lower().launches) == 1
    agree(case, {"u": rng.normal(size=(7, 7)).astype(np.float32)}, rel=1e-4)


def test_integers_beside_a_product_stay_exact(rng: np.random.Generator) -> None:
    nodes = [
        node("MatMul", "u w", "m"),
        node("Cast", "m", "c", to=onnx.TensorProto.INT64),
        node("Add", "c big", "y"),
    ]
    dtypes = {"big": "int64", "y": "int64"}
    case = Case(nodes, {"u": (4, 5), "big": (4, 3)}, {"w": normal(rng, 5, 3)}, dtypes=dtypes)
    big = rng.integers(2**40, 2**41, (4, 3))
    feeds = {"u": rng.normal(size=(4, 5)).astype(np.float32), "big": big}
    np.testing.assert_array_equal(run(case, feeds), reference(case, feeds))


@pytest.mark.parametrize("form", [(8, 1, 1), (1, 8, 1, 1), ()])
@pytest.mark.parametrize("kind", ["Mul", "Add", "Sub", "Div"])
def test_a_constant_for_each_channel_is_part_of_a_convolution(
    kind: str, form: tuple[int, ...], rng: np.random.Generator
) -> None:
    after = [node(kind, "c k", "d"), node("Relu", "d", "e"), node("Conv", "e v", "y")]
    case = convolution(rng, (2, 3, 5, 5), 8, (3, 3), *after)
    constant = rng.uniform(0.5, 2, form).astype(np.float32)
    weights = {**case.weights, "k": constant, "v": normal(rng, 4, 8, 1, 1)}
    case = Case(case.nodes, case.inputs, weights)
    assert len(case.lower().launches) == 3  # a border, and two convolutions
    agree(case, {"x": rng.normal(size=(2, 3, 5, 5)).astype(np.float32)}, rel=1e-4)


def test_every_operator_of_the_table_is_tested() -> None:
    tested = {*FLOATS, *PAIRS, *(kind for kind, _ in WHOLE_PAIRS.values())}
    tested |= {"FromFloat8", "ToFloat8"}  # test_gpu_float8.py
    tested |= {one.op_type for chain in FUSED.values() for one in chain} | set(COMPARISONS)
    tested |= {"And", "Or", "Xor", "Not", "BitShift", "BitwiseNot", "Cast", "Clip", "Gelu"}
    tested |= {"IsInf", "IsNaN", "Pow", "RoundInt8", "Swish", "Where"}
    assert set(OPERATORS) <= tested
