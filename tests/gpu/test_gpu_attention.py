"""Attention and other patterns that exporters write, interpreted on the CPU."""

from dataclasses import replace

import gpu_interpreter
import numpy as np
import onnx
import pytest
from gpu_graphs import Case, node, normal
from gpu_interpreter import check

from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "fp16"])


def kernels(case: Case, precision: str = "fp16") -> list[str]:
    return [call.spec.title for call in case.lower(precision).launches]


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def attention(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], mask: tuple[int, ...] = ()
) -> Case:
    """Heads that are inputs, with a factor before or after the product, and a mask if given."""
    rank = len(q)
    nodes = [
        node("Transpose", "k", "t", perm=[*range(rank - 2), rank - 1, rank - 2]),
        node("MatMul", "q t", "p"),
        node("Div", "p root", "s" if mask else "m"),
        *([node("Add", "s mask", "m")] if mask else []),
        node("Softmax", "m", "w", axis=-1),
        node("MatMul", "w v", "y"),
    ]
    inputs = {"q": q, "k": k, "v": v, **({"mask": mask} if mask else {})}
    return Case(nodes, inputs, {"root": scalar(np.sqrt(q[-1]))})


HEADS = {
    "one block": ((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16), ()),
    "several blocks": ((1, 2, 70, 24), (1, 2, 141, 24), (1, 2, 141, 40), ()),
    "whole blocks of keys": ((1, 2, 20, 16), (1, 2, 128, 16), (1, 2, 128, 16), ()),
    "a few keys after them": ((1, 2, 70, 16), (1, 2, 133, 16), (1, 2, 133, 16), ()),
    "one query": ((2, 2, 1, 8), (2, 2, 33, 8), (2, 2, 33, 8), ()),
    "no heads": ((3, 20, 32), (3, 37, 32), (3, 37, 32), ()),
    "a mask for all": ((2, 3, 20, 16), (2, 3, 37, 16), (2, 3, 37, 16), (20, 37)),
    "a mask for each head": ((2, 3, 20, 16), (2, 3, 37, 16), (2, 3, 37, 16), (1, 3, 20, 37)),
    "a mask of keys": ((2, 3, 20, 16), (2, 3, 37, 16), (2, 3, 37, 16), (2, 1, 1, 37)),
    "wide heads": ((1, 1, 10, 128), (1, 1, 70, 128), (1, 1, 70, 128), ()),
}


@PRECISIONS
@pytest.mark.parametrize("name", HEADS)
def test_attention_is_one_kernel(name: str, precision: str, rng: np.random.Generator) -> None:
    case = attention(*HEADS[name])
    assert [
        one for one in kernels(case, precision) if one not in ("elementwise", "transpose_tiles")
    ] == ["attention"]
    check(case, precision, rng)


def check_tactics(
    program: KernelProgram, case: Case, limit: float, rng: np.random.Generator
) -> None:
    feeds = case.feeds(rng)
    truth = case.truth(feeds)["y"]
    (at,) = [at for at, op in enumerate(program.ops) if len(op.tactics) > 1]
    for tactic in program.ops[at].tactics:
        ops = list(program.ops)
        ops[at] = replace(ops[at], tactics=(tactic,))
        actual = gpu_interpreter.run(replace(program, ops=tuple(ops)), feeds)["y"]
        assert np.linalg.norm(actual - truth) < limit * np.linalg.norm(truth)


def test_every_tactic_gives_the_same(rng: np.random.Generator) -> None:
    case = attention((1, 2, 150, 32), (1, 2, 150, 32), (1, 2, 150, 32))
    check_tactics(case.lower("fp32"), case, 1e-4, rng)


@pytest.mark.parametrize("keys", [128, 197])
@pytest.mark.parametrize("sm", [87, 90])
def test_every_tactic_of_fp16_sees_all_keys(sm: int, keys: int, rng: np.random.Generator) -> None:
    case = attention((1, 2, 70, 16), (1, 2, keys, 16), (1, 2, keys, 16))
    check_tactics(case.lower("fp16", GpuTarget(sm, 8)), case, 1e-2, rng)


def test_keys_masked_by_minus_infinity(rng: np.random.Generator) -> None:
    case = attention((1, 2, 20, 16), (1, 2, 150, 16), (1, 2, 150, 16), (20, 150))
    feeds = case.feeds(rng)
    feeds["mask"] = np.where(rng.random((20, 150)) < 0.5, -np.inf, 0).astype(np.float32)
    feeds["mask"][:, :100] = -np.inf  # whole blocks
    feeds["mask"][:, 120] = 0
    actual = gpu_interpreter.run(case.lower("fp32"), feeds)["y"]
    truth = case.truth(feeds)["y"]
    assert np.linalg.norm(actual - truth) < 1e-4 * np.linalg.norm(truth)


