"""Programmatic dependent launch: a kernel starts while the one before it ends (sm_90 and later).

PTX ISA, "griddepcontrol": `wait` blocks until the previous kernels have completed and their memory
is visible; kernels begin with it. Their blocks may then be resident when the last block of the
previous kernel ends. `launch_dependents`, which would start them sooner, is not used: they would
crowd on the SMs that are free already (docs/performance_log.md).

Every block of every kernel that starts early waits, so when a kernel has completed, all before it
have completed, too.
"""

from toolkit.gpu.errors import CompileError

FIRST_SM = 90  # PTX ISA, "griddepcontrol", target notes
_WAIT = "griddepcontrol.wait;"


def can_wait(sm: int) -> bool:
    """Whether kernels of this SM can wait for previous ones."""
    return sm >= FIRST_SM


def waits(ptx: str) -> bool:
    """Whether a kernel waits for previous ones."""
    return _WAIT in ptx


def with_wait(ptx: str) -> str:
    """Return PTX whose kernel first waits for previous kernels.

    Raises CompileError: the text does not hold exactly one kernel.
    """
    head, *bodies = ptx.split(".visible .entry ")
    if len(bodies) != 1:
        raise CompileError(f"the compiler made {len(bodies)} kernels, expected 1")
    declared, opened, body = bodies[0].partition("\n{\n")
    if not opened:
        raise CompileError("the compiler's PTX has no body of the kernel")
    return f"{head}.visible .entry {declared}{opened}\t{_WAIT}\n{body}"
