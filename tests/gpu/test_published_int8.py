"""Published cases in which INT8 was slower than FP16, as Tandem's GPU engines have them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from gpu_graphs import Case, node, normal

from device.engine.cuda_manifest import Cuda
from toolkit.engine.build import build_planned, plan_engine
from toolkit.engine.options import BuildOptions
from toolkit.engine.target import choose_target
from toolkit.gpu.compile_segment import GpuSegment
from toolkit.gpu.lower import KernelProgram
from toolkit.progress import silent

pytest.importorskip("triton", reason="Triton is not installed")

SIZE = (1, 128, 56, 56)


def rounded(source: str, scale: str) -> tuple[list[onnx.NodeProto], str]:
    """Q and DQ of a tensor at a scale, and the name of what they give."""
    q, dq = f"{source}_{scale}_q", f"{source}_{scale}_dq"
    nodes = [
        node("QuantizeLinear", f"{source} {scale} zero", q),
        node("DequantizeLinear", f"{q} {scale} zero", dq),
    ]
    return nodes, dq


def two_branches(rng: np.random.Generator, *, quantized: bool) -> Case:
    """Two convolutions whose results a third reads joined, each rounded before the Concat."""
    nodes: list[onnx.NodeProto] = []

    def maybe_rounded(source: str, scale: str) -> str:
        if not quantized:
            return source
        pair, name = rounded(source, scale)
        nodes.extend(pair)
        return name

    x = maybe_rounded("x", "s_x")
    for branch in "ab":
        weight = maybe_rounded(f"w_{branch}", "s_w")
        nodes.append(node("Conv", f"{x} {weight}", branch, pads=[1] * 4))
    parts = [maybe_rounded(branch, f"s_{branch}") for branch in "ab"]
    nodes.append(node("Concat", " ".join(parts), "joined", axis=1))
    weight = maybe_rounded("w_y", "s_w")
    nodes.append(node("Conv", f"{maybe_rounded('joined', 's_a')} {weight}", "y", pads=[1] * 4))
    weights = {
        "w_a": normal(rng, 128, 128, 3, 3),
        "w_b": normal(rng, 128, 128, 3, 3),
        "w_y": normal(rng, 128, 256, 3, 3),
    }
    if quantized:
        scales = {"s_x": 0.03, "s_a": 0.04, "s_b": 0.02, "s_w": 0.001}
        weights |= {name: np.array(scale, np.float32) for name, scale in scales.items()}
        weights |= {"zero": np.array(0, np.int8)}
    return Case(nodes, {"x": SIZE}, weights)


def lowered(path: Path, options: BuildOptions) -> tuple[int, frozenset[str]]:
    """Return how many kernels a build launches, and which nodes stay in floating point.

    What stands for the compiler only keeps the programs.
    """
    programs: list[KernelProgram] = []

    def record(name: str, program: KernelProgram, **_: object) -> GpuSegment:
        programs.append(program)
        cuda = Cuda(
            sm=0, kernels=(), works=(), weights="", workspace_bytes=0, inputs=(), outputs=()
        )
        return GpuSegment(cuda, {}, (), program.workspace_bytes, program.largest_live_bytes)

    planned = plan_engine(path, choose_target("orin-nano-8gb"), options, silent)
    assert planned.backend is not None
    backend = replace(planned.backend, compiler=record)
    build_planned(planned.front, planned.shared, planned.ranges, backend)
    assert programs
    return sum(len(op.tactics[0]) for one in programs for op in one.ops), planned.front.keep_float


def test_q_before_concat_adds_no_kernel(tmp_path: Path, rng: np.random.Generator) -> None:
    """It costs TensorRT 30 % (NVIDIA/TensorRT#4366): parts with scales of their own are copied.

    Here the parts of a Concat that is INT8 share one range, and are written in place.
    """
    counts = {}
    for quantized in (False, True):
        path = tmp_path / f"{quantized}.onnx"
        onnx.save(two_branches(rng, quantized=quantized).model(), path)
        counts[quantized], in_float = lowered(path, BuildOptions())
        assert not in_float
    assert counts[True] == counts[False]
