"""What the GPU rounds to INT8, and that rounding, moves and sums cost no kernels of their own.

Drafts run in the interpreter on poisoned memory, against onnxruntime on the same Q/DQ graph.
"""

from collections import Counter
from collections.abc import Callable

import gpu_interpreter
import int8_reference
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from gpu_graphs import ORIN, Case, node, normal
from int8_graphs import Graph, inverted_residual, quantized, residual_block

from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.graph.extract import extract_segments
from toolkit.graph.passes import run_passes
from toolkit.quantize.gpu_operands import operands_on_gpu, tied_on_gpu
from toolkit.quantize.quantize import calibrated_tensors, quantize, with_operands
from toolkit.quantize.trials.trial import TrialModel

pytest.importorskip("triton", reason="Triton is not installed")

# One step of the grid at one place, seen at the end: kernels multiply by 1/s, ORT divides by s, and
# what lies between two roundings is FP16 here and FP32 there.
CLOSE = 2e-2


def lowered(model: ir.Model) -> KernelProgram:
    segment = {str(one.name): "gpu.0" for one in model.graph}
    (piece,) = extract_segments(model, segment, ["gpu.0"])
    return lower_segment(piece.model, gpu=ORIN, precision="int8")


def kernels(segment: KernelProgram) -> Counter[str]:
    result = Counter(call.spec.title for call in segment.launches)
    result["elementwise"] += result.pop("transpose_tiles", 0)
    return result


def check(case: Case, rng: np.random.Generator) -> KernelProgram:
    """The kernels give what the Q/DQ graph of a GPU says."""
    feeds = case.feeds(rng)
    model = quantized(ir.from_proto(case.model()), feeds, on_gpu=True)
    segment = lowered(model)
    outputs = gpu_interpreter.run(segment, feeds)
    proto = ir.to_proto(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options)
    for out, truth in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        assert outputs[out.name].shape == truth.shape
        difference = np.linalg.norm(outputs[out.name].astype(np.float64) - truth)
        assert difference < CLOSE * np.linalg.norm(truth), out.name
    return segment


def read_in_int8(case: Case) -> dict[str, tuple[int, ...]]:
    """The nodes that read INT8, with the operands."""
    model, _ = run_passes(ir.from_proto(case.model()))
    result = operands_on_gpu(model, {str(one.name) for one in model.graph})
    return {name: operands for name, operands in result.items() if operands}


def transformer(rng: np.random.Generator, *, rows: int = 5, batch: int = 2) -> Case:
    """A block as PyTorch exports it: rows first in attention, heads joined to the batch."""
    wide, heads, deep = 24, 3, 32
    each = wide // heads
    weights = {
        "wq": normal(rng, wide, 3 * wide),
        "wo": normal(rng, wide, wide),
        "w1": normal(rng, wide, deep),
        "w2": normal(rng, deep, wide),
        "root": np.array(each**-0.25, np.float32),
        "sqrt2": np.array(np.sqrt(2), np.float32),
        "one": np.array(1, np.float32),
        "half": np.array(0.5, np.float32),
        "axis": np.array([0]),
        "last": np.array([-2]),
    }
    weights |= {f"b{k}": rng.normal(size=n).astype(np.float32) for k, n in (("q", 3 * wide),)}
    weights |= {"bo": normal(rng, wide), "b1": normal(rng, deep), "b2": normal(rng, wide)}
    weights |= {k: (1 + normal(rng, wide)).astype(np.float32) for k in ("g1", "g2")}
    weights |= {k: normal(rng, wide) for k in ("s1", "s2")}
    for name, sizes in {
        "parts": [rows, batch, 3, wide],
        "front": [1, rows, batch, 3, wide],
        "joined": [rows, batch * heads, each],
        "apart": [batch, heads, rows, each],
        "flat": [rows * batch, wide],
        "back": [rows, batch, wide],
    }.items():
        weights[name] = np.array(sizes)
    nodes = [
        node("Add", "x x2", "x0"),
        node("LayerNormalization", "x0 g1 s1", "n1", axis=-1),
        node("Transpose", "n1", "t", perm=[1, 0, 2]),
        node("MatMul", "t wq", "m"),
        node("Add", "bq m", "mb"),
        node("Reshape", "mb parts", "p0"),
        node("Unsqueeze", "p0 axis", "p1"),
        node("Transpose", "p1", "p2", perm=[3, 1, 2, 0, 4]),
        node("Squeeze", "p2 last", "p3"),
    ]
    for at, name in enumerate("qkv"):
        weights[f"at{name}"] = np.array(at)
        nodes += [
            node("Gather", f"p3 at{name}", f"{name}0", axis=0),
            node("Reshape", f"{name}0 joined", f"{name}1"),
            node("Transpose", f"{name}1", f"{name}2", perm=[1, 0, 2]),
            node("Reshape", f"{name}2 apart", name),
        ]
    nodes += [
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
        node("Mul", "q root", "qs"),
        node("Mul", "kt root", "ks"),
        node("MatMul", "qs ks", "scores"),
        node("Softmax", "scores", "shares", axis=-1),
        node("MatMul", "shares v", "a0"),
        node("Transpose", "a0", "a1", perm=[2, 0, 1, 3]),
        node("Reshape", "a1 flat", "a2"),
        node("Gemm", "a2 wo bo", "o0"),
        node("Reshape", "o0 back", "o1"),
        node("Transpose", "o1", "o2", perm=[1, 0, 2]),
        node("Add", "o2 x0", "r"),
        node("LayerNormalization", "r g2 s2", "n2", axis=-1),
        node("MatMul", "n2 w1", "h0"),
        node("Add", "b1 h0", "h1"),
        node("Div", "h1 sqrt2", "h2"),
        node("Erf", "h2", "h3"),
        node("Add", "h3 one", "h4"),
        node("Mul", "h1 h4", "h5"),
        node("Mul", "h5 half", "h6"),
        node("MatMul", "h6 w2", "f0"),
        node("Add", "b2 f0", "f1"),
        node("Add", "r f1", "y"),
    ]
    return Case(nodes, {"x": (batch, rows, wide), "x2": (batch, rows, wide)}, weights)


