"""Calls of kernels: which kernel, compiled how, started over which grid with which arguments.

A call speaks of tensors by name, and a piece of work may have several ways to be done.
`toolkit.gpu.lower` turns them into the launches of an engine once every tensor has its place.
"""

from dataclasses import dataclass, field

from toolkit.gpu.ir.gemm import GemmProblem
from toolkit.plugins import Constant

# Every kernel for all GPUs, and its module in `toolkit.gpu.kernels`. A GPU generation has others
# (`toolkit.gpu.generations.kernel_modules`).
KERNELS: dict[str, str] = {
    "gemm": "gemm",
    "split_k_reduce": "gemm",
    "depthwise": "depthwise",
    "depthwise_int8": "depthwise_int8",
    "max_pool": "max_pooling",
    "pool": "pooling",
    "global_average": "pooling",
    "elementwise": "elementwise",
    "transpose_tiles": "elementwise",
    "gather": "gather",
    "scatter": "gather",
    "pad": "pad",
    "space_to_depth": "pad",
    "resample": "resample",
    "grid_sample": "grid_sample",
    "scan": "scan",
    "softmax": "softmax",
    "normalize": "normalization",
    "normalize_locally": "normalization",
    "pool3d": "pooling3d",
    "fill": "pooling3d",
    "unpool": "pooling3d",
    "attention": "attention",
    "reduce": "reduction",
    "find_extreme": "reduction",
    "top_k": "ranking",
}


@dataclass(frozen=True, slots=True)
class KernelSource:
    """The file of a plugin that holds a kernel; `title` is the plugin's operator."""

    title: str
    file: str
    sha256: str

    @property
    def in_cuda(self) -> bool:
        """Whether it is CUDA C++; else it is Triton."""
        return self.file.endswith(".cu")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel to compile; equal specs share one cubin.

    `signature`: the run-time parameters with Triton's types, such as ("x", "*fp16:16"); ":16" says
    that the value is a multiple of 16. "SHAPE.1" is a member of the constant SHAPE, which is a
    tuple; members of members go on with ".". `constants`: all other parameters, by name, with None
    for such members.
    `exact`: products are rounded before they are added, so that INT8 is the same bits everywhere.
    `source` None: a kernel of the toolkit.
    """

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    warps: int
    stages: int
    exact: bool = False
    source: KernelSource | None = None

    @property
    def title(self) -> str:
        """The kernel; of `gemm` with its loader and layout, such as "gemm strided nchw"."""
        constants = dict(self.constants)
        if "LOADER" not in constants:
            return self.kernel
        nchw = constants.get("Y_COLUMN", self.signature) is not None
        return f"{self.kernel} {constants['LOADER']}{' nchw' if nchw else ''}"


@dataclass(frozen=True, slots=True)
class InTensor:
    """A pointer into an allocation of the workspace, `offset` bytes after its start."""

    base: str
    offset: int


@dataclass(frozen=True, slots=True)
class InWeights:
    """A pointer into the segment's weights, `offset` bytes after their start."""

    offset: int


Argument = InTensor | InWeights | int


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One start of a kernel. `reads` and `writes` are the allocations that it touches."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


Tactic = tuple[KernelLaunch, ...]
"""One way to do a piece of work: calls that run one after the other."""


@dataclass(frozen=True, slots=True)
class TunableOp:
    """What the ONNX nodes `nodes` compute, in one of several ways; the first is the cost model's.

    All tactics give the same result, up to the order of sums in floating point. `problem`: the
    matrix product that it is, where it is one.
    """

    nodes: tuple[str, ...]
    tactics: tuple[Tactic, ...]
    problem: GemmProblem | None = field(default=None, compare=False, repr=False)

    @property
    def touched(self) -> tuple[str, ...]:
        """The allocations that any of its tactics reads or writes."""
        calls = (call for tactic in self.tactics for call in tactic)
        return tuple(dict.fromkeys(base for call in calls for base in (*call.reads, *call.writes)))
