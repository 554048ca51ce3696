"""Messages of a pipeline's process to the agent: standard output as their channel, and heartbeats
while it loads.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from device.protocol.messages import ChildMessage, Heartbeat, encode_message

STDOUT = 1
STDERR = 2
BEAT_S = 0.5


def claim_stdout(on_closed: Callable[[], None]) -> Callable[[ChildMessage], None]:
    """Keep standard output for messages and send whatever else is printed, by C code too, to
    standard error. `on_closed` is called when nobody reads the messages any more."""
    sys.stdout.flush()
    channel = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    lock = threading.Lock()

    def emit(message: ChildMessage) -> None:
        line = encode_message(message)
        try:
            with lock:
                while line:
                    line = line[os.write(channel, line) :]
        except BrokenPipeError:
            on_closed()

    return emit


@contextmanager
def loading(emit: Callable[[ChildMessage], None]) -> Iterator[Callable[[ChildMessage], None]]:
    """Beat from now to the first heartbeat of the loop, or to the end of the block; give the
    function that emits meanwhile."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            emit(Heartbeat(frames=0, errors=0, state="loading"))
            ended.wait(BEAT_S)

    def pass_on(message: ChildMessage) -> None:
        if isinstance(message, Heartbeat):
            ended.set()
        emit(message)

    thread = threading.Thread(target=beat, name="loading", daemon=True)
    thread.start()
    try:
        yield pass_on
    finally:
        ended.set()
        thread.join()
