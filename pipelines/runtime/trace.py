"""A Chrome trace of a run: each frame's stages as bars, for chrome://tracing and ui.perfetto.dev.

Format: Trace Event Format (Google), complete events in a JSON object. One row a camera; bars of one
frame follow each other; a model beside the first has a row of its own. Events are written as they
come, so a long run needs no memory.
"""

import json
import logging
import os
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from device.errors import PipelineError
from pipelines.sinks.result import FrameResult

NOT_STAGES = ("total",)

_log = logging.getLogger(__name__)


class TraceWriter:
    """Writes the trace; `add` takes each result once the sinks have it."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        """Open the file. Raises PipelineError: it is there already, or cannot be written.

        A disk that is full later ends the trace and not the run.
        """
        try:
            self._file: IO[str] = path.open("w" if overwrite else "x", encoding="utf-8")
        except FileExistsError as error:
            raise PipelineError(
                f"the trace {path} is there already: name another, or `tandem run --overwrite`."
            ) from error
        except OSError as error:
            raise PipelineError(
                f"the trace {path} cannot be written ({error.strerror}): correct its path."
            ) from error
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._path = path
        self._rows: dict[str, int] = {}
        self._separator = ""
        self._failed = False

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the list, so that the file is JSON."""
        self._put("\n]}\n")
        try:
            self._file.close()
        except OSError as failure:  # what is buffered has no room
            self._give_up(failure)

    def add(self, result: FrameResult) -> None:
        """Add the stages of a frame; what follows the result is the time of the sinks."""
        frame, event = result.frame, result.event
        row = self._row(frame.camera or event.pipeline)
        about = {
            "seq": event.seq,
            "age_ms": event.age_ms,
            "detections": len(event.detections),
            "processors": event.processors,
            "dropped": event.dropped,
        }
        at_us = frame.t_recv.mono_ns / 1e3
        taken_us = frame.t_capture.mono_ns / 1e3
        self._bar("transport", row, taken_us, at_us - taken_us, about)
        seen_us = at_us + 1e3 * event.latency_ms.get("wait", 0.0)
        for stage, milliseconds in event.latency_ms.items():
            if stage in result.models:  # beside the first model, at the same time
                beside = self._row(f"{frame.camera or event.pipeline}: {stage}")
                self._bar(stage, beside, seen_us, 1e3 * milliseconds, about)
            elif stage not in NOT_STAGES:
                self._bar(stage, row, at_us, 1e3 * milliseconds, about)
                at_us += 1e3 * milliseconds
        sinks_us = time.monotonic_ns() / 1e3 - at_us
        self._bar("sinks", row, at_us, max(0.0, sinks_us), about)

    def _row(self, name: str) -> int:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            about = {"name": "thread_name", "ph": "M", "tid": row, "args": {"name": name}}
            self._write(about)
        return row

    def _bar(
        self, name: str, row: int, at_us: float, duration_us: float, about: dict[str, object]
    ) -> None:
        times = {"ts": round(at_us, 1), "dur": round(duration_us, 1)}
        self._write({"name": name, "ph": "X", "tid": row, **times, "args": about})

    def _write(self, event: dict[str, object]) -> None:
        self._put(self._separator + json.dumps({"pid": os.getpid(), **event}))
        self._separator = ",\n"

    def _put(self, text: str) -> None:
        if self._failed:
            return
        try:
            self._file.write(text)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            _log.error("the trace %s is not complete: %s", self._path, error)
