"""A process that compiles kernels: requests come on its input, answers go to its output.

It runs Triton, which the rest of the toolkit does not import.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import cast

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from toolkit.gpu.call import Constant
from toolkit.gpu.compile_messages import Answer, Compiled, Request, read_message, write_message
from toolkit.gpu.cuda_source import compile_source
from toolkit.gpu.errors import CompileError
from toolkit.gpu.kernel_files import kernel_function

_WARP = 32  # threads


def compile_kernel(request: Request) -> Compiled:
    """Compile one kernel for one SM; no GPU is needed."""
    source = request.source
    if source is not None and hashlib.sha256(Path(source.file).read_bytes()).hexdigest() != (
        source.sha256
    ):
        raise CompileError("the file was changed during the build; build again")
    if source is not None and source.in_cuda:
        return _compile_cuda(request, Path(source.file))
    return _compile_triton(request)


def _compile_cuda(request: Request, file: Path) -> Compiled:
    constants = cast("dict[str, Constant]", request.constants)
    cubin = compile_source(file, request.kernel, constants, request.sm)
    registers, spilled = _resources(cubin)
    return Compiled(
        function=request.kernel,
        cubin=cubin,
        threads=request.warps * _WARP,
        shared_bytes=0,  # beside what the source declares
        registers=registers,
        spill_bytes=spilled,
    )


def _compile_triton(request: Request) -> Compiled:
    function = kernel_function(request.kernel, request.source)
    types = {name: kind.removesuffix(":16") for name, kind in request.signature}
    aligned = {name for name, kind in request.signature if kind.endswith(":16")}
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in function.arg_names},
        constexprs={name: _tuples(value) for name, value in request.constants.items()},
        attrs={
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(function.arg_names)
            if name in aligned
        },
    )
    options = {
        "num_warps": request.warps,
        "num_stages": request.stages,
        # A product and its sum in one rounding, as every GPU library does it.
        "enable_fp_fusion": not request.exact,
    }
    done = triton.compile(source, target=GPUTarget("cuda", request.sm, _WARP), options=options)
    cubin = done.asm["cubin"]
    registers, spilled = _resources(cubin)
    return Compiled(
        function=done.metadata.name,
        cubin=cubin,
        threads=done.metadata.num_warps * _WARP,
        shared_bytes=done.metadata.shared,
        registers=registers,
        spill_bytes=spilled,
    )


def _tuples(value: object) -> object:
    """Return what the message held, with its lists as the tuples that they were."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Return registers of a thread and its bytes of local memory, as cuobjdump reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    if found is None:
        return None, None
    return int(found[1]), int(found[2]) + int(found[3])


def _problem(error: BaseException) -> str:
    """Return what a compiler says: the last line of the innermost error, after the source."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def serve() -> None:
    """Answer requests until the input ends."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    while (request := read_message(sys.stdin.buffer, Request)) is not None:
        try:
            answer = Answer(compiled=compile_kernel(request))
        except Exception as error:  # noqa: BLE001  (a compiler raises what it likes; the build says it)
            answer = Answer(problem=_problem(error))
        write_message(answers, answer)


if __name__ == "__main__":
    serve()
