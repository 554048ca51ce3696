"""Tasks on the workers of any `concurrent.futures.Executor`; what is lost is run again.

Arguments and results are plain values. A worker with other code, or that cannot do a task, refuses
it by its name; whichever result of a task comes first counts, and counts once.
"""

import logging
import math
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from concurrent.futures.process import ProcessPoolExecutor
from concurrent.futures.thread import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from typing import Any, Generic, TypeVar, cast

import msgspec

from device.errors import TandemError
from device.install_advice import pip_install
from device.start.guard import die_with_parent
from device.start.memory_watch import available_bytes
from toolkit.cache import BUILDING, code_version, package_version
from toolkit.errors import WorkersError
from toolkit.late_imports import import_late

LOG = logging.getLogger(__name__)
TANDEM, PYTHON = "Tandem", "Python"
MAX_LOST = 8  # times that all tasks were lost, without a result in between
MIN_LATE_S, LATE = 5.0, 3.0  # no result for so long, and so many times the longest pause
MIN_FREE_BYTES = 256 * 1024**2  # of a worker: Python with its packages, and one sample
COPIES_OF_MODEL = 3  # as ONNX, as the graph, and in the session
COPIES = 4  # of a late task at most
CONNECT = "10s"  # to a scheduler
REFUSED_S = 2.0  # that a worker waits once it has refused: others are to take its tasks
POLL_S = 2.0  # until a scheduler is asked again whether it has workers
ALONE_S, END_ALONE_S = 10.0, 1800.0  # without a worker, until it is said, and until a run ends

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
        import_late()
        result: bytes = getattr(import_module(self.module), self.name)(*arguments)
        return result


def _check_name(function: Callable[..., bytes]) -> None:
    """Raises WorkersError: workers in other processes cannot find a function by its name."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is function:
        return
    inner = function.func if isinstance(function, partial) else function
    where = f"{inner.__module__}.{getattr(inner, '__qualname__', repr(inner))}"
    raise WorkersError(
        f"{'a partial of ' if inner is not function else ''}{where} cannot run on workers, which "
        "find a function by its name in its module: give one of a module other than the script, "
        "and what it needs as arguments of the tasks"
    )


class _Answer(msgspec.Struct, frozen=True):
    """`place`: what the executor knows the worker by: Dask's address, else its process id."""

    worker: str
    place: str = ""
    result: bytes = b""
    refused: str = ""
    failure: str = ""


@dataclass(slots=True)
class _Progress(Generic[K]):
    """The tasks of a run that have no result, and what runs where."""

    missing: dict[K, tuple[Any, ...]]
    running: dict[Future[bytes], K] = field(default_factory=dict)
    # These wait: who refuses at once would take the tasks of all others.
    refused: set[K] = field(default_factory=set)
    ever_refused: set[K] = field(default_factory=set)
    logged: set[str] = field(default_factory=set)
    failures: Counter[K] = field(default_factory=Counter)  # of copies, while others ran
    workers: set[str] = field(default_factory=set)  # places of those that have given a result
    lost: int = 0
    longest_s: float = 0.0  # between two results
    last_s: float = field(default_factory=time.monotonic)

    @property
    def late_s(self) -> float:
        """Without a result for so long, what runs is late."""
        return max(MIN_LATE_S, LATE * self.longest_s)

    def startable(self) -> Set[K]:
        """What has no result, runs nowhere and is not refused."""
        return self.missing.keys() - set(self.running.values()) - self.refused

    def copies_of_refused(self, begun: Iterable[K]) -> list[K]:
        """What to give out twice of the tasks that begin, where few run: a scheduler may choose the
        idle worker that refused again. No copy is added later: all must end to count as lost.
        """
        copies = [key for key in begun if key in self.ever_refused]
        return copies[: max(0, COPIES - len(self.running))]

    def copies(self) -> list[K]:
        """What to give out once more: its worker is slow or gone, and another may be quicker."""
        count = Counter(self.running.values())
        again = [key for key in count if key in self.missing and count[key] < COPIES]
        return sorted(again, key=lambda key: count[key])

    def copies_for_idle(self, present: Callable[[], Set[str] | None]) -> list[K]:
        """What to give to workers that have nothing to do, as fewer tasks are left than they.
        `present`: returns the places of the workers that are there now, None: not known."""
        workers = self.workers
        if len(workers) > len(self.running) and (places := present()) is not None:
            workers = workers & places
        return self.copies()[: max(0, len(workers) - len(self.running))]

    def take_failure(self, key: K, why: str) -> None:
        """A copy of a task has failed. Raises WorkersError: no other one runs, which may succeed,
        or it hangs while all others fail."""
        self.failures[key] += 1
        if self.failures[key] == COPIES - 1 or key not in self.running.values():
            raise WorkersError(why)

    def take_result(self, key: K, place: str) -> None:
        """A worker has given the result of a task."""
        self.workers.add(place)
        del self.missing[key]
        _cancel(self.running, key)
        self.refused.clear()
        now_s = time.monotonic()
        self.lost, self.longest_s = 0, max(self.longest_s, now_s - self.last_s)
        self.last_s = now_s

    def note(self, problem: str) -> None:
        """Say why tasks have no result. Raises WorkersError: again and again."""
        if problem not in self.logged:
            LOG.warning("%s; what it had is run again", problem)
        self.logged.add(problem)
        self.lost += not self.running  # then all that was given out is lost
        _end_lost(problem, self.lost)


