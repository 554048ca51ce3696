"""Chains of Reshape and Transpose, and what stands around products, become views."""

from dataclasses import replace

import gpu_interpreter
import numpy as np
import pytest
from gpu_graphs import Case, node, normal

from toolkit.gpu.ir.network import Network, Operation
from toolkit.gpu.passes.layout_chains import merge_layout_chains

pytest.importorskip("triton", reason="Triton is not installed")


def chain(shape: tuple[int, ...], *steps: tuple[int, ...] | str) -> Network:
    """Steps: a shape to reshape to, or the digits of a permutation."""
    operations, shapes = [], {"t0": shape}
    for at, step in enumerate(steps):
        if isinstance(step, str):
            perm = tuple(map(int, step))
            result = tuple(shapes[f"t{at}"][one] for one in perm)
            op = Operation("Transpose", f"n{at}", (f"t{at}",), (f"t{at + 1}",), {"perm": perm})
        else:
            result = step
            op = Operation("Reshape", f"n{at}", (f"t{at}",), (f"t{at + 1}",), {})
        operations.append(op)
        shapes[f"t{at + 1}"] = result
    dtypes = dict.fromkeys(shapes, "float32")
    return Network(tuple(operations), ("t0",), (f"t{len(steps)}",), shapes, dtypes, {})


def computed(network: Network) -> np.ndarray:
    (name,) = network.inputs
    values = {name: np.arange(np.prod(network.shapes[name])).reshape(network.shapes[name])}
    for op in network.operations:
        value = values[op.inputs[0]]
        if op.kind == "Transpose":
            value = value.transpose(op.integers("perm", ()))
        values[op.outputs[0]] = value.reshape(network.shapes[op.outputs[0]])
    return values[network.outputs[0]]


def test_random_chains_move_every_element_to_the_same_index(rng: np.random.Generator) -> None:
    rewritten = 0
    for _ in range(600):
        now = rng.choice([1, 2, 2, 3, 4, 5], 4).tolist()
        shape, steps = tuple(now), []
        for kind in ("join", "turn", "split", "split", "turn", "join"):
            at = int(rng.integers(0, len(now)))
            if kind == "turn":
                order = rng.permutation(len(now)).tolist()
                now = [now[one] for one in order]
                steps.append("".join(map(str, order)))
                continue
            if kind == "split" and len(now) < 8:
                part = int(rng.choice([n for n in range(1, now[at] + 1) if now[at] % n == 0]))
                now[at : at + 1] = [part, now[at] // part]
            elif at + 1 < len(now):
                now[at : at + 2] = [now[at] * now[at + 1]]
            steps.append(tuple(now))
        before = chain(shape, *steps)
        after = merge_layout_chains(before)
        rewritten += before.operations != after.operations
        assert after.outputs == before.outputs
        np.testing.assert_array_equal(computed(after), computed(before), strict=True)
    assert rewritten > 10


def test_heads_joined_to_the_batch_are_never_joined() -> None:
    result = merge_layout_chains(chain((7, 2, 12), (7, 6, 4), "102", (2, 3, 7, 4)))
    assert [op.kind for op in result.operations] == ["Reshape", "Transpose", "Reshape"]
    assert result.shapes[result.operations[0].outputs[0]] == (7, 2, 3, 4)
    assert result.operations[1].integers("perm", ()) == (1, 2, 0, 3)
    assert result.operations[2].nodes == ("n0", "n1", "n2")


def test_the_end_of_a_chain_names_the_nodes_that_it_took_before() -> None:
    before = chain((7, 2, 12), (7, 6, 4), "102", (2, 3, 7, 4))
    last = replace(before.operations[-1], others=("a", "b"))
    result = merge_layout_chains(replace(before, operations=(*before.operations[:-1], last)))
    assert set(result.operations[-1].nodes) == {"n0", "n1", "n2", "a", "b"}


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(((2, 3, 4, 5), "0213", (2, 12, 5)), id="channels are shuffled"),
        pytest.param(((20, 6), (24, 5)), id="the ends of dimensions do not meet"),
        pytest.param(((2, 60), "10"), id="joined for good"),
    ],
)
def test_other_chains_stay(steps: tuple[tuple[int, ...] | str, ...]) -> None:
    before = chain((2, 12, 5), *steps)
    assert merge_layout_chains(before).operations == before.operations