def transformer_block(rng: np.random.Generator, tokens: int, heads: int, depth: int) -> Case:
    """Attention and projection as exporters write them: one product for queries, keys, values."""
    width = heads * depth
    shape = np.array([2, tokens, 3, heads, depth], np.int64)
    nodes = [
        node("LayerNormalization", "x gain bias", "n", axis=-1),
        node("MatMul", "n wqkv", "a"),
        node("Add", "bqkv a", "b"),
        node("Reshape", "b split", "c"),
        node("Transpose", "c", "d", perm=[2, 0, 3, 1, 4]),
        node("Gather", "d zero", "q", axis=0),
        node("Gather", "d one", "k", axis=0),
        node("Gather", "d two", "v", axis=0),
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
        node("Mul", "q root", "qs"),
        node("Mul", "kt root", "ks"),
        node("MatMul", "qs ks", "s"),
        node("Softmax", "s", "w", axis=-1),
        node("MatMul", "w v", "o"),
        node("Transpose", "o", "ot", perm=[0, 2, 1, 3]),
        node("Reshape", "ot whole", "r"),
        node("MatMul", "r wo", "e"),
        node("Add", "bo e", "f"),
        node("Add", "x f", "y"),
    ]
    weights = {
        "gain": rng.normal(size=width).astype(np.float32),
        "bias": rng.normal(size=width).astype(np.float32),
        "wqkv": normal(rng, width, 3 * width),
        "bqkv": rng.normal(size=3 * width).astype(np.float32),
        "wo": normal(rng, width, width),
        "bo": rng.normal(size=width).astype(np.float32),
        "split": shape,
        "whole": np.array([2, tokens, width], np.int64),
        "root": np.array([depth**-0.25], np.float32),
        "zero": np.array(0, np.int64),
        "one": np.array(1, np.int64),
        "two": np.array(2, np.int64),
    }
    return Case(nodes, {"x": (2, tokens, width)}, weights)


@PRECISIONS
def test_a_transformer_block_moves_nothing(precision: str, rng: np.random.Generator) -> None:
    case = transformer_block(rng, 37, 3, 16)
    inside = [
        one for one in kernels(case, precision) if one not in ("elementwise", "transpose_tiles")
    ]
    assert inside == ["normalize", "gemm strided", "attention", "gemm strided"]
    assert len(kernels(case, "fp32")) == 4
    check(case, precision, rng)


@PRECISIONS
def test_windows_with_masks_are_one_kernel(precision: str, rng: np.random.Generator) -> None:
    batch, windows, heads, rows, depth = 2, 3, 2, 9, 8
    nodes = [
        node("Transpose", "k", "t", perm=[0, 1, 3, 2]),
        node("MatMul", "q t", "s"),
        node("Add", "bias s", "b"),
        node("Reshape", "b split", "c"),
        node("Add", "c mask", "d"),
        node("Reshape", "d whole", "e"),
        node("Softmax", "e", "w", axis=-1),
        node("MatMul", "w v", "y"),
    ]
    weights = {
        "bias": rng.normal(size=(1, heads, rows, rows)).astype(np.float32),
        "mask": rng.choice([0.0, -100.0], (1, windows, 1, rows, rows)).astype(np.float32),
        "split": np.array([batch, windows, heads, rows, rows], np.int64),
        "whole": np.array([-1, heads, rows, rows], np.int64),
    }
    shape = (batch * windows, heads, rows, depth)
    case = Case(nodes, dict.fromkeys("qkv", shape), weights)
    assert kernels(case, "fp32") == ["attention"]
    check(case, precision, rng)


def test_padding_by_nothing_is_no_work(rng: np.random.Generator) -> None:
    nodes = [node("Pad", "x pads", "p"), node("Relu", "p", "y")]
    case = Case(nodes, {"x": (2, 3)}, {"pads": np.zeros(4, np.int64)})
    assert kernels(case, "fp32") == ["elementwise"]
    check(case, "fp32", rng)


def decomposed(kind: str, root: str = "Div") -> list[onnx.NodeProto]:
    """A normalization in the parts that exporters write, from x to n."""
    away = "d" if kind == "LayerNormalization" else "x"
    ends = {
        "Div": [node("Div", f"{away} s", "n")],
        "Reciprocal": [node("Reciprocal", "s", "i"), node("Mul", f"i {away}", "n")],
        "one over": [node("Div", "one s", "i"), node("Mul", f"{away} i", "n")],
    }
    centre = [node("ReduceMean", "x axes", "m"), node("Sub", "x m", "d")]
    return [
        *(centre if kind == "LayerNormalization" else []),
        node("Pow", f"{away} two", "p") if root == "Div" else node("Mul", f"{away} {away}", "p"),
        node("ReduceMean", "p axes", "v"),
        node("Add", "v epsilon", "e"),
        node("Sqrt", "e", "s"),
        *ends[root],
    ]


