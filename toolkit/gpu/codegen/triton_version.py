"""Which Triton is installed, and whether it compiles these kernels."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from device.install_advice import pip_install
from toolkit.gpu.errors import CompileError

OLDEST_TRITON = (3, 8)  # the first whose kernels take tuples of constants; so in pyproject.toml


def has_compiler() -> bool:
    """Whether Triton is installed here, in whatever version."""
    return find_spec("triton") is not None


def check_compiler(triton: str | None = None) -> None:
    """Refuse a version of Triton that is too old: the installed one, or the one named.

    Raises CompileError. One that says no version, such as a checkout, is taken.
    """
    if triton is None:
        try:
            triton = version("triton")
        except PackageNotFoundError:
            return
    numbers = tuple(int(number) for number in re.findall(r"\d+", triton)[:2])
    if numbers and numbers < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        raise CompileError(
            f"Triton {'.'.join(map(str, numbers))} is too old: {oldest} or newer compiles these "
            f"kernels; {pip_install('gpu-build')}, or take it away with "
            "`pip uninstall triton` to build without GPU kernels"
        )
