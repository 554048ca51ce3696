"""Which TensorRT takes which form of a segment, with which flags.

Source: the Python API of 8.6.1, 10.3.0, 10.7.0 and 11.4.0, and the release notes on the DLA.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from device.errors import SessionError

Version = tuple[int, ...]
FormName = Literal["ranged", "typed"]


class _Row(Protocol):
    @property
    def first(self) -> Version: ...

    @property
    def end(self) -> Version | None: ...


_R = TypeVar("_R", bound=_Row)


@dataclass(frozen=True, slots=True)
class Release:
    """TensorRT from `first` on, before `end`. `form` None: it has no DLA on Jetson, `why`.

    `network_flags`, `builder_flags`, `parser_flags`: members of NetworkDefinitionCreationFlag,
    BuilderFlag and OnnxParserFlag. `int8_flags` are added for a segment with ranges. GPU_FALLBACK
    is in no row: a layer that the DLA refuses must fail the build, not run on the GPU in silence.

    ADJUST_FOR_DLA (from 10.16 on) lets the parser rewrite layers so that the DLA takes them.
    NVIDIA's page on strongly typed networks for DLA sets it for every ONNX file; before 11.4.1 no
    release with a DLA has it.
    """

    first: Version
    end: Version | None
    form: FormName | None
    network_flags: tuple[str, ...] = ()
    builder_flags: tuple[str, ...] = ()
    int8_flags: tuple[str, ...] = ()
    parser_flags: tuple[str, ...] = ()
    why: str = ""


RELEASES: tuple[Release, ...] = (
    Release((0,), (8, 5), None, why="it is older than 8.5, which JetPack 5.1 brings"),
    Release((8, 5), (10,), "ranged", ("EXPLICIT_BATCH",),
            ("FP16", "DIRECT_IO", "OBEY_PRECISION_CONSTRAINTS"), ("INT8",)),
    Release((10,), (10, 8), "ranged", (),
            ("FP16", "DIRECT_IO", "OBEY_PRECISION_CONSTRAINTS"), ("INT8",)),
    Release((10, 8), (11, 4, 1), None,
            why="10.8 to 11.4.0 have no DLA on Jetson; JetPack 6 has 10.3, 7.2.2 has 11.4.1"),
    Release((11, 4, 1), None, "typed", ("STRONGLY_TYPED",), ("DIRECT_IO",),
            parser_flags=("ADJUST_FOR_DLA",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuRelease:
    """TensorRT for the GPU from `first` on, before `end`. `form` None: it has none, `why`.

    `builder_flags`: by the precision of the segment. TF32 is on by default and cleared: the kernels
    of an engine in FP32 have its digits.
    """

    first: Version
    end: Version | None
    form: FormName | None
    network_flags: tuple[str, ...] = ()
    builder_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    why: str = ""


_IMPLICIT = {
    "fp32": (),
    "fp16": ("FP16",),
    "int8": ("FP16", "INT8", "OBEY_PRECISION_CONSTRAINTS"),
}

GPU_RELEASES: tuple[GpuRelease, ...] = (
    GpuRelease((0,), (8, 5), None, why="it is older than 8.5, which JetPack 5.1 brings"),
    GpuRelease((8, 5), (10,), "ranged", ("EXPLICIT_BATCH",), _IMPLICIT),
    GpuRelease((10,), (10, 8), "ranged", (), _IMPLICIT),
    GpuRelease((10, 8), None, "typed", ("STRONGLY_TYPED",)),
)


def find_release(version: str) -> Release:
    """Return the row of a version such as "10.3.0". Raises SessionError: it is no version."""
    return _find(RELEASES, version)


def find_gpu_release(version: str) -> GpuRelease:
    """Return the row for the GPU. Raises SessionError: it is no version."""
    return _find(GPU_RELEASES, version)


def _find(rows: Sequence[_R], version: str) -> _R:
    try:
        number = tuple(int(part) for part in version.split(".")[:3])
    except ValueError as error:
        raise SessionError(
            f"TensorRT calls itself version {version!r}, which is not numbers with dots between; "
            "install the TensorRT of this JetPack"
        ) from error
    return next(
        row for row in rows if row.first <= number and (row.end is None or number < row.end)
    )
