"""Tasks on the workers of any `concurrent.futures.Executor`; what is lost is run again.

Arguments and results are plain values. A worker with other code, or that cannot do a task, refuses
it by its name; whichever result of a task comes first counts, and counts once.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from concurrent.futures.process import ProcessPoolExecutor
from contextlib import AbstractContextManager
from importlib import import_module
from multiprocessing import get_context
from typing import Any, TypeVar, cast

import msgspec

from device.errors import TandemError
from device.install_advice import pip_install
from device.start.guard import die_with_parent
from device.start.memory_watch import available_bytes
from toolkit.cache import BUILDING, code_version, package_version
from toolkit.errors import WorkersError

LOG = logging.getLogger(__name__)
TANDEM, PYTHON = "Tandem", "Python"
MAX_LOST = 8  # times that all tasks were lost, without a result in between
MIN_LATE_S, LATE = 5.0, 3.0  # no result for so long, and so many times the longest pause
MIN_FREE_BYTES = 256 * 1024**2  # of a worker: Python with its packages, and one sample
COPIES_OF_MODEL = 3  # as ONNX, as the graph, and in the session
COPIES = 4  # of a late task at most
CONNECT = "10s"  # to a scheduler
REFUSED_S = 2.0  # that a worker waits once it has refused: others are to take its tasks

K = TypeVar("K")


class RefusedError(Exception):
    """This worker cannot do a task; another one may."""


class _Function:
    """A function that is found by its name when a worker has passed the checks: loading its module
    where a package is missing would end the worker before it can say so."""

    def __init__(self, function: Callable[..., bytes]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> bytes:  # noqa: ANN401  (those of a task)
        return self.function(*arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _LateFunction, (self.function.__module__, self.function.__name__)


class _LateFunction(msgspec.Struct, frozen=True):
    """Such a function on its worker."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> bytes:  # noqa: ANN401  (those of a task)
        result: bytes = getattr(import_module(self.module), self.name)(*arguments)
        return result


class _Answer(msgspec.Struct, frozen=True):
    worker: str
    result: bytes = b""
    refused: str = ""
    failure: str = ""


