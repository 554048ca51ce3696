"""Compiles kernels to cubins, in processes of their own, with a cache on disk.

Triton runs only in those processes (`toolkit.gpu.codegen.worker`): it takes a second to import, its
compiler can end a process, and a test may have it interpret kernels in this one.
"""

import hashlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from device.files import replacing
from toolkit.gpu.codegen.cuda_source import find_compiler
from toolkit.gpu.codegen.messages import Answer, Compiled, Request, read_message, write_message
from toolkit.gpu.errors import CompileError, NotCoveredError, not_covered
from toolkit.gpu.generations import source_files
from toolkit.gpu.ir.launch import KernelSpec, TunableOp
from toolkit.gpu.target import GpuTarget

Progress = Callable[[str, float], None]
"""Called with the step's name and the share of it that is done, 0 to 1."""

LONGEST_S = 60.0  # for one kernel; a few seconds are usual
_KERNELS = Path(__file__).parents[1] / "kernels"
_COMPILER = tuple(Path(__file__).with_name(name) for name in ("early_start.py", "worker.py"))
_CACHED = msgspec.msgpack.Decoder(Compiled)


def compile_ops(
    works: Sequence[TunableOp], gpu: GpuTarget, on_progress: Progress | None = None
) -> tuple[tuple[TunableOp, ...], Mapping[KernelSpec, Compiled]]:
    """Compile all tactics, and leave out those of which a kernel takes too long to compile.

    Raises as `compile_kernels`, and NotCoveredError for work that no tactic is left of.
    """
    specs = tuple(dict.fromkeys(c.spec for work in works for t in work.tactics for c in t))
    found = zip(specs, compile_kernels(specs, gpu, on_progress), strict=True)
    compiled = {spec: one for spec, one in found if one is not None}
    kept: list[TunableOp] = []
    reasons: dict[str, str] = {}
    for work in works:
        tactics = tuple(t for t in work.tactics if all(call.spec in compiled for call in t))
        kept.append(replace(work, tactics=tactics))
        if not tactics:
            slow = next(c.spec.title for c in work.tactics[0] if c.spec not in compiled)
            why = f"kernel {slow} for sm_{gpu.sm} takes longer than {LONGEST_S:.0f} s to compile"
            if not work.nodes:
                raise NotCoveredError(why)
            reasons |= dict.fromkeys(work.nodes, why)
    if reasons:
        raise not_covered(reasons)
    return tuple(kept), compiled


def compile_kernels(
    specs: Sequence[KernelSpec], gpu: GpuTarget, on_progress: Progress | None = None
) -> tuple[Compiled | None, ...]:
    """Compile kernels for a GPU, those not in the cache in as many processes as there are cores.

    None stands for one that takes longer than LONGEST_S.
    Raises CompileError: Triton is not installed, a kernel does not compile, or it takes more shared
    memory than a block of this GPU gets.
    """
    common = _common_key(gpu)
    paths = [_cache_path(spec, common) for spec in specs]
    found: dict[int, Compiled | None] = {
        at: one for at, path in enumerate(paths) if (one := _cached(path)) is not None
    }
    missing = [at for at in range(len(specs)) if at not in found]
    compiled = _compile_each([_request(specs[at], gpu) for at in missing])
    for done, (place, one) in enumerate(compiled, 1):
        at = missing[place]
        found[at] = one
        if one is not None:
            _keep(paths[at], one)
        if on_progress is not None:
            on_progress("compile", done / len(missing))
    for at, spec in enumerate(specs):
        if (one := found[at]) is not None:
            _check_shared(spec, one, gpu)
    return tuple(found[at] for at in range(len(specs)))


def has_compiler() -> bool:
    """Whether Triton is installed here."""
    return find_spec("triton") is not None


