"""How long onnxruntime may run a model of others once: a Loop can state 2^62 turns.

onnxruntime looks between two nodes, of branches and bodies too, whether it is to end.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from toolkit.errors import InferError

MAX_RUN_SECONDS = 600.0  # a network of a board takes seconds on the slowest host


@contextmanager
def limited_run() -> Iterator[Any]:
    """Yield the options of a run, which ends after MAX_RUN_SECONDS.

    Raises InferError: it took longer. What else the run raises is left to the caller.
    """
    import onnxruntime as ort

    options = ort.RunOptions()
    options.log_severity_level = 4  # errors are raised too
    late = threading.Event()

    def end() -> None:
        late.set()
        options.terminate = True

    timer = threading.Timer(MAX_RUN_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield options
    except Exception as err:
        if late.is_set():
            raise InferError(
                f"onnxruntime has not ended the model after {MAX_RUN_SECONDS:.0f} s; "
                "its loops may be without an end: export it again, or give smaller inputs"
            ) from err
        raise
    finally:
        timer.cancel()
