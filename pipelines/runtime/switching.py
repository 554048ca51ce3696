"""How often the threads of Python take turns: the reader of a camera must not wait for a sink, nor
an instance of a model for the event loop."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# p99 of a hand-over beside a busy thread: 1.2 ms, against 20 to 63 with Python's own 5 ms; on a
# machine with twice the work that it can do 5 ms, against 158 to 254.
SWITCH_INTERVAL_S = 0.0005


@contextmanager
def quick_turns() -> Iterator[None]:
    """Let threads take turns often; the process's own interval returns at the end."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
