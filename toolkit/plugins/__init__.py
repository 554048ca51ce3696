"""Operators that users add: an ONNX function, and kernels for the GPU.

A plugin is a value; a file for `tandem build --plugin` defines a tuple `PLUGINS` of them. The ONNX
function gives the operator's name and attributes. It runs without a GPU, in calibration and in
tests. On the GPU the operator is one node, computed by the plugin's own kernels.

load        plugin file -> its plugins
functions   plugins in a model: ONNX functions beside the graph, output shapes
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

import onnx

__all__ = ["Attribute", "Constant", "Kernel", "Launch", "Node", "Plugin", "Shape", "Tensor"]

Constant = Union[  # noqa: UP007  (it names itself)
    None, bool, int, float, str, tuple["Constant", ...]
]
"""A compile-time parameter of a kernel."""
Shape = tuple[int, ...]
Attribute = int | float | str | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """An operand or a result; `dtype` is a numpy name, such as "float16".

    Row-major and contiguous.
    """

    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a plugin's operator; an omitted operand is None.

    `outputs` is empty when shapes are inferred. `attributes` includes defaults.
    """

    name: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, Attribute]

    def input(self, index: int) -> Tensor:
        """Return a required operand; raises ValueError if it is omitted."""
        operand = self.inputs[index] if index < len(self.inputs) else None
        if operand is None:
            raise ValueError(f"node {self.name!r} has no input {index}")
        return operand

    def number(self, name: str) -> float:
        """Return a numeric attribute; raises ValueError if it is not a number."""
        value = self.attributes.get(name)
        if not isinstance(value, (int, float)):
            raise ValueError(f"node {self.name!r} has no number {name!r}")
        return value


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of a source file: Triton in a ".py", CUDA C++ in a ".cu".

    In CUDA C++ it is `extern "C" __global__`. Changes of files that it includes or imports are not
    detected.
    """

    file: Path
    function: str


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel launch over `grid` blocks of `warps` * 32 threads.

    `arguments`: all run-time parameters in the order of the kernel; integers have 32 bits.
    `constants`: the other parameters in Triton, macros in CUDA C++; `stages`: Triton only.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: Mapping[str, Tensor | int]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Plugin:
    """An operator; `function` gives its domain, name, operands and attributes.

    `shapes` returns the output shapes of a node. `launches` returns its kernel launches in order;
    if it raises toolkit.gpu.errors.NotCoveredError, the node runs portable. `floats`: supported
    floating-point types, the best first; others are converted before and after.
    """

    function: onnx.FunctionProto
    shapes: Callable[[Node], Sequence[Shape]]
    launches: Callable[[Node], Sequence[Launch]]
    floats: tuple[str, ...] = ("float16", "float32")

    @property
    def title(self) -> str:
        """Domain and name, such as "tandem.example::RmsNormSilu"."""
        return f"{self.function.domain}::{self.function.name}"