def cache_folder() -> Path:
    """Return where cubins are kept between builds."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tandem" / "kernels"


def _request(spec: KernelSpec, gpu: GpuTarget) -> Request:
    return Request(
        kernel=spec.kernel,
        signature=spec.signature,
        constants=dict(spec.constants),
        warps=spec.warps,
        stages=spec.stages,
        exact=spec.exact,
        sm=gpu.sm,
        source=spec.source,
    )


def _check_shared(spec: KernelSpec, compiled: Compiled, gpu: GpuTarget) -> None:
    if compiled.shared_bytes > gpu.shared_bytes:
        raise CompileError(
            f"kernel {spec.title} takes {compiled.shared_bytes} bytes of shared memory, a block "
            f"on sm_{gpu.sm} gets {gpu.shared_bytes}; its tile in "
            "toolkit/gpu/schedule/tiles.py is too large"
        )


def _compile_each(requests: Sequence[Request]) -> Iterator[tuple[int, Compiled | None]]:
    """Yield (position, compiled) as the workers finish; the first failure ends it."""
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
        # Leaves the pool before the workers: their last answers are awaited, the rest given up.
        stack.callback(pool.shutdown, cancel_futures=True)
        futures = {pool.submit(_ask, idle, start, one): at for at, one in enumerate(requests)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _worker(scratch: str) -> "subprocess.Popen[bytes]":
    """Start a worker; leaving its context closes its input, which ends it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # Line tables would put the paths of this machine into the cubins.
    environment |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": scratch}
    root = str(Path(__file__).parents[3])
    path = [root, *filter(None, [environment.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "toolkit.gpu.codegen.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment, "PYTHONPATH": os.pathsep.join(path)},
    )


def _ask(
    idle: "queue.SimpleQueue[subprocess.Popen[bytes]]", start: Callable[[], None], request: Request
) -> Compiled | None:
    """Have an idle worker compile; None where that takes too long: `start` then adds a worker."""
    worker = idle.get()
    late = threading.Event()

    def stop() -> None:
        late.set()
        worker.kill()

    watch = threading.Timer(LONGEST_S, stop)
    watch.start()
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        write_message(worker.stdin, request)
        answer = read_message(worker.stdout, Answer)
    except BrokenPipeError:
        answer = None
        with suppress(BrokenPipeError):
            worker.stdin.close()  # drops what the worker did not take
    watch.cancel()
    watch.join()  # from here on the worker is killed or stays
    if answer is None or late.is_set():
        start()
    else:
        idle.put(worker)
    if answer is None and late.is_set():
        return None
    if answer is None:
        raise CompileError(f"the compiler ended on kernel {request.title} for sm_{request.sm}")
    if answer.compiled is None:
        raise CompileError(
            f"kernel {request.title} does not compile for sm_{request.sm}: {answer.problem}"
        )
    return answer.compiled


def _common_key(gpu: GpuTarget) -> bytes:
    """Hash what all kernels of a build depend on: compiler, target and the kernels' source."""
    try:
        triton = version("triton")
    except PackageNotFoundError as error:
        raise CompileError(
            "Triton is not installed, so there are no GPU kernels; "
            "pip install 'tandem-edge[gpu-build]'"
        ) from error
    digest = hashlib.sha256(f"triton {triton} sm_{gpu.sm}".encode())
    for path in (*sorted(_KERNELS.glob("*.py")), *_COMPILER, *source_files()):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


def _cache_path(spec: KernelSpec, common: bytes) -> Path:
    compiler = ""
    if spec.source is not None and spec.source.in_cuda:
        found = find_compiler()
        compiler = found.version if found else "none"
    key = hashlib.sha256(common + f"{compiler} {spec!r}".encode()).hexdigest()
    return cache_folder() / key[:2] / f"{key}.kernel"


def _cached(path: Path) -> Compiled | None:
    """Return a kernel that was kept; what cannot be read counts as absent."""
    try:
        return _CACHED.decode(path.read_bytes())
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None


def _keep(path: Path, compiled: Compiled) -> None:
    """Keep a kernel; where the folder cannot be written the next build compiles it again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(msgspec.msgpack.encode(compiled))
