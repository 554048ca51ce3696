"""Ends a process when its parent ends, however that happens.

A process that is killed cannot stop its children, and a camera takes one reader only.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> bool:
    """Ask the kernel to kill this process when its parent ends; False if it has ended already.

    `parent`: the process id of the parent, as it said. Linux ties this to the thread that started
    this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent  # looked at after the kernel was asked
