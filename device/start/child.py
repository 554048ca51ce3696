"""Starts a command that does not outlive the process that starts it.

    python -I .../device/start device.start.child PARENT_PID COMMAND...

This process ties its life to that of its parent, makes itself the first choice of the kernel when
memory runs out, and becomes the command.
"""

import contextlib
import os
import sys
from pathlib import Path

from device.start.command import module_command
from device.start.guard import die_with_parent

_OOM_SCORE = "500"  # of 1000: the kernel ends a pipeline before the agent


def guarded(command: tuple[str, ...]) -> list[str]:
    """Return the command line that runs `command` tied to the life of this process.

    Linux ties it to the thread that starts it, so start it from one that lasts.
    """
    return [*module_command("device.start.child", str(os.getpid())), *command]


def main(argv: list[str]) -> int:
    """Become the command; returns only if it cannot be started."""
    return become(int(argv[1]), argv[2:])


def become(parent: int, command: list[str]) -> int:
    """Become the command, tied to the life of `parent`; return the status if it cannot."""
    if not die_with_parent(parent):
        return 1
    with contextlib.suppress(OSError):  # only Linux has it; without it the watch still holds
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv))
