"""Compiles kernels to cubins in worker processes, with a cache on disk.

Triton runs only in the workers (`toolkit.gpu.codegen.worker`): it takes a second to import, its
compiler can end the process, and a test may interpret kernels in this one.
"""

import hashlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from device.install_advice import pip_install
from device.start.command import module_command
from toolkit.cache import key_of, read_entry, write_entry
from toolkit.gpu.codegen.cuda_source import find_compiler
from toolkit.gpu.codegen.messages import Answer, Compiled, Request, read_message, write_message
from toolkit.gpu.errors import CompileError, NotCoveredError, not_covered
from toolkit.gpu.ir.launch import KernelSpec, TunableOp
from toolkit.gpu.target import GpuTarget
from toolkit.progress import Progress

TIMEOUT_S = 60.0  # of one kernel on a core of its own; a few seconds are usual
_WATCH_S = 0.5  # between two looks at a worker
_END_S = 5.0  # in which a worker that closed its output ends
_KERNELS = Path(__file__).parents[1] / "kernels"
_COMPILER = tuple(
    Path(__file__).with_name(name) for name in ("cuda_source.py", "early_start.py", "worker.py")
)
_CACHED = msgspec.msgpack.Decoder(Compiled)


def compile_ops(
    ops: Sequence[TunableOp], gpu: GpuTarget, on_progress: Progress | None = None
) -> tuple[tuple[TunableOp, ...], Mapping[KernelSpec, Compiled]]:
    """Compile all tactics, and drop those with a kernel that takes too long to compile.

    Raises as `compile_kernels` does, and NotCoveredError: no tactic of an op remains.
    """
    specs = tuple(dict.fromkeys(launch.spec for op in ops for t in op.tactics for launch in t))
    cubins = zip(specs, compile_kernels(specs, gpu, on_progress), strict=True)
    compiled = {spec: kernel for spec, kernel in cubins if kernel is not None}
    compiled_ops: list[TunableOp] = []
    reasons: dict[str, str] = {}
    for op in ops:
        tactics = tuple(t for t in op.tactics if all(launch.spec in compiled for launch in t))
        compiled_ops.append(replace(op, tactics=tactics))
        if not tactics:
            slow = next(c.spec.title for c in op.tactics[0] if c.spec not in compiled)
            reason = f"kernel {slow} for sm_{gpu.sm} takes longer than {TIMEOUT_S:.0f} s to compile"
            if not op.nodes:
                raise NotCoveredError(reason)
            reasons |= dict.fromkeys(op.nodes, reason)
    if reasons:
        raise not_covered(reasons)
    return tuple(compiled_ops), compiled


def compile_kernels(
    specs: Sequence[KernelSpec], gpu: GpuTarget, on_progress: Progress | None = None
) -> tuple[Compiled | None, ...]:
    """Compile kernels for a GPU; those not in the cache in a process per core.

    None stands for a kernel that takes longer than TIMEOUT_S.
    Raises CompileError: Triton is not installed, a kernel does not compile, or it takes more shared
    memory than a block of this GPU has.
    """
    common = _common_key(gpu)
    keys = [_cache_key(spec, common) for spec in specs]
    kernels: list[Compiled | None] = [_cached(key) for key in keys]
    missing = [at for at, kernel in enumerate(kernels) if kernel is None]
    compiled = _compile_each([Request(specs[at], gpu.sm) for at in missing])
    for done, (request, kernel) in enumerate(compiled, 1):
        at = missing[request]
        kernels[at] = kernel
        if kernel is not None:
            write_entry("kernels", keys[at], msgspec.msgpack.encode(kernel))
        if on_progress is not None:
            on_progress("compile", done / len(missing))
    for spec, kernel in zip(specs, kernels, strict=True):
        if kernel is not None:
            _check_shared(spec, kernel, gpu)
    return tuple(kernels)


def _check_shared(spec: KernelSpec, compiled: Compiled, gpu: GpuTarget) -> None:
    if compiled.shared_bytes > gpu.shared_bytes:
        raise CompileError(
            f"kernel {spec.title} takes {compiled.shared_bytes} bytes of shared memory, a block "
            f"on sm_{gpu.sm} gets {gpu.shared_bytes}; its tile in "
            "toolkit/gpu/schedule/tiles.py is too large"
        )


