"""Heartbeats of a pipeline that loads, by a thread: they show that its process runs, and that it
waits for a driver, a name server or a disk, not that it gets on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from device.protocol.messages import ChildMessage, Heartbeat

BEAT_S = 0.5


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
