"""A rectifier and the rounding to INT8 after it as one step: when, and with which bits."""

import os
import subprocess
import sys
from pathlib import Path

import gpu_interpreter
import int8_reference
import numpy as np
import pytest
from int8_graphs import Graph

from toolkit.gpu.ir.expressions import expression_of
from toolkit.gpu.ir.network import Operation

pytest.importorskip("triton", reason="Triton is not installed")


def steps_of(*operations: Operation, **constants: float) -> tuple[str, ...]:
    given = {name: np.array(value, np.float32) for name, value in constants.items()}
    return tuple(str(step[0]) for step in expression_of("x", operations, given).ops)


def rounding(source: str, scale: float) -> Operation:
    return Operation("RoundInt8", "q", (source,), ("q",), {"scale": scale})


def clip_then_round(low: float, high: float, scale: float) -> tuple[str, ...]:
    clip = Operation("Clip", "c", ("x", "low", "high"), ("c",), {})
    return steps_of(clip, rounding("c", scale), low=low, high=high)


@pytest.mark.parametrize(
    ("low", "high", "scale", "one"),
    [
        (0.0, 126.5000001, 1.0, False),  # a float32 half, which goes to the even 126
        (0.0, 126.50001, 1.0, True),
        (0.0, 6.0, 6 / 127, True),
        (0.0, 6.0, 6 / 126, False),
        (0.0, float("inf"), 1.0, True),
        (-0.001, 127.0, 1.0, False),
        (0.001, 127.0, 1.0, False),
        (0.0, 0.0, 1.0, False),
    ],
)
def test_a_clip_is_a_rectifier_where_its_top_is_the_range_of_the_scale(
    low: float, high: float, scale: float, one: bool
) -> None:
    expected = ("relu_int8",) if one else ("clip", "round_int8")
    assert clip_then_round(low, high, scale) == expected


def test_a_rectifier_that_others_read_stays() -> None:
    relu = Operation("Relu", "r", ("x",), ("r",), {})
    assert steps_of(relu, rounding("r", 0.1)) == ("relu_int8",)
    double = Operation("Add", "a", ("q", "r"), ("a",), {})
    steps = steps_of(relu, rounding("r", 0.1), double)
    assert steps == ("relu", "near_int8", "real", "add")
    last = Operation("RoundInt8", "p", ("a",), ("p",), {"scale": 0.2})
    assert steps_of(relu, rounding("r", 0.1), double, last)[-1] == "round_int8"


@pytest.mark.parametrize("scale", [0.047, 0.06], ids=["rectifies", "cuts"])
@pytest.mark.parametrize("taps", [1, 3])
def test_a_clip_has_the_bits_of_the_formula(
    taps: int, scale: float, rng: np.random.Generator
) -> None:
    """Clip from 0 to 6 on a grid that ends before 6, and on one that does not."""
    graph = Graph(rng, {"x": (2, 16, 5, 6)})
    x = graph.rounded("x")
    sums = graph.product("Conv", x, (24, 16, taps, taps), bias="int32")
    limits = (graph.constant(np.float32(0)), graph.constant(np.float32(6)))
    y = graph.rounded(graph.add("Clip", sums, *limits), np.float32(scale))
    case = graph.case(graph.product("Conv", y, (4, 24, 1, 1)))
    segment = case.lower("int8")
    constants = [dict(call.spec.constants) for call in segment.launches]
    steps = {op for row in constants for op in row.get("EPILOGUE", row.get("EXPRESSION"))}
    assert ("relu_int8_by" in {step[0] for step in steps}) == (scale * 127 < 6)
    feeds = {"x": 5 * rng.normal(size=(2, 16, 5, 6)).astype(np.float32)}
    outputs = gpu_interpreter.run(segment, feeds)
    for name, truth in int8_reference.run(case.model(), feeds).items():
        assert len(np.unique(truth)) > 4
        np.testing.assert_array_equal(outputs[name], truth, strict=True)


RECTIFY = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from toolkit.gpu.kernels.int8 import relu_int8

@triton.jit
def rectify(x, y):
    place = tl.arange(0, 512)
    tl.store(y + place, relu_int8(tl.load(x + place), 0.5))

source = ASTSource(fn=rectify, signature={"x": "*i32", "y": "*i8"}, constexprs={})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_integers_are_converted_before_they_are_rectified(tmp_path: Path) -> None:
    # In a process of its own: kernels of this one are interpreted.
    file = tmp_path / "rectify.py"
    file.write_text(RECTIFY)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    given = {**environment, "PYTHONPATH": root, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, file], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "mul.rn.sat.f32" in done.stdout
    assert "cvt.rn.f32.s32" in done.stdout
