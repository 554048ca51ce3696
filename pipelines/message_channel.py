"""Standard output as the channel of messages to the agent."""

import os
import sys
import threading
from collections.abc import Callable

from device.protocol.messages import ChildMessage, encode_message

STDOUT = 1
STDERR = 2


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
