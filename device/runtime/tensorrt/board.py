"""What a finished plan depends on, read from the board's files.

A plan of TensorRT runs only with the TensorRT, the DLA compiler, the L4T and the SoC that it was
built with, and its tactics were timed in one power mode.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from device.board_files import dla_cores, l4t_of, read_text, tensorrt_version

_COMPILERS = (
    "usr/lib/aarch64-linux-gnu/nvidia/libnvdla_compiler.so",
    "usr/lib/aarch64-linux-gnu/tegra/libnvdla_compiler.so",
)


@dataclass(frozen=True, slots=True)
class Board:
    """The software and hardware of a board; "" and 0 where a part is missing.

    `dla_compiler`: the SHA-256 of libnvdla_compiler.so, which carries no version. `power_mode`:
    nvpmodel's number.
    """

    tensorrt: str
    dla_compiler: str
    l4t: str
    soc: str
    dla_cores: int
    power_mode: str


def read_board(root: Path = Path("/")) -> Board:
    """Read the board whose file system begins at `root`."""
    return Board(
        tensorrt=tensorrt_version(),
        dla_compiler=_digest(root),
        l4t=l4t_of(read_text(root / "etc/nv_tegra_release")),
        soc=_soc(read_text(root / "proc/device-tree/compatible")),
        dla_cores=dla_cores(root),
        power_mode=_mode(read_text(root / "var/lib/nvpmodel/status")),
    )


def _soc(text: str) -> str:
    """The last name of the device tree's list is the SoC: nvidia,tegra234."""
    names = [name for name in text.split("\0") if name.strip()]
    return names[-1].rpartition(",")[2] if names else ""


def _mode(text: str) -> str:
    match = re.search(r"pmode:(\d+)", text)
    return match[1] if match else ""


def _digest(root: Path) -> str:
    for name in _COMPILERS:
        try:
            return hashlib.sha256((root / name).read_bytes()).hexdigest()
        except OSError:
            continue
    return ""