CONSTANTS = {"two": scalar(2), "one": scalar(1), "epsilon": scalar(1e-2)}


@pytest.mark.parametrize("root", ["Div", "Reciprocal", "one over"])
@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
@pytest.mark.parametrize("axes", [[-1], [1], [-2, -1]])
def test_normalizations_in_parts_are_one_kernel(
    kind: str, root: str, axes: list[int], rng: np.random.Generator
) -> None:
    nodes = [*decomposed(kind, root), node("Mul", "gain n", "g"), node("Add", "g bias", "y")]
    shape = (3, 5, 7)
    wide = tuple(n if at - 3 in axes or at in axes else 1 for at, n in enumerate(shape))
    weights = {
        **CONSTANTS,
        "axes": np.array(axes, np.int64),
        "gain": rng.normal(size=wide).astype(np.float32),
        "bias": rng.normal(size=wide).astype(np.float32),
    }
    case = Case(nodes, {"x": shape}, weights)
    assert kernels(case, "fp32") == ["normalize"]
    check(case, "fp32", rng)


def test_a_difference_that_others_read_stays(rng: np.random.Generator) -> None:
    nodes = [*decomposed("LayerNormalization", "one over"), node("Mul", "n d", "y")]
    weights = {**CONSTANTS, "axes": np.array([-1], np.int64)}
    case = Case(nodes, {"x": (3, 5, 7)}, weights)
    assert "normalize" not in kernels(case, "fp32")
    check(case, "fp32", rng)


GEMMS = {
    "factors": ({"alpha": 0.5, "beta": 0.25}, (4, 5), (5, 6), (6,), True),
    "both transposed": ({"transA": 1, "transB": 1}, (5, 4), (6, 5), (1, 6), True),
    "a tensor added": ({"alpha": 2.0}, (4, 5), (5, 6), (4, 6), False),
    "a column added": ({"beta": 0.5}, (4, 5), (5, 6), (4, 1), True),
    "nothing added": ({"alpha": 0.5, "transB": 1}, (4, 5), (6, 5), (), True),
}


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("name", GEMMS)
def test_gemm_with_all_that_it_may_have(
    name: str, constant: bool, rng: np.random.Generator
) -> None:
    attributes, a, b, c, fixed = GEMMS[name]
    weights = {"b": normal(rng, *b)} if constant else {}
    inputs = {"a": a} if constant else {"a": a, "b": b}
    if c and fixed:
        weights["c"] = rng.normal(size=c).astype(np.float32)
    elif c:
        inputs["c"] = c
    case = Case([node("Gemm", "a b c" if c else "a b", "y", **attributes)], inputs, weights)
    check(case, "fp32", rng)


EINSUMS = {
    "ij,jk->ik": ((3, 4), (4, 5)),
    "bij,bkj->bik": ((2, 3, 4), (2, 5, 4)),
    "bhid,bhjd->bhij": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "bihd,bjhd->bhij": ((2, 4, 3, 5), (2, 6, 3, 5)),
    "nkctv,kvw->nctw": ((2, 3, 4, 5, 6), (3, 6, 6)),
    "i,j->ij": ((3,), (4,)),
    "ij,jk": ((3, 4), (4, 5)),
    "ijk,lj->il": ((3, 4, 5), (2, 4)),
    "ij->ji": ((3, 4),),
    "ijk->k": ((3, 4, 5),),
    "ij, jk->ik": ((3, 1), (4, 5)),
    "ij,jk ->ik": ((3, 4), (1, 5)),
    "bij,bjk->bik": ((2, 3, 4), (1, 4, 5)),
    "bij,bji->ib": ((2, 3, 1), (2, 4, 3)),
}


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation: str, rng: np.random.Generator) -> None:
    inputs = dict(zip("ab", EINSUMS[equation], strict=False))
    check(Case([node("Einsum", " ".join(inputs), "y", equation=equation)], inputs, {}), "fp32", rng)


UNFIT_EINSUMS = {
    "bij,bjk->bik": ((1, 3, 4), (2, 4, 5), r"makes \[2, 3, 5\].* says \[1, 3, 5\]"),
    "ij,jk->ik": ((3, 4), (6, 5), "sizes 4 and 6 of j"),
}


@pytest.mark.parametrize("equation", UNFIT_EINSUMS)
def test_an_einsum_whose_sizes_do_not_fit_is_refused(equation: str) -> None:
    *shapes, reason = UNFIT_EINSUMS[equation]
    inputs = dict(zip("ab", shapes, strict=True))
    case = Case([node("Einsum", "a b", "y", equation=equation)], inputs, {})
    with pytest.raises(NotCoveredError, match=reason):
        case.lower("fp32")
