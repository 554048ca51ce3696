"""How long onnxruntime may run a model of others once: a Loop can state 2^62 turns.

onnxruntime looks between two nodes, of branches and bodies too, whether it is to end.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from toolkit.errors import InferError

MAX_RUN_SECONDS = 600.0  # a network of a board takes seconds on the slowest host
_NO_GRAPH = (
    "gpu_graph_id",
    "-1",
)  # where it is not said, onnxruntime 1.32 raises and catches: 50 us


class _Watch:
    """Ends runs that are late, in one thread for all: a search has thousands of short runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[int, tuple[float, Any]] = {}  # id of a run's options -> its end
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0  # of the thread; no need to wake it for a later deadline

    def add(self, options: Any) -> None:  # noqa: ANN401  (onnxruntime has no types)
        with self._changed:
            deadline = time.monotonic() + MAX_RUN_SECONDS
            self._deadlines[id(options)] = (deadline, options)
            if self._thread is None or not self._thread.is_alive():  # not yet, or this is a fork
                self._wakes_at = deadline
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            elif deadline < self._wakes_at:
                self._changed.notify()

    def remove(self, options: Any) -> bool:  # noqa: ANN401
        """Return whether the run was ended."""
        with self._changed:
            return self._deadlines.pop(id(options), None) is None

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for run, (deadline, options) in list(self._deadlines.items()):
                    if deadline <= now:
                        options.terminate = True
                        del self._deadlines[run]
                ends = (deadline for deadline, _ in self._deadlines.values())
                self._wakes_at = min(ends, default=now + MAX_RUN_SECONDS)
                self._changed.wait(self._wakes_at - now)


_WATCH = _Watch()


@contextmanager
def limited_run() -> Iterator[Any]:
    """Yield the options of a run, which ends after MAX_RUN_SECONDS.

    Raises InferError: it took longer. What else the run raises is left to the caller.
    """
    import onnxruntime as ort

    options = ort.RunOptions()
    options.log_severity_level = 4  # errors are raised too
    options.add_run_config_entry(*_NO_GRAPH)
    _WATCH.add(options)
    try:
        yield options
    except Exception as err:
        if _WATCH.remove(options):
            raise InferError(
                f"onnxruntime has not ended the model after {MAX_RUN_SECONDS:.0f} s; "
                "its loops may be without an end: export it again, or give smaller inputs"
            ) from err
        raise
    finally:
        _WATCH.remove(options)
