"""Kernels of sm_90 and later wait for the one before by themselves, before they touch memory."""

import gc
import re
import subprocess
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gpu_graphs import Case, convolution, ints, node, normal
from int8_graphs import Graph
from onnx import helper

from device.runtime.cuda.context import Stream
from device.runtime.cuda.driver import load_driver
from device.runtime.executors import cuda
from device.runtime.session import open_session
from scripts.gpu_engine import build_on_gpu
from toolkit.gpu.codegen.compile_kernels import compile_kernels
from toolkit.gpu.codegen.early_start import with_wait
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.errors import CompileError
from toolkit.gpu.ir.launch import KernelSpec
from toolkit.gpu.target import GpuTarget

SHAPE = (2, 8, 12, 12)
QUICK = ("gemm im2col", "gemm strided", "transpose_tiles")
WAIT = "ACQBULK"  # griddepcontrol.wait in SASS
# CUDA Binary Utilities, "Instruction Set Reference": what reads or writes memory that others see.
MEMORY = re.compile(r"(LDG|STG|LDGSTS|LD|ST|ATOM|ATOMG|RED|REDG|UBLKCP|UTMA\w*|CCTL)\b")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)")


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")


def one(op: str, *weights: np.ndarray, shape: tuple[int, ...] = SHAPE, **how: object) -> Case:
    """One node on x and weights."""
    named = {f"w{at}": value for at, value in enumerate(weights)}
    return Case([node(op, " ".join(["x", *named]), "y", **how)], {"x": shape}, named)


def cases(rng: np.random.Generator) -> list[Case]:
    """Graphs of a node or a few that reach the kernels."""
    vector = rng.normal(size=8).astype(np.float32)
    taps, volume = [2, 2], (1, 4, 6, 6, 6)
    pooled = helper.make_node(
        "MaxPool", ["x"], ["p", "i"], name="pool", kernel_shape=taps, strides=taps
    )
    unpooled = node("MaxUnpool", "p i", "y", kernel_shape=taps, strides=taps)
    largest = helper.make_node("TopK", ["x", "k"], ["y", "i"], name="largest", axis=1)
    resized = helper.make_node("Resize", ["x", "", "s"], ["y"], name="resized", mode="linear")
    heads = {"q": (1, 2, 32, 16), "k": (1, 2, 32, 16), "v": (1, 2, 32, 16)}
    attention = [
        node("Transpose", "k", "t", perm=[0, 1, 3, 2]),
        node("MatMul", "q t", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p v", "y"),
    ]
    grid = rng.uniform(-1, 1, (2, 5, 5, 2)).astype(np.float32)
    updates = rng.normal(size=(2, 8, 3, 12)).astype(np.float32)
    rows = np.broadcast_to(ints(4, 1, 7)[None, None, :, None], updates.shape).copy()
    regions = np.array([[1, 2, 6, 5]], np.float32)
    average = {"sampling_ratio": 2, "coordinate_transformation_mode": "half_pixel"}
    pooled_stem = [
        node("Relu", "c", "r"),
        node("MaxPool", "r", "y", kernel_shape=[3, 3], strides=taps),
    ]
    return [
        convolution(rng, SHAPE, 16, (3, 3), node("Relu", "c", "y")),
        convolution(rng, (1, 3, 32, 32), 16, (7, 7), *pooled_stem, strides=[2, 2]),
        convolution(rng, (1, 512, 4, 4), 16, (3, 3), pads=[1, 1, 1, 1]),
        convolution(rng, SHAPE, 8, (3, 3), group=8),
        one("MatMul", normal(rng, 32, 16), shape=(4, 32)),
        one("MaxPool", kernel_shape=taps),
        one("GlobalAveragePool"),
        one("Relu"),
        one("Transpose", perm=[0, 2, 3, 1]),
        one("Gather", ints(3, 1, 1), axis=1),
        one("ScatterElements", rows, updates, axis=2),
        one("Pad", ints(0, 0, 1, 2, 0, 0, 0, 1)),
        one("GridSample", grid),
        one("RoiAlign", regions, ints(0), **average),
        one("CumSum", np.array(3)),
        one("Softmax", axis=-1),
        one("LayerNormalization", rng.normal(size=12).astype(np.float32)),
        one("InstanceNormalization", vector, vector),
        one("LRN", size=3),
        one("Conv", normal(rng, 4, 4, 3, 3, 3), shape=volume),
        one("MaxPool", shape=volume, kernel_shape=[2, 2, 2]),
        Case([pooled, unpooled], {"x": SHAPE}, {}),
        Case(attention, heads, {}),
        one("ReduceMax", ints(1)),
        Case([node("ArgMax", "x", "y", axis=1)], {"x": SHAPE}, {}, dtypes={"y": "int64"}),
        Case([largest], {"x": SHAPE}, {"k": ints(3)}, outputs=("y", "i"), dtypes={"i": "int64"}),
        Case([resized], {"x": SHAPE}, {"s": np.array([1, 1, 2, 1.5], np.float32)}),
    ]


def short_product(rng: np.random.Generator) -> Case:
    """A product of INT8 with little depth."""
    graph = Graph(rng, {"x": (32, 64, 56, 56)})
    short = graph.rounded(graph.product("Conv", graph.rounded("x"), (256, 64, 1, 1)))
    return graph.case(graph.product("Conv", short, (8, 256, 1, 1)))


def kernels(rng: np.random.Generator, gpu: GpuTarget) -> dict[str, KernelSpec]:
    results: dict[str, KernelSpec] = {}
    programs = [case.lower("fp16", gpu) for case in cases(rng)]
    for program in (*programs, short_product(rng).lower("int8", gpu)):
        for call in (call for op in program.ops for tactic in op.tactics for call in tactic):
            results.setdefault(call.spec.title, call.spec)
    return results


def instructions(cubin: bytes, folder: Path) -> list[str]:
    """Its machine instructions in order, by the disassembler that comes with Triton."""
    spec = find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("Triton came without nvdisasm")
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    done = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True)
    return INSTRUCTION.findall(done.stdout)


