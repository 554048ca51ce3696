"""Kernel launches and tunable ops: the result of lowering.

Launches refer to allocations by name, and an op may have several tactics.
`toolkit.gpu.compile_segment` turns them into the launches of an engine once the workspace is
planned.
"""

from dataclasses import dataclass

from toolkit.plugins import Constant

# The kernels for all GPUs by their module in `toolkit.gpu.kernels`, which most are alone in.
_MODULES = {
    "gemm": ("gemm", "resident_gemm", "matrix_vector", "split_k_reduce"),
    "int4": ("int4_gemm",),
    "max_pooling": ("max_pool",),
    "pooling": ("pool", "fill", "unpool", "global_average_pool"),
    "elementwise": ("elementwise", "transpose_tiles"),
    "frame": ("frame_to_input",),
    "gather": ("gather", "scatter"),
    "pad": ("pad", "space_to_depth"),
    "normalization": ("normalize", "local_response_norm"),
    "reduction": ("reduce", "arg_reduce"),
    "suppression": ("box_candidates", "box_order", "suppress", "box_rows"),
    **{name: (name,) for name in ("attention", "depthwise", "depthwise_int8", "grid_sample")},
    **{name: (name,) for name in ("resample", "roi_align", "scan", "softmax")},
    "top_k": ("top_k", "select_top"),
}
KERNELS: dict[str, str] = {kernel: module for module, names in _MODULES.items() for kernel in names}
"""The module of every kernel."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """The file of a plugin's kernel; `title`: the plugin's operator."""

    title: str
    file: str
    sha256: str

    @property
    def in_cuda(self) -> bool:
        """Whether the file is CUDA C++, not Triton."""
        return self.file.endswith(".cu")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel to compile; equal specs share one cubin.

    `signature`: the run-time parameters with Triton's types, such as ("x", "*fp16:16"); ":16" says
    that the value is a multiple of 16. "SHAPE.1" is a member of the constant SHAPE, which is a
    tuple; paths may be deeper. `constants`: all other parameters, by name, with None for such
    members.
    `exact`: without fused multiply-add, so that INT8 results are the same bits everywhere.
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
    """A kernel launch; `reads` and `writes` are allocations."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


Tactic = tuple[KernelLaunch, ...]
"""One implementation of an op: launches that run in order."""


@dataclass(frozen=True, slots=True)
class TunableOp:
    """What the ONNX nodes `nodes` compute; the first tactic is the cost model's choice.

    All tactics give the same result, up to the order of floating-point sums.
    """

    nodes: tuple[str, ...]
    tactics: tuple[Tactic, ...]

    @property
    def touched(self) -> tuple[str, ...]:
        """The allocations that any tactic reads or writes."""
        launches = (launch for tactic in self.tactics for launch in tactic)
        bases = (base for launch in launches for base in (*launch.reads, *launch.writes))
        return tuple(dict.fromkeys(bases))
