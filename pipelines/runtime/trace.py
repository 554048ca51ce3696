"""A Chrome trace of a run: each frame's stages as bars, for chrome://tracing and ui.perfetto.dev.

Format: Trace Event Format (Google), complete events in a JSON object. A camera has a row, and
further ones for frames that were in flight at the same time; bars of one frame follow each other. A
model beside the first has rows of its own, and so have the processors that ran an inference, such
as "gpu, dla1". Events are written as they come, so a long run needs no memory.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from device.errors import PipelineError
from pipelines.sinks.result import FrameResult

NOT_STAGES = ("total",)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """A row of the picture, and where its last bar ends."""

    number: int
    end_us: float


class TraceWriter(AbstractContextManager["TraceWriter"]):
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
        self._rows: dict[str, list[_Row]] = {}
        self._separator = ""
        self._failed = False

    def __exit__(self, *_: object) -> None:
        """End the list, so that the file is JSON."""
        self._put("\n]}\n")
        try:
            self._file.close()
        except OSError as failure:  # what is buffered has no room
            self._give_up(failure)

    def add(self, result: FrameResult) -> None:
        """Add the stages of a frame; what follows the result is the time of the sinks."""
        frame, event = result.frame, result.event
        about = {
            "seq": event.seq,
            "age_ms": event.age_ms,
            "detections": len(event.detections),
            "processors": event.processors,
            "dropped": event.dropped,
        }
        camera = frame.camera or event.pipeline
        at_us, end_us = frame.t_recv.mono_ns / 1e3, time.monotonic_ns() / 1e3
        taken_us = frame.t_capture.mono_ns / 1e3
        row = self._row(camera, min(taken_us, at_us), end_us)
        self._bar("transport", row, taken_us, at_us - taken_us, about)
        for stage, milliseconds in event.latency_ms.items():
            if stage not in NOT_STAGES and stage not in result.models:
                self._bar(stage, row, at_us, 1e3 * milliseconds, about)
                at_us += 1e3 * milliseconds
        self._bar("sinks", row, at_us, max(0.0, end_us - at_us), about)
        for run in result.runs:
            if run.model in result.models:  # beside the first model, at the same time
                self._span(run.model, f"{camera}: {run.model}", run.span_ns, about)
            about_run = {"seq": event.seq, "camera": camera, "processors": run.processors}
            self._span(run.model, ", ".join(run.processors), run.infer_ns, about_run)

    def _span(
        self, name: str, row_name: str, span_ns: tuple[int, int], about: Mapping[str, object]
    ) -> None:
        begin_us, end_us = (moment / 1e3 for moment in span_ns)
        row = self._row(row_name, begin_us, end_us)
        self._bar(name, row, begin_us, end_us - begin_us, about)

    def _row(self, name: str, begin_us: float, end_us: float) -> int:
        """Return a row of this name that has room: bars of one row may not overlap."""
        rows = self._rows.setdefault(name, [])
        for row in rows:
            if row.end_us <= begin_us:
                row.end_us = end_us
                return row.number
        number = sum(map(len, self._rows.values())) + 1
        rows.append(_Row(number, end_us))
        self._write({"name": "thread_name", "ph": "M", "tid": number, "args": {"name": name}})
        return number

    def _bar(
        self, name: str, row: int, at_us: float, duration_us: float, about: Mapping[str, object]
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
