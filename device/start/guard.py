"""Ends a process when its parent ends, however that happens.

A process that is killed cannot stop its children, and a camera takes one reader only.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Ask the kernel for a signal when the parent ends; False if it has ended already.

    `parent`: its process id, as it said. Linux ties this to the thread that started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent  # looked at after the kernel was asked