def test_a_transformer_block_is_seven_kernels(rng: np.random.Generator) -> None:
    segment = check(transformer(rng), rng)
    # And x + x2 before it.
    assert kernels(segment) == {"elementwise": 1, "normalize": 2, "gemm strided": 4, "attention": 1}
    attended = next(call for call in segment.launches if call.spec.title == "attention")
    assert dict(attended.spec.signature)["y"].removesuffix(":16") == "*i8"


def test_only_products_of_a_transformer_read_int8(rng: np.random.Generator) -> None:
    products = ("MatMul:m", "Gemm:o0", "MatMul:h0", "MatMul:f0")
    assert read_in_int8(transformer(rng)) == dict.fromkeys(products, (0,))


def test_softmax_rounds_as_it_stores(rng: np.random.Generator) -> None:
    weights = {"w": normal(rng, 12, 7)}
    nodes = [node("Softmax", "x", "s", axis=-1), node("MatMul", "s w", "y")]
    segment = check(Case(nodes, {"x": (3, 5, 12)}, weights), rng)
    assert kernels(segment) == {"elementwise": 1, "softmax": 1, "gemm strided": 1}


@pytest.mark.parametrize("block", [residual_block, inverted_residual])
def test_what_a_convolution_adds_is_rounded_once(
    block: Callable[[np.random.Generator], Case], rng: np.random.Generator
) -> None:
    case = block(rng)
    feeds = case.feeds(rng)
    model = quantized(ir.from_proto(case.model()), feeds, on_gpu=True)
    actual = gpu_interpreter.run(lowered(model), feeds)["y"]
    truth = int8_reference.run(ir.to_proto(model), feeds)["y"]
    np.testing.assert_array_equal(actual, truth, strict=True)
    sums = [one for one in model.graph if one.op_type == "Add"]
    makers = [Counter(v.producer().op_type for v in one.inputs) for one in sums]
    assert makers  # one operand as the convolution makes it, the other from INT8
    assert all(one == {"Conv": 1, "DequantizeLinear": 1} for one in makers)


