"""The compiler without the folders of single GPU generations."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from gpu_graphs import Case, node, normal
from int8_graphs import Graph

import toolkit
from toolkit.gpu.generations import GENERATIONS, kernel_modules

ROOT = Path(toolkit.__file__).parent.parent
PACKAGES = ("toolkit", "device", "calibration", "configs")
LOWER = """
import sys
from importlib.util import find_spec
from pathlib import Path

import onnx_ir as ir

import toolkit
from toolkit.gpu.codegen.compile import compile_kernels
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.generations import kernel_modules
from toolkit.gpu.lower import lower_segment
from toolkit.gpu.target import GpuTarget

folder = Path(sys.argv[1])
assert Path(toolkit.__file__).is_relative_to(folder)
assert find_spec("toolkit.gpu.sm90") is None and not kernel_modules()
for sm in (90, 87):
    for precision in ("fp16", "int8"):
        segment = ir.load(folder / f"{precision}.onnx")
        gpu = GpuTarget(sm, sm_count=2)
        program = lower_segment(segment, gpu=gpu, precision=precision)
        specs = list(dict.fromkeys(launch.spec for launch in program.launches))
        print(sm, precision, *sorted({spec.title for spec in specs}))
        if has_compiler():
            assert compile_kernels(specs[-1:], gpu)[0].cubin
"""


def float_network(rng: np.random.Generator) -> Case:
    """A first convolution with max pooling, and a 1x1 convolution."""
    return Case(
        (
            node("Conv", "x w0", "a", strides=[2, 2], pads=[1, 1, 1, 1]),
            node("Relu", "a", "b"),
            node("MaxPool", "b", "c", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
            node("Conv", "c w1", "d"),
            node("Conv", "d w2", "y", pads=[1, 1, 1, 1]),
        ),
        {"x": (1, 3, 32, 32)},
        {"w0": normal(rng, 16, 3, 3, 3), "w1": normal(rng, 32, 16, 1, 1)}
        | {"w2": normal(rng, 16, 32, 3, 3)},
    )


def int8_network(rng: np.random.Generator) -> Case:
    """Products that schedules of sm_90 compute where they can."""
    graph = Graph(rng, {"x": (1, 64, 16, 16)})
    x = graph.rounded("x")
    for filters, channels, taps in ((128, 64, 1), (64, 128, 1), (64, 64, 3)):
        shape = (filters, channels, taps, taps)
        y = graph.product("Conv", x, shape, bias="int32", pads=[taps // 2] * 4)
        x = graph.rounded(graph.add("Relu", y), np.float32(0.03))
    return graph.case(x)


def test_the_compiler_works_without_a_generation(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for precision, case in (("fp16", float_network(rng)), ("int8", int8_network(rng))):
        segment = case.segment()
        ir.save(segment.model, tmp_path / f"{precision}.onnx")
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for generation in GENERATIONS:
        shutil.rmtree(tmp_path.joinpath(*generation.split(".")))
    done = subprocess.run(
        [sys.executable, "-c", LOWER, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert "gemm im2col" in done.stdout


@pytest.mark.parametrize("kernel", ["row_panel_gemm", "persistent_conv"])
def test_kernels_of_a_generation_are_found(kernel: str) -> None:
    assert kernel_modules()[kernel].startswith("toolkit.gpu.sm90.kernels.")
