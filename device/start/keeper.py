"""Runs a command, keeps all that it starts together, and ends after the last of them.

    python -I .../device/start device.start.keeper PARENT_PID MARK COMMAND...

What a pipeline starts may leave its session, its parent and its environment: the kernel gives what
has lost its parent to this process (PR_SET_CHILD_SUBREAPER), so that it stays below it. When the
command has ended, the rest has LEFTOVER_S, as encoders finish their files, and is killed.

    SIGTERM    the command is asked to end
    SIGHUP     it is killed; the kernel sends this if the parent ends
    SIGUSR1    all is killed at once

The status is that of the command. MARK tells the next agent of a state folder whose keeper it is.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from math import inf
from pathlib import Path

from device.start.child import become
from device.start.command import module_command
from device.start.guard import die_with_parent
from device.start.process_tree import kill_below

MODULE = "device.start.keeper"
LEFTOVER_S = 1.0  # the next pipeline waits for it
_PR_SET_CHILD_SUBREAPER = 36
_KILL_WAIT_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)


def keeper_command(command: tuple[str, ...], mark: str) -> list[str]:
    """Return the command line that runs `command` below a keeper, tied to the life of this process.

    Linux ties it to the thread that starts it, so start it from one that lasts.
    """
    return [*module_command(MODULE, str(os.getpid()), mark), *command]


def mark_of(folder: Path) -> str:
    """Return what tells the keepers of a folder's agent: its path, its device and inode.

    The same path in another container is another folder.
    """
    path = folder.resolve()
    try:
        status = path.stat()
    except OSError:
        return str(path)
    return f"{status.st_dev:x}:{status.st_ino:x}:{path}"


def end_keepers(mark: str) -> int:
    """End keepers that an earlier agent of a folder has left behind, with all that they keep;
    return how many there were."""
    pids = _keepers(mark)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGHUP)
            os.kill(pid, signal.SIGCONT)
    until_s = time.monotonic() + 2.0 * LEFTOVER_S
    while any(pid in pids for pid in _keepers(mark)) and time.monotonic() < until_s:
        time.sleep(0.05)
    for pid in _keepers(mark):
        end_tree(pid)
    return len(pids)


def end_tree(keeper: int) -> None:
    """Kill what a keeper keeps, and it: one that does not answer."""
    kill_below(keeper, _KILL_WAIT_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(keeper, signal.SIGKILL)


def _keepers(mark: str) -> list[int]:
    pids = []
    with contextlib.suppress(OSError):
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                place = words.index(MODULE.encode())
                if entry.name.isdecimal() and words[place + 2] == os.fsencode(mark):
                    pids.append(int(entry.name))
    return pids


def main(argv: list[str]) -> int:
    """Keep the command; end as it has ended."""
    parent, command = int(argv[1]), argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if not die_with_parent(parent, signal.SIGHUP):
        return 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper, child = os.getpid(), os.fork()
    if child == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os._exit(become(keeper, command))
    _close_streams()
    return _end_as(_keep(child))


def _keep(child: int) -> int:
    """Wait for the child and all that it leaves behind; return its wait status."""
    keeper = os.getpid()
    status: int | None = None
    until_s = inf
    while True:
        status, is_last = _reap(child, status)
        if status is not None:
            until_s = min(until_s, time.monotonic() + LEFTOVER_S)
            if is_last or time.monotonic() >= until_s:
                break
        caught = signal.sigtimedwait(_SIGNALS, min(0.2, max(0.0, until_s - time.monotonic())))
        number = 0 if caught is None else caught.si_signo
        if number == signal.SIGTERM:
            _signal_group(child, signal.SIGTERM)
            _signal_group(child, signal.SIGCONT)  # one that is stopped handles no SIGTERM
        elif number == signal.SIGHUP:
            _signal_group(child, signal.SIGKILL)
        elif number == signal.SIGUSR1:
            kill_below(keeper, _KILL_WAIT_S)
    if not is_last:
        kill_below(keeper, _KILL_WAIT_S)
        status, _ = _reap(child, status)
    return status or 0


def _reap(child: int, status: int | None) -> tuple[int | None, bool]:
    """Take what has ended; return the wait status of the child, if it has, and whether nothing is
    left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    except ChildProcessError:
        return status, True
    return status, False


def _signal_group(child: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, number)


def _close_streams() -> None:
    """Hold none of the command's streams open: their end says that it has ended."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)


def _end_as(status: int) -> int:
    """Return the exit status of a wait status, or end by the same signal."""
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):  # of SIGKILL and SIGSTOP nothing can be set
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main(sys.argv))
