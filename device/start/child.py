"""Starts a command that does not outlive the process that starts it.

    python -I .../device/start device.start.child PARENT_PID CGROUP COMMAND...

This process ties its life to that of its parent, enters the control group (an empty name: none),
makes itself the first choice of the kernel when memory runs out, and becomes the command.
"""

import os
import sys
from pathlib import Path

from device.start.command import module_command
from device.start.guard import die_with_parent

_OOM_SCORE = "500"  # of 1000: the kernel ends a pipeline before the agent


def guarded(command: tuple[str, ...], cgroup: str = "") -> list[str]:
    """Return the command line that runs `command` tied to the life of this process.

    `cgroup`: folder of the control group that it runs in. Linux ties a process to the thread that
    starts it, so start it from one that lasts.
    """
    return [*module_command("device.start.child", str(os.getpid()), cgroup), *command]


def main(argv: list[str]) -> int:
    """Become the command; returns only if it cannot be started."""
    parent, cgroup, command = int(argv[1]), argv[2], argv[3:]
    if not die_with_parent(parent):
        return 1
    try:
        if cgroup:
            Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
        if sys.platform == "linux":
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    except OSError as error:
        print(f"cannot limit the memory of {command[0]}: {error}", file=sys.stderr)
        return 126
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv))
