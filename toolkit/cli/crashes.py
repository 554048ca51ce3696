"""Native code that crashes ends in a sentence: the command goes on in a child of its process.

onnxruntime runs a model in the process of the command, and a damaged one can crash it. A fork at
the start of the command copies nothing, and its data never goes through a pipe.
"""

import faulthandler
import io
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, NoReturn

from device.errors import TandemError

# Commands that give models and engines of others to native code here. `inspect` has it in a child.
GUARDED = frozenset(
    {
        "bench",
        "build",
        "bundle",
        "calibrate",
        "compare",
        "explore",
        "export",
        "infer",
        "model",
        "plan",
    }
    | {"ranges", "surgeon"}
)
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL}
)
CANNOT_COMPARE = 2  # where status 1 says that two sides differ
STATUS: Mapping[str, int] = MappingProxyType({"compare": CANNOT_COMPARE, "bundle": CANNOT_COMPARE})
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PLACE = re.compile(r'File "[^"]*/(?:site|dist)-packages/([^/"]+)/')


class CrashError(TandemError):
    """Native code ended the command."""

    def __init__(self, message: str, status: int = 1) -> None:
        """`status`: the exit status of the command."""
        super().__init__(message)
        self.exit_status = status


def survive_crashes(command: str, arguments: Sequence[str]) -> None:
    """Return in a child of this process, which waits for it and ends as it ends.

    Nothing for commands that are not GUARDED, and where this process is more than a command: its
    streams are replaced, or it has threads. Raises CrashError, in the parent: a signal ended it.
    """
    if command not in GUARDED or not _only_a_command():
        return
    from device.start.guard import die_with_parent

    stack = os.fdopen(os.memfd_create("stack"), "w+")  # open as long as the child
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored ones would never come
    watched = {signal.SIGCHLD, *FORWARDED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not die_with_parent(parent):
            os._exit(1)
        faulthandler.enable(stack)
        return
    status = _wait(child, watched)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if status >= 0:
        os._exit(status)  # this process has said nothing that waits to be written
    end = signal.Signals(-status)
    if end not in CRASHES:
        _end_by(end)
    raise CrashError(crash_text(arguments, end, _read(stack)), STATUS.get(command, 1))


def crash_text(arguments: Sequence[str], end: signal.Signals, stack: str) -> str:
    """Return what is said of a command that a signal ended; `stack` as faulthandler writes it."""
    line = shlex.join(["tandem", *arguments])
    line = line if line.isprintable() else repr(line)[1:-1]
    if end == signal.SIGKILL:
        return (
            f"`{line}` was killed (SIGKILL): this machine has too little memory for it, or "
            "somebody ended it; give smaller inputs, or use a larger machine."
        )
    return (
        f"{_library(stack)} crashed in `{line}` ({end.name}): the model is damaged, or has what "
        "the library cannot run; export it again."
    )


def _library(stack: str) -> str:
    """Name the library that the thread was in which crashed."""
    _, _, current = stack.rpartition("Current thread")
    innermost = next((line for line in current.splitlines() if "File " in line), "")
    match = _PLACE.search(innermost)
    return match[1] if match else "a native library"


def _only_a_command() -> bool:
    has_own_streams = isinstance(sys.stdout, io.TextIOWrapper) and sys.stderr is sys.__stderr__
    return has_own_streams and sys.platform == "linux" and threading.active_count() == 1


def _wait(child: int, watched: set[signal.Signals]) -> int:
    """Return the exit status of the child, or minus the signal that ended it."""
    while True:
        received = signal.sigwaitinfo(watched)
        # Those of the terminal, which the kernel sends, went to the child, too.
        if received.si_signo != signal.SIGCHLD and received.si_code <= 0:
            os.kill(child, received.si_signo)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def _read(stack: IO[str]) -> str:
    stack.seek(0)
    return stack.read()


def _end_by(end: signal.Signals) -> NoReturn:
    """End as the child did."""
    signal.signal(end, signal.SIG_DFL)
    os.kill(os.getpid(), end)
    raise AssertionError("a signal that does not end a process ended the child")