def _compile_each(requests: Sequence[Request]) -> Iterator[tuple[int, Compiled | None]]:
    """Yield (index of the request, kernel) as workers finish; the first failure ends it."""
    count = min(os.cpu_count() or 1, len(requests))
    idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-kernels-"))
        workers = stack.enter_context(ExitStack())

        def start() -> None:
            idle.put(workers.enter_context(_worker(scratch)))

        for _ in range(count):
            start()
        pool = ThreadPoolExecutor(max(count, 1))
        # The pool is left before the workers: running requests are awaited, others cancelled.
        stack.callback(pool.shutdown, cancel_futures=True)
        futures = {
            pool.submit(_ask, idle, start, request): at for at, request in enumerate(requests)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()


def _worker(scratch: str) -> "subprocess.Popen[bytes]":
    """Start a worker; leaving its context closes its input, and it ends."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # Line tables would put the paths of this machine into the cubins.
    environment |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": scratch}
    # No pipe: it is read only if the worker ends. Leaving the worker's context closes it.
    stderr = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115
    worker = subprocess.Popen(
        module_command("toolkit.gpu.codegen.worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
    )
    worker.stderr = stderr
    return worker


def _how_it_ended(worker: "subprocess.Popen[bytes]") -> str:
    """Return the signal or exit status of a worker without an answer, and its last line."""
    try:
        status = worker.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "closed its output"
    how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
    if worker.stderr is None:
        return how
    worker.stderr.seek(0)
    lines = worker.stderr.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}, {last}" if last else how


def _timeout_s() -> float:
    """Return the timeout at the current load: a busy machine must not decide what has kernels."""
    return TIMEOUT_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _ask(
    idle: "queue.SimpleQueue[subprocess.Popen[bytes]]", start: Callable[[], None], request: Request
) -> Compiled | None:
    """Let an idle worker compile; None on a timeout: the worker is killed, and `start` adds one."""
    worker = idle.get()
    answered, timed_out = threading.Event(), threading.Event()
    began = time.monotonic()

    def watch() -> None:
        while not answered.wait(_WATCH_S):
            if time.monotonic() - began > _timeout_s():
                timed_out.set()
                worker.kill()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        write_message(worker.stdin, request)
        answer = read_message(worker.stdout, Answer)
    except BrokenPipeError:
        answer = None
        with suppress(BrokenPipeError):
            worker.stdin.close()  # drops what the worker did not read
    finally:
        answered.set()
        watcher.join()  # from here on the worker is either killed or idle
    if answer is None or timed_out.is_set():
        start()
    else:
        idle.put(worker)
    if answer is None and timed_out.is_set():
        return None
    if answer is None:
        raise CompileError(
            f"the compiler ended on kernel {request.title} for sm_{request.sm}: "
            + _how_it_ended(worker)
        )
    if answer.compiled is None:
        raise CompileError(
            f"kernel {request.title} does not compile for sm_{request.sm}: {answer.problem}"
        )
    return answer.compiled


def _common_key(gpu: GpuTarget) -> bytes:
    """Hash what all kernels of a build depend on: compiler, target and all kernel sources."""
    try:
        triton = version("triton")
    except PackageNotFoundError as error:
        raise CompileError(
            "Triton is not installed, so there are no GPU kernels; " + pip_install("gpu-build")
        ) from error
    digest = hashlib.sha256(f"triton {triton} sm_{gpu.sm}".encode())
    for path in (*sorted(_KERNELS.glob("*.py")), *_COMPILER):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


def _cache_key(spec: KernelSpec, common: bytes) -> str:
    compiler = ""
    if spec.source is not None and spec.source.in_cuda:
        cuda = find_compiler()
        compiler = cuda.version if cuda else "none"
    return key_of(common, f"{compiler} {spec!r}")


def _cached(key: str) -> Compiled | None:
    """Return a cached kernel; one that cannot be read counts as absent."""
    content = read_entry("kernels", key)
    try:
        return None if content is None else _CACHED.decode(content)
    except (UnicodeDecodeError, msgspec.DecodeError):
        return None
