"""Compiles CUDA C++ to cubins with nvcc or NVRTC, whichever this host has; no GPU is needed.

NVRTC is a library of 100 MB that comes with CUDA or alone from PyPI (nvidia-cuda-nvrtc-cu12). Its
functions: NVIDIA's "NVRTC" manual.
"""

import ctypes
import ctypes.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from toolkit.gpu.errors import CompileError
from toolkit.plugins import Constant

INSTALL_HINT = "install the CUDA toolkit, or pip install nvidia-cuda-nvrtc-cu12"


@dataclass(frozen=True, slots=True)
class CudaCompiler:
    """A compiler of this host; `version` with its name.

    `compile` takes the source file and options, and returns a cubin.
    """

    version: str
    compile: Callable[[Path, Sequence[str]], bytes]


def compile_source(file: Path, function: str, constants: Mapping[str, Constant], sm: int) -> bytes:
    """Compile a function of a file, with constants as macros, for one SM.

    Raises CompileError: there is no compiler, the source has an error, or no such function.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(f"this host has neither nvcc nor NVRTC; {INSTALL_HINT}")
    options = [f"-arch=sm_{sm}", *(f"-D{name}={_macro(v)}" for name, v in constants.items())]
    cubin = compiler.compile(file, options)
    if f".text.{function}\0".encode() not in cubin:
        raise CompileError(f'{file} holds no function extern "C" __global__ {function}')
    return cubin


def _macro(value: Constant) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (int, float, str)):
        return str(value)
    raise CompileError(f"the constant {value!r} is no number or text, which macros must be")


def nvcc() -> CudaCompiler | None:
    """Return nvcc of CUDA_HOME, PATH or /usr/local/cuda; None where there is none."""
    folders = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = [str(Path(home) / "bin") for home in folders]
    path += [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    tool = shutil.which("nvcc", path=os.pathsep.join(path))
    if tool is None:
        return None
    output = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"\bV(\d[\d.]*)", output)

    def compile_(file: Path, options: Sequence[str]) -> bytes:
        with tempfile.TemporaryDirectory(prefix="tandem-nvcc-") as folder:
            out = Path(folder) / "kernel.cubin"
            command = [tool, "-cubin", *options, "-o", str(out), str(file)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise CompileError(_first_error(result.stderr or result.stdout))
            return out.read_bytes()

    return CudaCompiler(f"nvcc {version[1] if version else 'of unknown version'}", compile_)


def nvrtc() -> CudaCompiler | None:
    """Return NVRTC from NVIDIA's packages, the system or the CUDA toolkit; None without it."""
    for path in _nvrtc_paths():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0:

            def compile_(
                file: Path, options: Sequence[str], library: ctypes.CDLL = library
            ) -> bytes:
                return _compile_with_nvrtc(library, file, options)

            return CudaCompiler(f"NVRTC {major.value}.{minor.value}", compile_)
    return None


def _nvrtc_paths() -> Iterator[str]:
    """Yield candidates for the library: NVIDIA's packages, the system, the CUDA toolkit."""
    packages = find_spec("nvidia")
    for folder in (packages.submodule_search_locations or ()) if packages else ():
        yield from map(str, sorted(Path(folder).glob("*/lib/libnvrtc.so.*")))
    system = ctypes.util.find_library("nvrtc")
    if system is not None:
        yield system
    yield "/usr/local/cuda/lib64/libnvrtc.so"


def _compile_with_nvrtc(library: ctypes.CDLL, file: Path, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    source, name = file.read_bytes(), file.name.encode()
    created = library.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    if created:
        raise CompileError(f"NVRTC does not take {file}: error {created}")
    try:
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), texts):
            log = _read(library, program, "ProgramLog").decode(errors="replace")
            raise CompileError(_first_error(log))
        return _read(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, data)
    return data.raw


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


COMPILERS: tuple[Callable[[], CudaCompiler | None], ...] = (nvcc, nvrtc)  # in order of preference


def find_compiler() -> CudaCompiler | None:
    """Return this host's CUDA C++ compiler, None where it has none."""
    return next((compiler for find in COMPILERS if (compiler := find()) is not None), None)
