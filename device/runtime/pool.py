"""Sessions of one engine for several frames in flight: on a board with two DLA cores they share
the cores' time, where one session has one frame at a time and leaves a core idle.
"""

import queue
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt

from device.closing import Closing
from device.engine.file import Engine, PathLike, open_engine
from device.engine.tensorrt_manifest import TensorRT
from device.errors import SessionError
from device.runtime.cuda.device_array import DeviceArray
from device.runtime.executors.loaded import core_count
from device.runtime.executors.protocol import ExecutorName
from device.runtime.executors.table import SegmentReport
from device.runtime.session import Session

Array = npt.NDArray[Any]

MAX_SESSIONS = 16  # a DLA core holds as many loadables


def turns_of(engine: Engine, session: Session) -> int:
    """Return how many sessions of an engine use all DLA cores: one for each core, where the plan
    says that frames take turns on them and TensorRT runs them here as in `session`; else 1."""
    on_dla = {
        report.segment
        for report in session.reports
        if report.implementation == "tensorrt" and any(p.startswith("dla") for p in report.runs_on)
    }
    takes_turns = any(
        isinstance(implementation, TensorRT) and implementation.take_turns
        for segment in engine.manifest.segments
        if segment.name in on_dla
        for implementation in segment.implementations
    )
    try:
        return core_count() if takes_turns else 1
    except SessionError:  # it has counted them when it loaded: one session runs
        return 1


class SessionPool(Closing):
    """`count` sessions of an engine; each call takes the one that has waited longest.

    Calls of as many threads run at the same time. Where the plan says that frames take turns, the
    sessions' DLA segments are on the cores in turn: the first on core 0, the second on core 1. Each
    session has memory of its own for tensors; weights and kernels on the GPU are shared.
    """

    def __init__(
        self,
        path: PathLike,
        count: int = 2,
        *,
        profile: str | None = None,
        timing_cache: Path | None = None,
        plans: Path | None = None,
        executor: ExecutorName = "auto",
    ) -> None:
        """Open the sessions; the options are those of `Session`.

        Raises SessionError: `count` is none, or a session cannot be opened; then none stays open.
        """
        if not 1 <= count <= MAX_SESSIONS:
            raise SessionError(
                f"a pool of {count} sessions was asked for; give 1 to {MAX_SESSIONS}, such as one "
                "for each DLA core"
            )
        self._idle: queue.Queue[Session] = queue.Queue()
        with ExitStack() as stack, open_engine(path) as engine:
            self._sessions: list[Session] = []
            for turn in range(count):
                session = Session(
                    engine,
                    profile=profile,
                    timing_cache=timing_cache,
                    plans=plans,
                    turn=turn,
                    executor=executor,
                )
                stack.callback(session.close)
                self._sessions.append(session)
                self._idle.put(session)
            stack.pop_all()

    @property
    def reports(self) -> tuple[tuple[SegmentReport, ...], ...]:
        """How the segments of each session run."""
        return tuple(session.reports for session in self._sessions)

    def infer(
        self, feeds: Mapping[str, Array], outputs: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Run the engine once on a session that is idle, or the next that is; see `Session.infer`.

        Arrays of one call must not be those of another that runs at the same time.
        """
        with self._next() as session:
            return session.infer(feeds, outputs)

    def infer_on_device(
        self,
        feeds: Mapping[str, object],
        outputs: Mapping[str, object] | None = None,
        *,
        stream: object | None = None,
    ) -> dict[str, DeviceArray]:
        """Run the engine once on arrays in the GPU's memory; see `Session.infer_on_device`.

        With `stream` this returns at once: give consecutive frames streams of their own, and they
        are in flight together, one for each session.
        """
        with self._next() as session:
            return session.infer_on_device(feeds, outputs, stream=stream)

    def close(self) -> None:
        """Close all sessions, each after the call that it runs."""
        with ExitStack() as stack:
            for session in self._sessions:
                stack.callback(session.close)

    @contextmanager
    def _next(self) -> Iterator[Session]:
        session = self._idle.get()
        try:
            yield session
        finally:
            self._idle.put(session)
