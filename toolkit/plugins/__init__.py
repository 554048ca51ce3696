"""Operators that users add: what they compute, in ONNX, and how a GPU computes it.

A plugin is a value; a file that `tandem build --plugin` takes ends in a tuple `PLUGINS` of them.
The function in ONNX is what runs where there is no GPU, what calibration and tests run, and what
says how the operator is called and which attributes it has. On the GPU the operator is one node,
computed by the plugin's own kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

import onnx

Constant = Union[  # noqa: UP007  (it names itself)
    None, bool, int, float, str, tuple["Constant", ...]
]
"""A compile-time parameter of a kernel."""
Shape = tuple[int, ...]
Attribute = int | float | str | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """An operand or a result: its type in numpy's words, such as "float16", and its shape.

    Its elements lie in the order of the indices, without gaps.
    """

    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a plugin's operator; an operand that is left out is None.

    `outputs` are not known yet where shapes are asked for. `attributes` hold defaults too.
    """

    name: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, Attribute]

    def input(self, index: int) -> Tensor:
        """Return an operand that must be there; raises ValueError where it is left out."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise ValueError(f"node {self.name!r} has no input {index}")
        return found

    def number(self, name: str) -> float:
        """Return an attribute that is a number; raises ValueError where it is not."""
        value = self.attributes.get(name)
        if not isinstance(value, (int, float)):
            raise ValueError(f"node {self.name!r} has no number {name!r}")
        return value


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of a source file: Triton in a ".py", CUDA C++ in a ".cu".

    In CUDA C++ it is `extern "C" __global__`. The file stands by itself: what else it includes or
    imports is not watched for changes.
    """

    file: Path
    function: str


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a kernel over `grid` blocks of `warps` * 32 threads.

    `arguments`: all run-time parameters of the kernel in its order; an integer has 32 bits.
    `constants`: in Triton the other parameters, in CUDA C++ macros; `stages` is Triton's.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: Mapping[str, Tensor | int]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Plugin:
    """An operator; its domain, name, operands and attributes are those of `function`.

    `shapes` returns the shapes of a node's outputs. `launches` returns what computes a node, in
    order; it may raise toolkit.gpu.errors.NotCoveredError, and the node then runs portable.
    `floats`: the types that the kernels take for tensors of floating point, the best first; others
    are converted before and after.
    """

    function: onnx.FunctionProto
    shapes: Callable[[Node], Sequence[Shape]]
    launches: Callable[[Node], Sequence[Launch]]
    floats: tuple[str, ...] = ("float16", "float32")

    @property
    def title(self) -> str:
        """Domain and name, such as "tandem.example::RmsNormSilu"."""
        return f"{self.function.domain}::{self.function.name}"
