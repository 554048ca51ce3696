"""Kernels are compiled for other machines' GPUs, once, and the same way each time."""

import hashlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import pytest
from gpu_graphs import ORIN, Case, convolution, node, normal
from int8_graphs import Graph
from model_fixtures import small_convnet

import toolkit.gpu.codegen.compile_kernels as compiling
from toolkit.cache import entries, read_entry, write_entry
from toolkit.gpu.codegen.compile_kernels import compile_kernels, compile_ops
from toolkit.gpu.codegen.messages import Answer, Compiled, read_message
from toolkit.gpu.codegen.triton_version import OLDEST_TRITON, check_compiler, has_compiler
from toolkit.gpu.compile_segment import GpuSegment, compile_segment
from toolkit.gpu.errors import CompileError, NotCoveredError
from toolkit.gpu.ir.launch import KernelLaunch, KernelSource, KernelSpec, TunableOp
from toolkit.gpu.lower import lower_segment
from toolkit.gpu.target import GpuTarget, sm_limits

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small(rng: np.random.Generator) -> Case:
    return convolution(rng, (1, 8, 8, 8), 16, (3, 3), node("Relu", "c", "y"))


def light() -> Case:
    """Two kernels that compile in a moment."""
    nodes = [node("Relu", "x", "r"), node("Softmax", "r", "y", axis=-1)]
    return Case(nodes, {"x": (4, 24)}, {})


def compile_case(case: Case, gpu: GpuTarget = ORIN) -> GpuSegment:
    piece = case.segment()
    program = lower_segment(piece.model, gpu=gpu, precision="fp16")
    return compile_segment(piece.name, program, gpu=gpu)


def content(segment: GpuSegment) -> Mapping[str, bytes]:
    return {name: array.tobytes() for name, array in segment.entries.items()}


@pytest.mark.parametrize("version", ["3.8.0", "3.8.0rc1", "3.10", "4.0.0+git1", "", "main"])
def test_a_triton_from_the_bound_on_is_taken(version: str) -> None:
    check_compiler(version)


@pytest.mark.parametrize("version", ["3.7.1", "3.6.0", "2.99", "3"])
def test_a_triton_that_is_too_old_is_named(version: str) -> None:
    with pytest.raises(CompileError, match=r"Triton [\d.]+ is too old: 3\.8 or newer"):
        check_compiler(version)


def test_the_oldest_triton_is_the_bound_of_the_extra() -> None:
    oldest = ".".join(map(str, OLDEST_TRITON))
    assert f'"triton>={oldest}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_a_build_begins_with_the_version_of_triton_that_is_too_old(tmp_path: Path) -> None:
    """scripts/test_oldest.sh runs this with Triton 3.6, which else is a package that says so."""
    if not has_compiler() or version("triton") >= "3.8":
        about = tmp_path / "triton-3.6.0.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.6.0\n")
        (tmp_path / "triton.py").write_text("")
    model = small_convnet(tmp_path / "net.onnx", np.random.default_rng(0))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("build", str(model), "--profile", "orin-nx-16gb", "-o", str(tmp_path / "m.engine"))
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.cli", *words],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Triton 3.6 is too old: 3.8 or newer" in done.stderr
    assert "AttributeError" not in done.stderr


@needs_compiler
def test_a_board_s_cubins_are_made_here_without_a_gpu(rng: np.random.Generator) -> None:
    segment = compile_case(small(rng))
    cubins = [data for name, data in content(segment).items() if name.endswith(".cubin")]
    assert len(cubins) == len(segment.implementation.kernels) >= 3
    for cubin in cubins:
        assert cubin.startswith(b"\x7fELF")
        assert b"toolkit/gpu" not in cubin  # no path of this machine
    for kernel in segment.implementation.kernels:
        assert kernel.registers is None or 0 < kernel.registers <= 255
        assert kernel.spill_bytes in (None, 0)


