"""The releases of TensorRT that read an export, and which trtexec has which flag.

Source: trtexec's `sampleOptions.cpp` at the tag of each release, and the support matrices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Era = Literal["implicit", "explicit"]
Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """A TensorRT with DLA on some JetPack. `max_opset`: the newest that its ONNX parser reads.

    Era "implicit": ranges come from a calibration cache. "explicit": strongly typed networks with
    Q/DQ, and no calibrators.
    """

    version: str
    era: Era
    jetpack: str
    max_opset: int

    @property
    def number(self) -> Version:
        """The version as numbers, which compare."""
        return tuple(int(part) for part in self.version.split("."))


RELEASES: tuple[Release, ...] = (
    Release("8.5.2", "implicit", "5.1", 17),
    Release("8.6.2", "implicit", "6.0", 17),
    Release("10.3.0", "implicit", "6.1 and 6.2", 20),
    Release("10.7.0", "implicit", "6, as a package of its own", 20),
    Release("11.4.1", "explicit", "7.2.2", 20),
)
"""Oldest first. 10.8 to 11.3 have no JetPack build with DLA."""

FLAGS: Mapping[str, tuple[Version, Version | None]] = {
    "--onnx": ((0,), None),
    "--saveEngine": ((0,), None),
    "--minShapes": ((0,), None),
    "--optShapes": ((0,), None),
    "--maxShapes": ((0,), None),
    "--useDLACore": ((0,), None),
    "--allowGPUFallback": ((0,), None),
    "--memPoolSize": ((8, 4), None),
    "--inputIOFormats": ((0,), None),
    "--outputIOFormats": ((0,), None),
    "--buildOnly": ((0,), (8, 6)),
    "--skipInference": ((8, 6), None),
    "--layerDeviceTypes": ((8, 6), None),
    "--fp16": ((0,), (11,)),
    "--int8": ((0,), (11,)),
    "--calib": ((0,), (11,)),
    "--layerPrecisions": ((8, 4), (11,)),
    "--precisionConstraints": ((8, 4), (11,)),
}
"""Flag -> the first release with it, and the first without it again."""


def has_flag(release: Release, flag: str) -> bool:
    """Whether the release's trtexec knows a flag of FLAGS."""
    first, end = FLAGS[flag]
    return first <= release.number and (end is None or release.number < end)
