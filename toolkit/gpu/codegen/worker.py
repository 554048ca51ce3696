"""A process that compiles kernels: requests on standard input, answers on standard output.

It runs Triton, which the rest of the toolkit does not import.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource

from device.start.stdout import take_stdout
from toolkit.gpu.codegen.cuda_source import compile_source
from toolkit.gpu.codegen.early_start import can_wait, waits, with_wait
from toolkit.gpu.codegen.messages import Answer, Compiled, Request, read_message, write_message
from toolkit.gpu.errors import CompileError
from toolkit.gpu.ir.launch import KERNELS, KernelSource
from toolkit.gpu.target import WARP
from toolkit.plugins.load import load_module

_Stage = Callable[[object, object], object]  # (what the stage before made, metadata)


def compile_kernel(request: Request) -> Compiled:
    """Compile one kernel for one SM; no GPU is needed."""
    source = request.spec.source
    if source is not None and hashlib.sha256(Path(source.file).read_bytes()).hexdigest() != (
        source.sha256
    ):
        raise CompileError("the file was changed during the build; build again")
    if source is not None and source.in_cuda:
        return _compile_cuda(request, Path(source.file))
    return _compile_triton(request)


def kernel_function(kernel: str, source: KernelSource | None) -> Any:  # noqa: ANN401  (Triton's)
    """Return a Triton kernel. Raises AttributeError: a plugin's file does not define it."""
    if source is None:
        return getattr(import_module(f"toolkit.gpu.kernels.{KERNELS[kernel]}"), kernel)
    return getattr(load_module(Path(source.file)), kernel)


def _compile_cuda(request: Request, file: Path) -> Compiled:
    spec = request.spec
    cubin = compile_source(file, spec.kernel, dict(spec.constants), request.sm)
    registers, spilled = _resources(cubin)
    return Compiled(
        function=spec.kernel,
        cubin=cubin,
        parameters=tuple(name for name, _ in spec.signature),
        threads=spec.warps * WARP,
        shared_bytes=0,  # beyond what the source declares
        registers=registers,
        spill_bytes=spilled,
    )


def _compile_triton(request: Request) -> Compiled:
    spec = request.spec
    function, named = kernel_function(spec.kernel, spec.source), dict(spec.constants)
    types = {name: kind.removesuffix(":16") for name, kind in spec.signature}
    aligned = {name for name, kind in spec.signature if kind.endswith(":16")}
    paths = {name: _path(name, function.arg_names) for name in types}
    signature: dict[str, object] = {}
    constants: dict[tuple[int, ...], object] = {}
    for at, name in enumerate(function.arg_names):
        value = named.get(name)
        members = {path[1:]: types[parameter] for parameter, path in paths.items() if path[0] == at}
        signature[name] = _kinds(value, members)
        if name in named:
            constants |= _fixed((at,), value, signature[name])
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=constants,
        attrs={paths[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {
        "num_warps": spec.warps,
        "num_stages": spec.stages,
        # Fused multiply-add, as in every GPU library.
        "enable_fp_fusion": not spec.exact,
    }
    with knobs.runtime.scope():
        if can_wait(request.sm):
            knobs.runtime.add_stages_inspection_hook = _waiting_stages
        elif spec.source is None and types.get("a") == "*i8":
            knobs.runtime.add_stages_inspection_hook = _stages_of_bytes
        kernel = triton.compile(source, target=GPUTarget("cuda", request.sm, WARP), options=options)
    cubin = kernel.asm["cubin"]
    registers, spilled = _resources(cubin)
    return Compiled(
        function=kernel.metadata.name,
        cubin=cubin,
        parameters=tuple(sorted(paths, key=paths.__getitem__)),
        threads=kernel.metadata.num_warps * WARP,
        shared_bytes=kernel.metadata.shared,
        registers=registers,
        spill_bytes=spilled,
        waits=waits(kernel.asm["ptx"]),
    )


def _waiting_stages(
    _backend: object = None, stages: dict[str, _Stage] | None = None, *_: object
) -> tuple[str, str]:
    """Extend Triton's stage from LLVM to PTX; without stages, return a name for the cache."""
    if stages is not None:
        compile_ptx = stages["ptx"]
        stages["ptx"] = lambda source, metadata: with_wait(str(compile_ptx(source, metadata)))
    return "wait", "wait"


def _stages_of_bytes(
    _backend: object = None, stages: dict[str, _Stage] | None = None, *_: object
) -> tuple[str, str]:
    """Change Triton's stage to blocks of threads, of products of INT8 with mma.sync.

    Triton prefetches operands on sm_8x alone.
    """
    if stages is not None:
        compile_blocks = stages["ttgir"]
        stages["ttgir"] = lambda *arguments: _without_prefetch(compile_blocks, *arguments)
    return "bytes", "bytes"


def _without_prefetch(compile_blocks: _Stage, source: object, metadata: object) -> object:
    """Compile without the pass that loads the first operands of a step in the step before.

    Between steps they are bytes: 32 products take 172 PRMT. FP16 gains by the pass.
    """
    passes = compiler.passes.ttgpuir
    add_prefetch = getattr(passes, "add_prefetch", None)
    if add_prefetch is None:  # a later Triton may have no such pass
        return compile_blocks(source, metadata)
    passes.add_prefetch = lambda _: None
    try:
        return compile_blocks(source, metadata)
    finally:
        passes.add_prefetch = add_prefetch


def _path(name: str, parameters: list[str]) -> tuple[int, ...]:
    """Return the index of a parameter; for a member of a tuple also the indices in it."""
    first, *members = name.split(".")
    return (parameters.index(first), *map(int, members))


def _kinds(value: object, members: Mapping[tuple[int, ...], str]) -> object:
    """Return Triton's type of a parameter; a tuple where members of it are run-time parameters."""
    if () in members:
        return members[()]
    if not members or not isinstance(value, tuple):
        return "constexpr"
    return tuple(
        _kinds(member, {path[1:]: kind for path, kind in members.items() if path[0] == at})
        for at, member in enumerate(value)
    )


def _fixed(path: tuple[int, ...], value: object, kind: object) -> dict[tuple[int, ...], object]:
    """Return the compile-time values of a parameter, by path."""
    if kind == "constexpr":
        return {path: value}
    constants: dict[tuple[int, ...], object] = {}
    if isinstance(kind, tuple) and isinstance(value, tuple):
        for at, (member, inner) in enumerate(zip(value, kind, strict=True)):
            constants |= _fixed((*path, at), member, inner)
    return constants


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Return a thread's registers and bytes of local memory, by cuobjdump; None without it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    if usage is None:
        return None, None
    return int(usage[1]), int(usage[2]) + int(usage[3])


def _problem(error: BaseException) -> str:
    """Return the last line of the innermost error: the compiler's message, after the source.

    Of the assembler's errors the first one: the last lines say how to run it again.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    if (assembler := re.search(r"; error\s*: (.+)", str(error))) is not None:
        return assembler[1]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def serve() -> None:
    """Answer requests until the input ends."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(take_stdout(), "wb")  # keeps prints of compilers out of the answers
    while (request := read_message(sys.stdin.buffer, Request)) is not None:
        try:
            answer = Answer(compiled=compile_kernel(request))
        except Exception as error:  # noqa: BLE001  (a compiler raises what it likes; the build says it)
            answer = Answer(problem=_problem(error))
        write_message(answers, answer)


if __name__ == "__main__":
    serve()