class Workers(AbstractContextManager["Workers"]):
    """An executor that is started when tasks come, and anew if it breaks."""

    def __init__(self, start: Callable[[], Executor], threads: int = 0) -> None:
        """`threads`: that a task may use, 0: as many as its worker has cores."""
        self._start = start
        self.threads = threads
        self._executor: Executor | None = None
        self._starting: Future[Executor] | None = None
        self._imports: list[Future[None]] = []  # dropped ones would be cancelled
        self._has_copies = False  # that run though their results are there

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(stop=kind is not None)

    def close(self, *, stop: bool = False) -> None:
        """End the executor; `stop`: also the tasks that run in processes of this machine. Copies
        whose results are there end in any case."""
        if self._starting is not None:
            with suppress(Exception):  # of a start that nobody needed
                self._open()
        executor, self._executor = self._executor, None
        if executor is None:
            return
        stop |= self._has_copies and hasattr(executor, "_processes")
        processes = list((getattr(executor, "_processes", None) or {}).values()) if stop else []
        executor.shutdown(wait=not stop)  # what had not begun is cancelled already
        for process in processes:
            process.terminate()

    def prepare(self, module: str) -> None:
        """Let the executor start in a thread, and workers of Dask import the module of their tasks,
        while this process does something else. What fails is said when tasks come."""

        def start() -> Executor:
            executor = self._start()
            if isinstance(executor, _Dask):
                count = sum(executor.tasks_by_host().values())
                with suppress(WorkersError):  # the scheduler is gone: said when tasks come
                    self._imports = [executor.submit(_import, module) for _ in range(count)]
            return executor

        thread = ThreadPoolExecutor(1, "workers")
        self._starting = thread.submit(start)
        thread.shutdown(wait=False)

    def _open(self) -> Executor:
        """Return the executor, started if it is not. Raises WorkersError: it cannot be."""
        if self._starting is not None:
            starting, self._starting = self._starting, None
            self._executor = starting.result()
        self._executor = self._executor or self._start()
        return self._executor

    def tasks_by_host(self) -> dict[str, int]:
        """Return how many tasks each host of Dask's workers runs at a time, which share its cores;
        nothing of other executors."""
        executor = self._open()
        return executor.tasks_by_host() if isinstance(executor, _Dask) else {}

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

        Raises WorkersError: tasks are lost or refused again and again, and what a task raises once
        no copy of it is left that may succeed.
        """
        state, expected = _Progress(dict(tasks)), versions(packages)
        need = MIN_FREE_BYTES + COPIES_OF_MODEL * model_bytes

        def submit(keys: Iterable[K]) -> None:
            state.running.update(
                {self._submit(function, state.missing[key], expected, need): key for key in keys}
            )

        try:
            while state.missing:
                submit(begun := state.startable())
                submit(state.copies_of_refused(begun) if alike else ())
                submit(state.copies_for_idle(self._places) if alike else ())
                done = self._await_some(state.running, state.late_s)
                submit(state.copies() if alike and not done else ())
                ended = [(state.running.pop(future), self._result(future)) for future in done]
                problem = ""
                for key, answer in sorted(ended, key=lambda row: bool(row[1].failure)):
                    if key not in state.missing:
                        continue
                    if answer.failure:
                        state.take_failure(key, answer.failure)
                        continue
                    if why := answer.refused or check(key, answer.result):
                        problem = f"{answer.worker} {why}"
                        state.refused.add(key)
                        state.ever_refused.add(key)
                        continue
                    state.take_result(key, answer.place)
                    yield key, answer.result
                if problem:
                    state.note(problem)
                if not (done and state.running):
                    state.refused.clear()
        finally:
            self._has_copies = not state.missing and bool(state.running)
            self._cancel_all(state.running)

    def _places(self) -> Set[str] | None:
        """Return the places of the workers that are there now; None: the executor does not say."""
        if isinstance(self._executor, _Dask):
            return set(self._executor.addresses()) or None  # its scheduler may be away
        if not hasattr(self._executor, "_processes"):
            return None
        # It has None once it has broken.
        return {str(process) for process in getattr(self._executor, "_processes", None) or ()}

    def _await_some(self, running: Mapping[Future[bytes], K], for_s: float) -> set[Future[bytes]]:
        """Return what has ended, nothing after so many seconds. Raises WorkersError: the scheduler
        has had no worker for too long."""
        until_s = time.monotonic() + for_s
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            done, _ = wait(running, timeout=min(POLL_S, left_s), return_when=FIRST_COMPLETED)
            if not done and isinstance(self._executor, _Dask):  # what came counts first
                self._executor.check(len(set(running.values())))
            if done or left_s <= POLL_S:
                return done

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
            executor = self._open()
            if not isinstance(executor, ThreadPoolExecutor):
                _check_name(function)
            try:
                return executor.submit(_answer, _Function(function), expected, arguments, need)
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


def _import(module: str) -> None:
    """Import the module of tasks on a worker; one that cannot says so when they come."""
    import_late()
    with suppress(ImportError):
        import_module(module)


def _answer(
    function: Callable[..., bytes],
    expected: Mapping[str, str],
    arguments: tuple[Any, ...],
    need: int = 0,
) -> bytes:
    """Run a task on a worker that has the expected versions and so many bytes of memory free."""
    worker = f"worker {worker_name()}"
    try:
        for name, version in versions(expected.keys() - {TANDEM, PYTHON}).items():
            if version != expected[name]:
                raise RefusedError(
                    f"runs {name} {version or '(none)'}, not {expected[name] or '(none)'}: both "
                    "must be the same, as results may differ"
                )
        if (free := available_bytes()) < need:  # the kernel would end it in the middle
            raise RefusedError(
                f"has {free >> 20} MiB of memory free, and a task needs {need >> 20} MiB"
            )
        answer = _Answer(worker, worker_place(), result=function(*arguments))
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
    versions_here = {TANDEM: code_version(), PYTHON: python}
    return versions_here | {name: package_version(name) for name in sorted(packages)}


def worker_place() -> str:
    """Return what its executor knows this worker by."""
    return _dask_address() or str(os.getpid())


def worker_name() -> str:
    """Return what people find this worker by."""
    name, address = f"{socket.gethostname()}, process {os.getpid()}", _dask_address()
    return f"{address} ({name})" if address else name


def tasks_here(tasks_by_host: Mapping[str, int]) -> int:
    """Return how many tasks share the cores of this worker's host, by `Workers.tasks_by_host`."""
    return max(1, tasks_by_host.get(_host_of(_dask_address()), 1))


