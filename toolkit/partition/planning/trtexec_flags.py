"""Which trtexec has which flag.

Source: `samples/common/sampleOptions.cpp` of NVIDIA/TensorRT at the tag of each release;
`sampleEngines.cpp` on wildcards.
"""

from collections.abc import Mapping

from toolkit.dla.rules.rule import Version

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
    "--buildOnly": ((0,), (10,)),
    "--skipInference": ((8, 6), None),
    "--layerDeviceTypes": ((8, 6), None),
    "--stronglyTyped": ((9,), (11,)),  # 11 takes it and does nothing: all networks are
    "--fp16": ((0,), (11,)),
    "--int8": ((0,), (11,)),
    "--calib": ((0,), (11,)),
    "--layerPrecisions": ((8, 4), (11,)),
    "--precisionConstraints": ((8, 4), (11,)),
}
"""Flag -> the first release with it, and the first without it again."""

WILDCARDS: Version = (10,)
"""The first release that takes one `*` in the name of a layer; older ones compare whole names."""


def has_flag(version: Version, flag: str) -> bool:
    """Whether a release's trtexec knows a flag of FLAGS."""
    first, end = FLAGS[flag]
    return first <= version and (end is None or version < end)