def first(pattern: str, lines: list[str]) -> int:
    return next(at for at, name in enumerate(lines) if re.match(pattern, name))


@needs_compiler
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_kernel_waits_before_it_touches_memory_or_branches(
    names: tuple[str, ...], rng: np.random.Generator, tmp_path: Path
) -> None:
    gpu = GpuTarget(sm=90, sm_count=132)
    specs = kernels(rng, gpu)
    names = names or tuple(specs)
    chosen = [specs[name] for name in names]
    for name, compiled in zip(names, compile_kernels(chosen, gpu), strict=True):
        assert compiled is not None
        assert compiled.waits
        result = instructions(compiled.cubin, tmp_path)
        assert result.count(WAIT) == 1, name
        assert result.index(WAIT) < first(MEMORY.pattern, result), name
        assert result.index(WAIT) < first("BRA|BRX|EXIT|CALL", result), name


@needs_compiler
@pytest.mark.parametrize("sm", [72, 87])
def test_kernels_of_older_gpus_do_not_wait(
    sm: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    gpu = GpuTarget(sm, sm_count=8)
    specs = kernels(rng, gpu)
    for compiled in compile_kernels([specs[name] for name in QUICK], gpu):
        assert compiled is not None
        assert not compiled.waits  # read from its PTX
        if sm == 87:  # the disassembler reads nothing older
            assert WAIT not in instructions(compiled.cubin, tmp_path)


@pytest.mark.parametrize(
    ("ptx", "why"),
    [
        ("", "made 0 kernels"),
        (".visible .entry a()\n{\n}\n.visible .entry b()\n{\n}\n", "made 2 kernels"),
        (".visible .entry a();\n", "no body"),
    ],
)
def test_text_without_one_kernel_is_refused(ptx: str, why: str) -> None:
    with pytest.raises(CompileError, match=why):
        with_wait(ptx)


def chain(rng: np.random.Generator) -> Case:
    """Convolutions one after the other, on one picture: kernels that take a few microseconds."""
    nodes, weights = [], {}
    for at in range(16):
        read, output = f"t{at}" if at else "x", f"t{at + 1}" if at < 15 else "y"
        weights[f"w{at}"] = normal(rng, 64, 64, 3, 3) * np.float32(2**0.5)
        nodes += [
            node("Conv", f"{read} w{at}", f"c{at}", pads=[1, 1, 1, 1]),
            node("Relu", f"c{at}", output),
        ]
    return Case(nodes, {"x": (1, 64, 20, 20)}, weights)


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def engine(case: Case, folder: Path) -> Path:
    onnx.save(case.model(), folder / "m.onnx")
    path = folder / "m.engine"
    build_on_gpu(folder / "m.onnx", path, profile="h200", precision="fp16")
    return path


@pytest.mark.gpu
@needs_compiler
@pytest.mark.usefixtures("on_a_gpu")
def test_a_network_whose_kernels_start_early_gives_the_same_bits(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = chain(rng)
    path = engine(case, tmp_path)
    inputs = [case.feeds(rng) for _ in range(8)]
    with monkeypatch.context() as patch:
        patch.setattr(load_driver(), "starts_early", False)
        with open_session(path) as session:
            expected = [session.infer(feeds)["y"] for feeds in inputs]
    with open_session(path) as session:
        for run in range(400):
            actual = session.infer(inputs[run % 8])["y"]
            assert np.array_equal(actual, expected[run % 8]), run


@pytest.mark.gpu
@needs_compiler
@pytest.mark.usefixtures("on_a_gpu")
def test_a_session_collected_while_another_records_spoils_nothing(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, second = chain(rng), tmp_path / "other"
    second.mkdir()
    path, feeds = engine(case, tmp_path), case.feeds(rng)
    with open_session(path) as session:
        expected = session.infer(feeds)["y"]
    held = [open_session(engine(chain(rng), second))]  # its weights and kernels go with it
    launch, dropped = Stream.launch, []

    def collecting(self: Stream, *arguments: Any, **options: Any) -> None:
        launch(self, *arguments, **options)
        if held:
            dropped.append(weakref.ref(held[0].executors[0]))
            held.clear()
            gc.collect()

    monkeypatch.setattr(Stream, "launch", collecting)
    with open_session(path) as session:
        assert [one() for one in dropped] == [None]
        assert np.array_equal(session.infer(feeds)["y"], expected)