def test_parts_of_a_concatenation_are_written_in_place(rng: np.random.Generator) -> None:
    """A C2f block: half of a tensor goes on, is added to, and all of it is joined."""
    nodes, weights = [], {"sizes": np.array([8, 8])}

    def conv(x: str, y: str, filters: int, channels: int, taps: int) -> None:
        weights[f"w{y}"] = normal(rng, filters, channels, taps, taps)
        weights[f"b{y}"] = rng.normal(size=filters).astype(np.float32)
        nodes.append(node("Conv", f"{x} w{y} b{y}", f"{y}c", pads=[taps // 2] * 4))
        nodes.extend([node("Sigmoid", f"{y}c", f"{y}s"), node("Mul", f"{y}c {y}s", y)])

    conv("x", "e", 16, 4, 1)
    nodes.append(onnx.helper.make_node("Split", ["e", "sizes"], ["a", "b"], name="Split", axis=1))
    conv("b", "c", 8, 8, 3)
    nodes.append(node("Add", "b c", "d"))
    conv("d", "f", 8, 8, 3)
    nodes.append(node("Concat", "a b d f", "j", axis=1))
    conv("j", "y", 5, 32, 1)
    segment = check(Case(nodes, {"x": (2, 4, 6, 5)}, weights), rng)
    assert kernels(segment)["elementwise"] <= 2  # the border alone


def test_parts_of_a_joined_tensor_are_cut_off_without_a_copy(rng: np.random.Generator) -> None:
    """A block of GhostNet: half of the channels are made of the others; the last are left out."""
    weights = {
        "w1": normal(rng, 8, 4, 1, 1),
        "w2": normal(rng, 8, 1, 3, 3),
        "w3": normal(rng, 5, 12, 1, 1),
        "from": np.array([0]),
        "to": np.array([12]),
        "axis": np.array([1]),
    }
    nodes = [
        node("Conv", "x w1", "a"),
        node("Relu", "a", "b"),
        node("Conv", "b w2", "c", group=8, pads=[1] * 4),
        node("Concat", "b c", "j", axis=1),
        node("Slice", "j from to axis", "s"),
        node("Conv", "s w3", "y"),
    ]
    segment = check(Case(nodes, {"x": (2, 4, 6, 5)}, weights), rng)
    assert kernels(segment)["elementwise"] <= 2  # the border alone


def test_what_is_joined_for_floats_stays_in_floating_point(rng: np.random.Generator) -> None:
    """A layer of DenseNet: the joined maps are normalized before they are multiplied."""
    weights = {
        "w1": normal(rng, 6, 4, 3, 3),
        "w2": normal(rng, 5, 10, 1, 1),
        "gain": 1 + normal(rng, 10, 1, 1),
        "shift": normal(rng, 10, 1, 1),
    }
    nodes = [
        node("Conv", "x w1", "c", pads=[1] * 4),
        node("Concat", "x c", "j", axis=1),
        node("Mul", "j gain", "g"),
        node("Add", "g shift", "h"),
        node("Relu", "h", "r"),
        node("Conv", "r w2", "y"),
    ]
    case = Case(nodes, {"x": (1, 4, 6, 6)}, weights)
    assert read_in_int8(case) == {"Conv:c": (0,), "Conv:y": (0,)}
    model, _ = run_passes(ir.from_proto(case.model()))
    assert tied_on_gpu(model, {str(one.name) for one in model.graph}) == ()
    check(case, rng)


def test_a_border_of_zeros_is_part_of_the_convolution(rng: np.random.Generator) -> None:
    """As TensorFlow's exporters pad before strides, on one side more than on the other."""
    weights = {
        "w1": normal(rng, 6, 4, 1, 1),
        "w2": normal(rng, 5, 6, 3, 3),
        "pads": np.array([0, 0, 0, 0, 0, 0, 1, 1]),
        "zero": np.array(0, np.float32),
    }
    nodes = [
        node("Conv", "x w1", "a"),
        node("Relu", "a", "b"),
        node("Pad", "b pads zero", "p"),
        node("Conv", "p w2", "y", strides=[2, 2]),
    ]
    segment = check(Case(nodes, {"x": (2, 4, 8, 6)}, weights), rng)
    assert kernels(segment)["elementwise"] <= 2  # the border of the segment alone
    assert kernels(segment)["pad"] == 0


def test_a_pooling_that_is_joined_for_floats_stays_in_floating_point(
    rng: np.random.Generator,
) -> None:
    """What DenseNet begins with."""
    weights = {
        "w1": normal(rng, 6, 4, 3, 3),
        "w2": normal(rng, 4, 6, 1, 1),
        "gain": 1 + normal(rng, 10, 1, 1),
        "w3": normal(rng, 5, 10, 1, 1),
    }
    nodes = [
        node("Conv", "x w1", "c"),
        node("MaxPool", "c", "p", kernel_shape=[2, 2], strides=[2, 2]),
        node("Relu", "p", "q"),
        node("Conv", "q w2", "r"),
        node("Concat", "p r", "j", axis=1),
        node("Mul", "j gain", "g"),
        node("Conv", "g w3", "y"),
    ]
    case = Case(nodes, {"x": (1, 4, 8, 8)}, weights)
    assert read_in_int8(case) == {"Conv:c": (0,), "Conv:r": (0,), "Conv:y": (0,)}
    check(case, rng)


def test_squeeze_and_excitation_reads_bytes(rng: np.random.Generator) -> None:
    weights = {
        "wd": normal(rng, 8, 1, 3, 3),
        "w1": normal(rng, 4, 8, 1, 1),
        "w2": normal(rng, 8, 4, 1, 1),
        "w3": normal(rng, 5, 8, 1, 1),
    }
    nodes = [
        node("Conv", "x wd", "d", group=8, pads=[1] * 4),
        node("Sigmoid", "d", "ds"),
        node("Mul", "d ds", "e"),
        node("GlobalAveragePool", "e", "p"),
        node("Conv", "p w1", "q"),
        node("Relu", "q", "r"),
        node("Conv", "r w2", "t"),
        node("Sigmoid", "t", "g"),
        node("Mul", "g e", "m"),
        node("Conv", "m w3", "y"),
    ]
    case = Case(nodes, {"x": (2, 8, 7, 6)}, weights)
    result = read_in_int8(case)
    assert (result["Mul:m"], result["GlobalAveragePool:p"]) == ((1,), (0,))
    scaled = [call for call in check(case, rng).launches if "'mul'" in str(call.spec.constants)]
    types = [dict(call.spec.signature) for call in scaled if call.spec.title == "elementwise"]
    assert [one["y"].removesuffix(":16") for one in types] == ["*i8"]
    assert "*i8" in {one["x0"].removesuffix(":16") for one in types} | {
        one["x1"].removesuffix(":16") for one in types
    }


@pytest.mark.parametrize("block", [transformer, residual_block, inverted_residual])
def test_a_trial_rounds_as_the_gpu_does(
    block: Callable[[np.random.Generator], Case], rng: np.random.Generator
) -> None:
    case = block(rng)
    graph, _ = run_passes(ir.from_proto(case.model()))
    feeds = case.feeds(rng)
    expected = calibrated_tensors(graph)
    amax = with_operands(graph, dict(zip(expected, rng.uniform(2, 4, len(expected)), strict=True)))
    names = {str(one.name): "gpu.0" for one in graph.graph}
    operands = operands_on_gpu(graph, names)
    model = quantize(graph, amax, names, frozenset(), operands=operands).model
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    (truth,) = session.run(["y"], feeds)
    tried = TrialModel(graph, optimize=False, operands=operands)(amax, feeds)["y"]
    np.testing.assert_array_equal(tried, truth, strict=True)
    if block is transformer:  # other operands are rounded where none are named
        assert (TrialModel(graph, optimize=False)(amax, feeds)["y"] != truth).any()


def test_a_tensor_is_rounded_once_for_two_readers(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 6, 5, 5)})
    y = graph.add("Sigmoid", graph.product("Conv", graph.rounded("x"), (8, 6, 1, 1)))
    ends = [
        graph.product("Conv", graph.rounded(y, np.float32(0.01)), (filters, 8, 1, 1))
        for filters in (3, 5)
    ]
    segment = graph.case(*ends).lower("int8")
    alone = graph.case(ends[0]).lower("int8")
    assert kernels(segment)["gemm strided nchw"] == kernels(alone)["gemm strided nchw"] + 1
    assert not [call for call in segment.launches if "sigmoid" in str(call.spec.constants)][1:]


@pytest.mark.parametrize(("side", "elements"), [(2, 1024), (64, 2048)])
def test_blocks_that_compute_bytes_are_larger_where_there_are_enough(
    side: int, elements: int, rng: np.random.Generator
) -> None:
    graph = Graph(rng, {"x": (1, 64, side, side), "g": (1, 64, 1, 1)})
    case = graph.case(graph.rounded(graph.add("Mul", graph.rounded("x"), "g")))
    results = [dict(one.spec.constants) for one in case.lower("int8").launches]
    blocks = [one["BLOCK"] for one in results if "'mul'" in str(one)]
    assert blocks == [elements]