def _dask_address() -> str:
    """Return the address of the worker whose task this is, "" outside Dask."""
    if (dask := sys.modules.get("distributed")) is not None:
        with suppress(ValueError):  # not in a task of Dask
            return str(dask.get_worker().address)
    return ""


def _host_of(address: str) -> str:
    return address.rpartition(":")[0]


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
    return _Dask(client, address)


class _Dask(Executor):
    """The workers of a scheduler of Dask, which may come and go."""

    def __init__(self, client: Any, address: str) -> None:  # noqa: ANN401  (Dask has no types)
        self._client = client
        self._executor: Executor = client.get_executor(pure=False)  # twice: run twice
        self._address = address
        self._last, self._asked_s = self.addresses(), time.monotonic()  # that it had, and when
        self._alone_since_s = math.inf
        self._is_logged = False

    def submit(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,  # noqa: ANN401  (as Executor's)
        **kwargs: Any,  # noqa: ANN401  (as Executor's)
    ) -> Future[Any]:
        """Give a task to the scheduler. Raises WorkersError: it is gone."""
        self._check_open()
        return self._executor.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the scheduler, which drops what it has of this run."""
        self._client.close()

    def check(self, tasks: int) -> None:
        """Say where nobody is there for so many tasks. Raises WorkersError: for too long, or the
        scheduler is gone."""
        self._check_open()
        now_s = time.monotonic()
        if now_s - self._asked_s < POLL_S:
            return
        self._asked_s, workers = now_s, self.addresses()
        if workers:
            if self._is_logged:
                LOG.warning("the scheduler %s has %d workers", self._address, len(workers))
            self._last, self._alone_since_s, self._is_logged = workers, math.inf, False
            return
        self._alone_since_s = min(now_s, self._alone_since_s)
        alone_s = now_s - self._alone_since_s
        shown = f"the scheduler {self._address} shows no worker, and {tasks} tasks wait"
        if self._last:
            shown += f"; the last that it had: {', '.join(self._last[:4])}"
        advice = f"start workers (`dask worker {self._address}`)"
        if alone_s >= END_ALONE_S:
            raise WorkersError(f"{shown}; none came in {alone_s:.0f} s: {advice} and run it again")
        if alone_s >= ALONE_S and not self._is_logged:
            LOG.warning(
                "%s: %s. Without one it ends in %.0f s", shown, advice, END_ALONE_S - alone_s
            )
            self._is_logged = True

    def tasks_by_host(self) -> dict[str, int]:
        """Return the threads of all workers of each host."""
        tasks = Counter[str]()
        for address, threads in self._threads_by_worker().items():
            tasks[_host_of(address)] += threads
        return dict(tasks)

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the workers that it has now."""
        return tuple(sorted(self._threads_by_worker()))

    def _threads_by_worker(self) -> dict[str, int]:
        try:
            return dict(self._client.nthreads())
        except (OSError, RuntimeError):  # the scheduler is away
            return {}

    def _check_open(self) -> None:
        if self._client.status in {"closing", "closed"}:  # by itself, after attempts to reconnect
            raise WorkersError(
                f"the scheduler {self._address} is gone: start it and its workers, and run it again"
            )