class Workers(AbstractContextManager["Workers"]):
    """An executor that is started when tasks come, and anew if it breaks."""

    def __init__(self, start: Callable[[], Executor], threads: int = 0) -> None:
        """`threads`: that a task may use, 0: as many as its worker has cores."""
        self._start = start
        self.threads = threads
        self._executor: Executor | None = None

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(stop=kind is not None)

    def close(self, *, stop: bool = False) -> None:
        """End the executor; `stop`: also the tasks that run in processes of this machine."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        processes = list((getattr(executor, "_processes", None) or {}).values()) if stop else []
        executor.shutdown(wait=not stop)  # what had not begun is cancelled already
        for process in processes:
            process.terminate()

    def run(
        self,
        function: Callable[..., bytes],
        tasks: Mapping[K, tuple[Any, ...]],
        *,
        alike: bool = False,
        model_bytes: int = 0,
        packages: Sequence[str] = BUILDING,
        check: Callable[[K, bytes], str] = lambda *_: "",
    ) -> Iterator[tuple[K, bytes]]:
        """Yield the key and the result of each task as they end.

        `alike`: tasks take about as long, so those that are late are given out again.
        `model_bytes`: of the largest model; a worker with too little memory free for it refuses its
        tasks, and so does one with another Python or other versions of `packages`. `check`: says
        why a result cannot be that of its task, which is then refused.

        Raises WorkersError: tasks are lost or refused again and again, and what a task raises.
        """
        missing, running = dict(tasks), dict[Future[bytes], K]()
        expected = versions(packages)
        need = MIN_FREE_BYTES + COPIES_OF_MODEL * model_bytes
        logged = set[str]()
        refused = set[K]()  # these wait: who refuses at once would take the tasks of all others
        lost, longest, last = 0, 0.0, time.monotonic()

        def submit(keys: Iterable[K]) -> None:
            running.update(
                {self._submit(function, missing[key], expected, need): key for key in keys}
            )

        try:
            while missing:
                submit(missing.keys() - set(running.values()) - refused)
                limit = max(MIN_LATE_S, LATE * longest)
                done, _ = wait(running, timeout=limit, return_when=FIRST_COMPLETED)
                submit(_late(missing, running) if alike and not done else ())
                ended = [(running.pop(future), self._result(future)) for future in done]
                problem = ""
                for key, answer in sorted(ended, key=lambda row: bool(row[1].failure)):
                    if key not in missing:
                        continue
                    why = _refusal(answer) or check(key, answer.result)
                    if why:
                        problem = f"{answer.worker} {why}"
                        refused.add(key)
                        continue
                    del missing[key]
                    _cancel(running, key)
                    refused.clear()
                    now = time.monotonic()
                    lost, longest, last = 0, max(longest, now - last), now
                    yield key, answer.result
                if problem:
                    if problem not in logged:
                        LOG.warning("%s; what it had is run again", problem)
                    logged.add(problem)
                    lost += not running  # then all that was given out is lost
                    _end_lost(problem, lost)
                if not (done and running):
                    refused.clear()
        finally:
            self._cancel_all(running)

    def _cancel_all(self, running: Iterable[Future[bytes]]) -> None:
        # Ended processes are told to all futures, which would fail on cancelled ones.
        for future in () if hasattr(self._executor, "_processes") else running:
            future.cancel()

    def _submit(
        self,
        function: Callable[..., bytes],
        arguments: tuple[Any, ...],
        expected: Mapping[str, str],
        need: int = 0,
    ) -> Future[bytes]:
        for _ in range(MAX_LOST):
            self._executor = self._executor or self._start()
            try:
                return self._executor.submit(
                    _answer, _Function(function), expected, arguments, need
                )
            except BrokenExecutor:
                self.close(stop=True)  # its own end waits for processes that started meanwhile
        raise WorkersError("the workers cannot be started: they end at once")

    def _result(self, future: Future[bytes]) -> _Answer:
        """Return what a worker answered, or how it was lost."""
        try:
            return msgspec.msgpack.decode(future.result(), type=_Answer)
        except BrokenExecutor:  # `_submit` starts another
            return _Answer("a worker", refused="ended")
        except Exception as error:  # noqa: BLE001  (each executor has types of its own)
            why = f"was lost ({type(error).__name__}: {str(error)[:200]})"
            return _Answer("a worker", refused=why)


def _refusal(answer: _Answer) -> str:
    """Return why a worker has not done a task, "" if it has. Raises WorkersError: none can."""
    if answer.failure:
        raise WorkersError(answer.failure)
    return answer.refused


def _late(missing: Iterable[K], running: Mapping[Future[bytes], K]) -> list[K]:
    """What to give out once more: its worker is slow or gone, and another may be quicker."""
    copies = Counter(running.values())
    return [key for key in missing if 0 < copies[key] < COPIES]


def _end_lost(problem: str, lost: int) -> None:
    if lost >= MAX_LOST:
        raise WorkersError(
            f"{problem}; {lost} times without a result in between, so the work cannot "
            "be done there: mend or remove these workers, and run it again"
        )


def _cancel(running: dict[Future[bytes], K], key: K) -> None:
    """Cancel what is not needed any more, where it has not begun."""
    for future in [one for one in running if running[one] == key]:
        if future.cancel():
            del running[future]


def _answer(
    function: Callable[..., bytes],
    expected: Mapping[str, str],
    arguments: tuple[Any, ...],
    need: int = 0,
) -> bytes:
    """Run a task on a worker that has the expected versions and so many bytes of memory free."""
    worker = f"worker {worker_name()}"
    try:
        for name, own in versions(expected.keys() - {TANDEM, PYTHON}).items():
            if own != expected[name]:
                raise RefusedError(
                    f"runs {name} {own or '(none)'}, not {expected[name] or '(none)'}: both must "
                    "be the same, as results may differ"
                )
        if (free := available_bytes()) < need:  # the kernel would end it in the middle
            raise RefusedError(
                f"has {free >> 20} MiB of memory free, and a task needs {need >> 20} MiB"
            )
        answer = _Answer(worker, result=function(*arguments))
    except (RefusedError, MemoryError) as error:
        why = str(error) if isinstance(error, RefusedError) else "has too little memory"
        time.sleep(REFUSED_S)
        answer = _Answer(worker, refused=why)
    except TandemError as error:
        answer = _Answer(worker, failure=str(error))
    return msgspec.msgpack.encode(answer)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions that results depend on, by name: of Tandem, of Python (3.11) and of
    packages, "" for one that is not installed."""
    python = "{}.{}".format(*sys.version_info)
    own = {TANDEM: code_version(), PYTHON: python}
    return own | {name: package_version(name) for name in sorted(packages)}


def worker_name() -> str:
    """Return what people find this worker by."""
    name = f"{socket.gethostname()}, process {os.getpid()}"
    if (dask := sys.modules.get("distributed")) is not None:
        try:
            return f"{dask.get_worker().address} ({name})"
        except ValueError:  # not in a task of Dask
            return name
    return name


def open_workers(text: str) -> Workers:
    """Return the workers that a user names: a number of processes, or the address of Dask's.

    Raises WorkersError: it is neither, or Dask is not installed.
    """
    if "://" not in text:
        count = int(text) if text.isdecimal() else 0
        if not 1 <= count <= 1024:
            raise WorkersError(
                f"{text!r} names no workers: give a number of processes from 1 to 1024, or the "
                "address of a Dask scheduler such as tcp://scheduler:8786"
            )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        return Workers(lambda: _processes(count), max(1, (cores or os.cpu_count() or 1) // count))
    return Workers(lambda: _dask(text))


def _processes(count: int) -> Executor:
    # Not forked: threads of onnxruntime do not survive that.
    return ProcessPoolExecutor(count, get_context("spawn"), _start_process, (os.getpid(),))


def _start_process(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    if not die_with_parent(parent):
        os._exit(1)


def _dask(address: str) -> Executor:
    try:
        import distributed
    except ModuleNotFoundError as error:
        raise WorkersError(
            f"{address} is a scheduler of Dask, which is not installed: {pip_install('dask')}"
        ) from error
    try:
        client = cast(Any, distributed).Client(address, timeout=CONNECT)
    except (OSError, ValueError) as error:
        raise WorkersError(
            f"the scheduler {address} cannot be reached ({error}): start it with `dask scheduler`, "
            "or check its address"
        ) from error
    executor: Executor = client.get_executor(pure=False)  # twice: run twice
    executor.shutdown = lambda *_, **__: client.close()  # type: ignore[method-assign]
    return executor
