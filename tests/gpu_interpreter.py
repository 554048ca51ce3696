"""Runs lowered GPU segments on the CPU, in Triton's interpreter, on plain numpy memory.

Import it before anything imports Triton: kernels are made interpretable as they are decorated. In
tests `conftest.py` sees to it.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from device.engine.cuda_sizes import evaluate
from toolkit.gpu.codegen.kernel_files import kernel_function
from toolkit.gpu.ir.dtypes import ELEMENT_TYPES
from toolkit.gpu.ir.launch import Argument, InTensor, InWeights, KernelLaunch
from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.shapes.sizes import amount


def hurry() -> None:
    """Spare Triton's interpreter more than half of its time; no result changes.

    It makes each sum and product of integers again in 64 bits, to find overflows that it does not
    report: its assertions are off. And at each call of a function in a kernel it searches the whole
    language for what numpy does instead; what the first such call has replaced stays replaced, and
    the rest the kernel itself has replaced.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    called = set()

    def call(function, *arguments, **named):
        if function.fn not in called:
            called.add(function.fn)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call


if find_spec("triton") is not None:
    hurry()

POISON = 0xFF  # a NaN in every float type: what nobody wrote shows


class Pointer:
    """Just what the interpreter asks of a tensor: an address and a type."""

    def __init__(self, address: int, dtype: str) -> None:
        self.address = address
        self.dtype = f"torch.{dtype}"

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> "Pointer":
        return self

    def cpu(self) -> "Pointer":
        return self

    def copy_(self, _: "Pointer") -> None: ...

    def new_empty(self, *_: object, **__: object) -> "Pointer":
        return Pointer(self.address, self.dtype.removeprefix("torch."))

    def set_(self, *_: object) -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return ()

    def stride(self) -> tuple[int, ...]:
        return ()


DTYPES = {row.pointer: row.name for row in ELEMENT_TYPES.values() if row.kind != "bool"}


def run(
    program: KernelProgram, feeds: Mapping[str, np.ndarray], point: Sequence[int] = ()
) -> dict[str, np.ndarray]:
    """Run a segment's launches in order on poisoned memory and return its outputs.

    `point`: the sizes of the dynamic dimensions; formulas are read as a device reads them.
    """
    workspace = np.full(program.workspace_bytes, POISON, np.uint8)
    weights = np.frombuffer(program.weights or b"\0", np.uint8)
    for name, view in program.inputs.items():
        at = program.offsets[view.base]
        data = np.ascontiguousarray(feeds[name], view.dtype)
        workspace[at : at + data.nbytes] = data.reshape(-1).view(np.uint8)
    for launch in program.launches:
        start(launch, program, workspace.ctypes.data, weights.ctypes.data, point)
    outputs = {}
    for name, view in program.outputs.items():
        at = program.offsets[view.base]
        shape = [evaluate(amount(n), point) for n in view.shape]
        size = int(np.prod(shape)) * view.item_bytes
        outputs[name] = workspace[at : at + size].view(view.dtype).reshape(shape).copy()
    return outputs


def start(
    launch: KernelLaunch,
    program: KernelProgram,
    workspace: int,
    weights: int,
    point: Sequence[int] = (),
) -> None:
    def value(argument: Argument, kind: str) -> object:
        dtype = DTYPES.get(kind.removesuffix(":16"), "")
        if isinstance(argument, InTensor):
            offset = evaluate(amount(argument.offset), point)
            return Pointer(workspace + program.offsets[argument.base] + offset, dtype)
        if isinstance(argument, InWeights):
            return Pointer(weights + evaluate(amount(argument.offset), point), dtype)
        return evaluate(amount(argument), point)

    kernel = kernel_function(launch.spec.kernel, launch.spec.source)
    arguments = {
        name: value(argument, kind)
        for (name, kind), argument in zip(launch.spec.signature, launch.arguments, strict=True)
    }
    grid = tuple(evaluate(amount(side), point) for side in launch.grid)
    kernel[grid](**_bind(dict(launch.spec.constants), arguments))


def _bind(constants: Mapping[str, object], arguments: Mapping[str, object]) -> dict[str, object]:
    """Return all parameters by name; arguments replace members of constant tuples."""

    def placed(value: object, members: list[tuple[list[str], object]]) -> object:
        if not members:
            return value
        if not members[0][0]:
            return members[0][1]
        assert isinstance(value, tuple)
        return tuple(
            placed(member, [(path[1:], new) for path, new in members if path[0] == str(at)])
            for at, member in enumerate(value)
        )

    paths = [(name.split("."), value) for name, value in arguments.items()]
    names = dict.fromkeys((*constants, *(path[0] for path, _ in paths)))
    return {
        name: placed(constants.get(name), [(p[1:], new) for p, new in paths if p[0] == name])
        for name in names
    }