def test_a_tensor_that_others_read_is_made() -> None:
    before = chain((7, 2, 12), (7, 6, 4), "102", (2, 3, 7, 4))
    extra = Operation("Relu", "r", ("t1",), ("y",), {})
    network = Network(
        (*before.operations, extra),
        ("t0",),
        ("t3", "y"),
        {**before.shapes, "y": (7, 6, 4)},
        {**before.dtypes, "y": "float32"},
        {},
    )
    assert merge_layout_chains(network).operations == network.operations


def check(case: Case, rng: np.random.Generator, kernels: list[str]) -> None:
    feeds = case.feeds(rng)
    program = case.lower("fp32")
    assert [call.spec.title for call in program.launches] == kernels
    actual = gpu_interpreter.run(program, feeds)["y"]
    truth = case.truth(feeds)["y"]
    assert actual.shape == truth.shape
    assert np.linalg.norm(actual - truth) < 1e-4 * np.linalg.norm(truth)


def test_a_sum_joins_a_product_behind_reshape_and_transpose(rng: np.random.Generator) -> None:
    rows, batch, heads, each = 5, 3, 2, 4
    wide = heads * each
    weights = {
        "w": normal(rng, wide, wide),
        "b": normal(rng, wide),
        "flat": np.array([rows * batch, wide]),
        "back": np.array([rows, batch, wide]),
    }
    nodes = [
        node("Transpose", "x", "t", perm=[2, 0, 1, 3]),
        node("Reshape", "t flat", "f"),
        node("Gemm", "f w b", "g", transB=1),
        node("Reshape", "g back", "h"),
        node("Transpose", "h", "i", perm=[1, 0, 2]),
        node("Add", "r i", "y"),
    ]
    inputs = {"x": (batch, heads, rows, each), "r": (batch, rows, wide)}
    # The heads of a row lie apart in the input; what attention makes needs no copy.
    check(Case(nodes, inputs, weights), rng, ["elementwise", "gemm strided"])


@pytest.mark.parametrize("half_first", [True, False])
@pytest.mark.parametrize("kind", ["Div", "Mul"])
def test_gelu_written_out_is_one_step(
    kind: str, half_first: bool, rng: np.random.Generator
) -> None:
    root = np.sqrt(2) if kind == "Div" else np.sqrt(0.5)
    weights = {name: np.array(n, np.float32) for name, n in (("r", root), ("1", 1), ("h", 0.5))}
    weights["w"] = normal(rng, 9, 6)
    ends = (
        [node("Mul", "h c", "k"), node("Mul", "k s", "y")]
        if half_first
        else [node("Mul", "c s", "k"), node("Mul", "k h", "y")]
    )
    nodes = [
        node("MatMul", "x w", "c"),
        node(kind, "c r", "d"),
        node("Erf", "d", "e"),
        node("Add", "e 1", "s"),
        *ends,
    ]
    case = Case(nodes, {"x": (7, 9)}, weights)
    (call,) = case.lower("fp32").launches
    assert [step[0] for step in dict(call.spec.constants)["EPILOGUE"]] == ["gelu"]
    check(case, rng, ["gemm strided"])


def test_what_only_resembles_gelu_is_computed_as_written(rng: np.random.Generator) -> None:
    weights = {name: np.array(n, np.float32) for name, n in (("r", 1.3), ("1", 1), ("h", 0.5))}
    nodes = [
        node("Div", "x r", "d"),
        node("Erf", "d", "e"),
        node("Add", "e 1", "s"),
        node("Mul", "x s", "k"),
        node("Mul", "k h", "y"),
    ]
    check(Case(nodes, {"x": (7, 9)}, weights), rng, ["elementwise"])
