"""Starts a command that does not outlive the agent.

    python .../device/start device.agent.child PARENT_PID COMMAND...

An agent that is killed cannot stop its pipeline, and a camera takes one reader only. The kernel is
asked to kill this process when its parent ends, then it becomes the command.
"""

import ctypes
import os
import signal
import sys

from device.start.command import module_command

_PR_SET_PDEATHSIG = 1


def guarded(command: tuple[str, ...]) -> list[str]:
    """Return the command line that runs `command` tied to the life of this process.

    Linux ties it to the thread that starts it, so start it from one that lasts.
    """
    return [*module_command("device.agent.child", str(os.getpid())), *command]


def main(argv: list[str]) -> int:
    """Become the command; returns only if it cannot be started."""
    parent, command = int(argv[1]), argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv))
