"""Launches of kernels: views and sizes -> arguments, types and compile-time constants."""

from collections.abc import Mapping, Sequence

from toolkit.gpu.ir.dtypes import ELEMENT_TYPES
from toolkit.gpu.ir.launch import Argument, InTensor, InWeights, KernelLaunch, KernelSpec
from toolkit.gpu.ir.view import View
from toolkit.gpu.shapes.sizes import Size, ceil_div
from toolkit.plugins import Constant

WEIGHTS = ""  # the base of views into the weights


def make_launch(
    kernel: str,
    grid: tuple[int, int, int],
    parameters: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
    *,
    writes: Sequence[View],
    warps: int = 4,
    stages: int = 1,
) -> KernelLaunch:
    """Return a kernel launch.

    `parameters` by name, None for absent tensors. A dynamic size in a constant becomes a run-time
    parameter. `writes`: the tensors that the kernel writes; it reads the others.
    """
    absent = {name: None for name, value in parameters.items() if value is None}
    present = {name: value for name, value in parameters.items() if value is not None}
    for name, value in constants.items():
        present |= _dynamic_sizes(name, value)
    arguments = {name: _argument(value) for name, value in present.items()}
    signature = tuple((n, _triton_type(present[n], arguments[n])) for n in present)
    spec = KernelSpec(
        kernel,
        signature,
        tuple(sorted({**absent, **_fixed_constants(constants)}.items())),
        warps,
        stages,
        exact=any(isinstance(v, View) and v.scale is not None for v in present.values()),
    )
    written = {view.base for view in writes}
    read = {v.base for v in present.values() if isinstance(v, View)} - {WEIGHTS} - written
    return KernelLaunch(
        spec, grid, tuple(arguments.values()), tuple(sorted(read)), tuple(sorted(written))
    )


def element_launch(
    kernel: str,
    y: View,
    parameters: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
    *,
    block: int,
    over: View | None = None,
) -> KernelLaunch:
    """Return the launch of a kernel that writes `y`, with `block` elements of y to a block.

    `over`: the tensor whose elements are counted, where it is another.
    """
    elements = (over or y).elements
    return make_launch(
        kernel,
        (ceil_div(elements, block), 1, 1),
        {**parameters, "y": y, "elements": elements},
        {**constants, "BLOCK": block},
        writes=(y,),
    )


def _dynamic_sizes(path: str, value: Constant) -> dict[str, View | int]:
    """Return the dynamic sizes in a constant by their path, such as "SHAPE.1"."""
    if isinstance(value, Size):
        return {path: value}
    sizes: dict[str, View | int] = {}
    for at, member in enumerate(value if isinstance(value, tuple) else ()):
        sizes |= _dynamic_sizes(f"{path}.{at}", member)
    return sizes


def _fixed_constants(constants: Mapping[str, Constant]) -> dict[str, Constant]:
    """Return the constants without dynamic sizes; None stands for such members of tuples."""

    def cleared(value: Constant) -> Constant:
        if isinstance(value, tuple):
            return tuple(cleared(member) for member in value)
        return None if isinstance(value, Size) else value

    return {n: cleared(value) for n, value in constants.items() if not isinstance(value, Size)}


def _argument(value: View | int) -> Argument:
    if isinstance(value, int):
        return value
    offset = value.offset * value.item_bytes
    return InWeights(offset) if value.base == WEIGHTS else InTensor(value.base, offset)


def _triton_type(value: View | int, argument: Argument) -> str:
    """Return Triton's type of a parameter, with ":16" where its value is a multiple of 16."""
    name = "i32" if isinstance(value, int) else ELEMENT_TYPES[value.dtype].pointer
    aligned = argument if isinstance(argument, int) else argument.offset
    return f"{name}:16" if aligned % 16 == 0 else name
