"""Lets a kernel start while the one before it in the stream still ends (sm_90 and later).

PTX ISA, "griddepcontrol": `wait` holds a block until the kernels before have ended and their memory
is visible; a kernel says it before it touches memory. Its blocks may then come to the GPU when the
last block of the kernel before has ended. `launch_dependents`, by which they may come sooner, is
not said: they would crowd on the SMs that are free already (docs/PERFORMANCE.md).

Every block of every kernel that starts early waits, so a kernel that has ended says that all before
it have ended, too.
"""

from toolkit.gpu.errors import CompileError

FIRST_SM = 90  # PTX ISA, "griddepcontrol", target notes
_WAIT = "griddepcontrol.wait;"


def can_wait(sm: int) -> bool:
    """Whether kernels of this SM can wait for the ones before by themselves."""
    return sm >= FIRST_SM


def waits(ptx: str) -> bool:
    """Whether a kernel does."""
    return _WAIT in ptx


def with_wait(ptx: str) -> str:
    """Return PTX whose one kernel begins with waiting for the kernels before it.

    Raises CompileError where the text does not hold one kernel.
    """
    head, *bodies = ptx.split(".visible .entry ")
    if len(bodies) != 1:
        raise CompileError(f"the compiler made {len(bodies)} kernels, one was asked for")
    declared, opened, body = bodies[0].partition("\n{\n")
    if not opened:
        raise CompileError("the compiler's PTX has no body of the kernel")
    return f"{head}.visible .entry {declared}{opened}\t{_WAIT}\n{body}"