@needs_compiler
@pytest.mark.usefixtures("own_cache")
def test_a_second_build_compiles_nothing_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = light()
    first = compile_case(case)
    assert len(first.implementation.kernels) == 2

    def refuse(_: str) -> None:
        raise AssertionError("a worker was started")

    with monkeypatch.context() as patch:
        patch.setattr(compiling, "_worker", refuse)
        assert content(compile_case(case)) == content(first)
    names = [kernel.function.encode() for kernel in first.implementation.kernels]
    for number, entry in enumerate(entries()):
        cached = read_entry("kernels", entry.key) or b""
        name = next(name for name in names if name in cached)
        if number % 2:
            write_entry("kernels", entry.key, cached.replace(name, b"\xff" * len(name)))
        else:
            damaged = bytearray(entry.path.read_bytes())
            damaged[len(damaged) // 2] ^= 1
            entry.path.write_bytes(damaged)
    assert content(compile_case(case)) == content(first)  # what cannot be read is compiled anew
    assert "of the cache is damaged and is made again" in caplog.text
    (tmp_path / "file").touch()  # a cache that cannot be written stops no build
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert content(compile_case(case)) == content(first)


@needs_compiler
def test_a_kernel_that_does_not_compile_is_named() -> None:
    spec = KernelSpec(
        "softmax",
        (("x", "*fp16"), ("y", "*fp16")),
        (("BLOCK", 3), ("COLUMNS", 3)),  # no power of two
        warps=4,
        stages=1,
    )
    with pytest.raises(CompileError, match="softmax does not compile for sm_87"):
        compile_kernels([spec], ORIN)


@needs_compiler
def test_what_the_assembler_refuses_is_said(tmp_path: Path) -> None:
    """The first error: the last line is the command that runs the assembler again."""
    file = tmp_path / "new.py"
    file.write_text(
        "import triton\nimport triton.language as tl\n\n@triton.jit\ndef new(x, y):\n"
        "    asm: tl.constexpr = 'tanh.approx.f32 $0, $1;'\n"
        "    a = tl.load(x)\n"
        "    b = tl.inline_asm_elementwise(asm, '=f,f', [a], tl.float32, is_pure=True, pack=1)\n"
        "    tl.store(y, b)\n"
    )
    source = KernelSource("New", str(file), hashlib.sha256(file.read_bytes()).hexdigest())
    spec = KernelSpec("new", (("x", "*fp32"), ("y", "*fp32")), (), 4, 1, source=source)
    with pytest.raises(CompileError, match=r"for sm_72: Feature 'tanh' requires .* sm_75"):
        compile_kernels([spec], GpuTarget(72, 1))


@needs_compiler
def test_shared_memory_beyond_the_gpu_s_is_refused(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(sm_limits(87), block_shared_bytes=1024)
    monkeypatch.setattr("toolkit.gpu.target.sm_limits", lambda _: limits)
    specs = {call.spec for call in small(rng).lower("fp16").launches}
    with pytest.raises(CompileError, match="gets 1024"):
        compile_kernels(tuple(specs), ORIN)


@pytest.mark.parametrize(("sm", "limit"), [(72, 96 * 1024), (87, 163 * 1024), (110, 227 * 1024)])
def test_a_block_s_shared_memory_ends_at_the_limit_of_its_sm(sm: int, limit: int) -> None:
    spec = KernelSpec("softmax", (), (), 4, 1)
    gpu = GpuTarget(sm, 8)
    compiling._check_shared(spec, fake(shared_bytes=limit), gpu)
    with pytest.raises(CompileError, match=f"takes {limit + 1} bytes .* gets {limit}"):
        compiling._check_shared(spec, fake(shared_bytes=limit + 1), gpu)


def fake(**fields: object) -> Compiled:
    one = Compiled(
        function="f",
        cubin=b"",
        threads=128,
        shared_bytes=0,
        registers=None,
        spill_bytes=None,
        parameters=(),
    )
    return msgspec.structs.replace(one, **fields)


def test_a_host_without_triton_says_what_to_install(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(_: str) -> str:
        raise compiling.PackageNotFoundError

    monkeypatch.setattr(compiling, "version", absent)
    with pytest.raises(CompileError, match="gpu-build"):
        compile_case(small(rng))


@needs_compiler
@pytest.mark.parametrize(
    "sm", [pytest.param(72, marks=pytest.mark.slow), 87, pytest.param(110, marks=pytest.mark.slow)]
)
def test_no_board_s_convolution_spills_registers(sm: int, rng: np.random.Generator) -> None:
    case = convolution(rng, (1, 64, 28, 28), 64, (3, 3), pads=[1, 1, 1, 1])
    kernels = compile_case(case, GpuTarget(sm, 8)).implementation.kernels
    assert [kernel.spill_bytes for kernel in kernels if kernel.spill_bytes] == []


@needs_compiler
def test_products_and_pools_with_nothing_behind_them_compile(rng: np.random.Generator) -> None:
    """Their results are FP16, as another product reads them."""
    weights = {"w": normal(rng, 16, 16, 1, 1), "d": normal(rng, 16, 1, 3, 3)}
    nodes = [
        node("Conv", "x w", "a"),
        node("Conv", "a d", "b", group=16, pads=[1, 1, 1, 1]),
        node("AveragePool", "b", "c", kernel_shape=[2, 2]),
        node("Conv", "c w", "y"),
    ]
    case = Case(nodes, {"x": (1, 16, 12, 12)}, weights)
    gpu = GpuTarget(87, 8)
    specs = [op.tactics[0][0].spec for op in case.lower("fp16", gpu).ops]
    assert {"gemm", "depthwise", "pool"} <= {spec.title.split()[0] for spec in specs}
    assert None not in compile_kernels(specs, gpu)


@needs_compiler
@pytest.mark.parametrize("tiles", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_a_convolution_with_a_residual_stays_in_registers(
    tiles: int | None, rng: np.random.Generator
) -> None:
    nodes = [node("Add", "c r", "a"), node("Relu", "a", "y")]
    case = convolution(rng, (8, 128, 28, 28), 256, (3, 3), *nodes, pads=[1, 1, 1, 1])
    case = replace(case, inputs={**case.inputs, "r": (8, 256, 28, 28)})
    gpu = GpuTarget(87, 16)
    launches = [call for op in case.lower("fp16", gpu).ops for t in op.tactics for call in t]
    specs = {call.spec for call in launches if call.spec.title.startswith("gemm")}
    assert len(specs) > 1
    kernels = compile_kernels(sorted(specs, key=str)[:tiles], gpu)
    assert [one.spill_bytes for one in kernels if one is not None and one.spill_bytes] == []


@needs_compiler
@pytest.mark.parametrize(
    ("stride", "sm"),
    [
        (1, 87),
        *(
            pytest.param(stride, sm, marks=pytest.mark.slow)
            for stride, sm in ((1, 90), (2, 87), (2, 90))
        ),
    ],
)
def test_depthwise_windows_of_int8_stay_in_registers(
    sm: int, stride: int, rng: np.random.Generator
) -> None:
    gpu = GpuTarget(sm, 8)
    graph = Graph(rng, {"x": (32, 96, 28, 28)})
    window: dict[str, object] = {"group": 96, "pads": [2] * 4, "strides": [stride] * 2}
    y = graph.product("Conv", graph.rounded("x"), (96, 1, 5, 5), bias="int32", **window)
    segment = graph.case(graph.rounded(graph.add("Sigmoid", y))).lower("int8", gpu)
    specs = {call.spec for call in segment.launches if call.spec.title == "depthwise_int8"}
    assert specs
    kernels = compile_kernels(sorted(specs, key=str), gpu)
    assert [one.spill_bytes for one in kernels if one is not None and one.spill_bytes] == []


SLOW_COMPILER = """
import sys, time
from toolkit.gpu.codegen.messages import Answer, Compiled, Request, read_message, write_message

while (request := read_message(sys.stdin.buffer, Request)) is not None:
    if request.spec.kernel == "broken":
        sys.exit(1)
    time.sleep(600 if request.spec.kernel == "slow" else 0)
    kernel = Compiled(function=request.spec.kernel, cubin=b"", parameters=(), threads=32,
                      shared_bytes=0, registers=None, spill_bytes=None)
    write_message(sys.stdout.buffer, Answer(compiled=kernel))
"""


@pytest.fixture
def slow_compiler(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that need no Triton, never end with a kernel "slow" and die of one "broken"."""

    def start(_: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", SLOW_COMPILER]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(compiling, "_worker", start)
    monkeypatch.setattr(compiling, "version", lambda name: "some")
    monkeypatch.setattr(compiling, "TIMEOUT_S", 1.5)


def op(node: str, *tactics: tuple[str, ...]) -> TunableOp:
    def call(kernel: str) -> KernelLaunch:
        spec = KernelSpec(kernel, (), (("NODE", node),), warps=1, stages=1)
        return KernelLaunch(spec, (1, 1, 1), (), (), ())

    return TunableOp((node,), tuple(tuple(call(name) for name in tactic) for tactic in tactics))


@pytest.mark.usefixtures("slow_compiler")
def test_a_tactic_that_compiles_for_ever_is_left_out() -> None:
    ops = [op("a", ("fast", "slow"), ("fast",), ("other",)), op("b", ("fast",))]
    compiled_ops, compiled = compile_ops(ops, ORIN)
    assert [[[call.spec.title for call in t] for t in one.tactics] for one in compiled_ops] == [
        [["fast"], ["other"]],
        [["fast"]],
    ]
    assert sorted(spec.kernel for spec in compiled) == ["fast", "fast", "other"]


@pytest.mark.usefixtures("slow_compiler")
@pytest.mark.parametrize(("load", "timeout_s"), [(0.0, 1.5), (4.0, 1.5), (8.0, 3.0), (80.0, 30.0)])
def test_a_busy_machine_gives_a_kernel_more_time(
    load: float, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.gpu.codegen.compile_kernels.os.cpu_count", lambda: 4)
    monkeypatch.setattr(
        "toolkit.gpu.codegen.compile_kernels.os.getloadavg", lambda: (load, 0.0, 0.0)
    )
    assert compiling._timeout_s() == timeout_s


@pytest.mark.usefixtures("slow_compiler")
def test_a_compiler_stopped_as_it_answers_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_late(stream: IO[bytes], kind: type[Answer]) -> Answer | None:
        """The time is over between the answer and its being read."""
        answer = read_message(stream, kind)
        monkeypatch.setattr(compiling, "TIMEOUT_S", 0.0)
        time.sleep(0.2)
        monkeypatch.setattr(compiling, "TIMEOUT_S", 60.0)
        return answer

    monkeypatch.setattr(compiling, "_WATCH_S", 0.02)
    monkeypatch.setattr(compiling, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(compiling, "read_message", read_late)
    monkeypatch.setattr("toolkit.gpu.codegen.compile_kernels.os.cpu_count", lambda: 1)
    compiled_ops, compiled = compile_ops([op("a", ("first",)), op("b", ("second",))], ORIN)
    assert [len(one.tactics) for one in compiled_ops] == [1, 1]
    assert sorted(spec.kernel for spec in compiled) == ["first", "second"]


@pytest.mark.usefixtures("slow_compiler")
def test_a_compiler_that_ends_names_the_kernel_it_ended_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.gpu.codegen.compile_kernels.os.cpu_count", lambda: 1)
    ops = [op(name, (name,)) for name in ("first", "broken", "third", "fourth")]
    with pytest.raises(CompileError, match="ended on kernel broken for sm_87"):
        compile_ops(ops, ORIN)


@pytest.mark.usefixtures("slow_compiler")
def test_a_compiler_that_does_not_start_is_an_error_of_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(_: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", ""]
        ended = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ended.wait()
        return ended

    monkeypatch.setattr(compiling, "_worker", end)
    with pytest.raises(CompileError, match="ended on kernel fast for sm_87: exit status 0"):
        compile_ops([op("a", ("fast",))], ORIN)


def test_a_triton_that_does_not_load_is_an_error_with_its_reason(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('its library is not there')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reason = "sm_87: exit status 1, ImportError: its library is not there"
    with pytest.raises(CompileError, match=reason):
        compile_ops([op("a", ("gemm",))], ORIN)


def test_a_compiler_that_crashes_is_named_by_its_signal(
    slow_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"

    def crash(_: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", code]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(compiling, "_worker", crash)
    with pytest.raises(CompileError, match="ended on kernel fast for sm_87: SIGSEGV"):
        compile_ops([op("a", ("fast",))], ORIN)


@pytest.mark.usefixtures("slow_compiler")
def test_an_operation_that_compiles_for_ever_names_its_nodes() -> None:
    ops = [op("a", ("fast",)), op("b", ("slow",)), op("c", ("other",))]
    with pytest.raises(NotCoveredError, match="kernel slow for sm_87 takes longer than 2 s") as e:
        compile_ops(ops, ORIN)
    assert list(e.value.reasons) == ["b"]


@needs_compiler
@pytest.mark.parametrize("sm", [87, 90])
def test_two_floats_become_bytes_in_one_instruction(
    sm: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    """No other conversion: before CUDA 13.4 ptxas makes 255 of the last byte of a sum, by one."""
    graph = Graph(rng, {"x": (4, 96, 14, 14)})
    case = graph.case(graph.product("Conv", graph.rounded("x"), (16, 96, 1, 1)))
    gpu = GpuTarget(sm, 8)
    launches = case.lower("int8", gpu).launches
    specs = [call.spec for call in launches if call.spec.title == "transpose_tiles"]
    assert ("y", "*i8:16") in specs[0].signature
    (compiled, *_) = compile_kernels(specs, gpu)
    assert compiled is not None
    code = set(instructions(compiled, tmp_path))
    assert "STS.U8" in code
    assert {one for one in code if one.startswith("F2I")} == {"F2IP.S8.F32.NTZ"}


@needs_compiler
@pytest.mark.parametrize("sm", [53, pytest.param(62, marks=pytest.mark.slow)])
def test_int8_compiles_for_gpus_without_its_instructions(sm: int, rng: np.random.Generator) -> None:
    """The GPU of Jetson Nano has no `dp4a`, and those of Nano and TX2 no `cvt.pack`."""
    graph = Graph(rng, {"x": (1, 16, 8, 8)})
    wide = graph.rounded(graph.product("Conv", graph.rounded("x"), (32, 16, 1, 1)))
    alone = graph.product("Conv", wide, (32, 1, 3, 3), group=32, pads=[1] * 4)
    mean = graph.rounded(graph.add("GlobalAveragePool", graph.rounded(alone)))
    program = graph.case(mean).lower("int8", GpuTarget(sm, 1))
    titles = {launch.spec.title for launch in program.launches}
    assert {"depthwise_int8", "global_average_pool", "transpose_tiles"} <= titles
    specs = [launch.spec for op in program.ops for tactic in op.tactics for launch in tactic]
    assert None not in compile_kernels(specs, GpuTarget(sm, 1))


def instructions(compiled: Compiled, tmp_path: Path) -> list[str]:
    """Return the instructions of a kernel without their operands."""
    from triton import knobs

    path = tmp_path / "k.cubin"
    path.write_bytes(compiled.cubin)
    command = [knobs.nvidia.nvdisasm.path, "-c", path]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z][\w.]*)", sass)


@needs_compiler
@pytest.mark.parametrize(("channels", "taps"), [(64, 3), (256, 1)])
def test_products_of_int8_take_no_bytes_apart(
    channels: int, taps: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    """With mma.sync: to part bytes and join them again took longer than the products."""
    graph = Graph(rng, {"x": (8, channels, 28, 28)})
    shape, pads = (128, channels, taps, taps), [taps // 2] * 4
    y = graph.product("Conv", graph.rounded("x"), shape, bias="int32", pads=pads)
    case = graph.case(graph.rounded(graph.add("Relu", y)))
    specs = [call.spec for call in case.lower("int8", GpuTarget(87, 14)).launches]
    (spec,) = [spec for spec in specs if spec.kernel == "gemm"]
    (compiled,) = compile_kernels([spec], ORIN)
    assert compiled is not None
    assert compiled.spill_bytes == 0
    code = instructions(compiled, tmp_path)
    count = Counter(one.split(".")[0] for one in code)
    assert count["IMMA"] >= 32
    assert count["LDSM"] * 4 >= count["IMMA"]
    assert count["PRMT"] < 96  # half of the results of a thread, which they join; 250 before
    assert {"LDGSTS.E.BYPASS.128", "STG.E.128"} <= set(code)
    assert not {"LDS.U8", "LDS.S8", "STG.E.U8"} & set(code)
