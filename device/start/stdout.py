"""Standard output belongs to the result: what native libraries print there goes to standard error.

HiGHS, onnxruntime, FFmpeg and compilers write to file descriptor 1 past `sys.stdout`, when and what
they like. A redirection while one of them runs would catch the output of other threads; so the
descriptor is moved once, before the first thread.
"""

import fcntl
import io
import os
import sys


def take_stdout() -> int:
    """Return a descriptor of the standard output, and let descriptor 1 be standard error.

    Python's `sys.stdout` then prints to standard error, too. Children do not inherit the returned
    descriptor. Raises OSError if standard output is closed.
    """
    result = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)  # 2 may be free
    try:
        os.dup2(2, 1)
    except OSError:  # standard error is closed: nobody wants to read it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    return result


def reserve_stdout() -> None:
    """Give standard output to `sys.stdout` alone; nothing if it is closed or replaced."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream is not sys.__stdout__:
        return
    stream.flush()
    sys.stdout = open(  # noqa: SIM115  (Python flushes it at the end)
        take_stdout(),
        "w",
        encoding=stream.encoding,
        errors=stream.errors,
        buffering=1 if stream.line_buffering else -1,
    )


def result_descriptor() -> int:
    """Return the descriptor that `sys.stdout` writes to, for a child that writes the result."""
    sys.stdout.flush()
    try:
        return sys.stdout.fileno()
    except OSError:  # replaced by a buffer
        return 1
