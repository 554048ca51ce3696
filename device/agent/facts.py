"""What the device is, for rollouts that choose by capability; read seldom, as most of it stays."""

import os
import platform
import shutil
from pathlib import Path

import msgspec

from device import board_files
from device.agent.config import AgentConfig
from device.profile import load_jetpacks
from device.protocol.documents import DeviceFacts
from device.update.agent_payload import BoardSoftware
from device.update.slots import SLOTS, SlotState

FACTS_S = 600.0  # between two looks
_MIB = 1024**2
_FREE_STEP_MB = 64  # the free room is told in such steps: a log that grows is no news


def read_facts(config: AgentConfig, root: Path = Path("/")) -> DeviceFacts:
    """Read the facts of the board whose file system begins at `root`, without its releases.

    `free_mb` is the room for releases, in MiB, rounded down.
    """
    software = board_software(root)
    mode = board_files.power_mode_number(root)
    return DeviceFacts(
        module=board_files.read_text(root / "proc/device-tree/model"),
        jetpack=jetpack_of(software.l4t),
        tensorrt=board_files.tensorrt_version(),
        dla_cores=board_files.dla_cores(root),
        memory_mb=board_files.memory_mb(root)[0],
        free_mb=_free_mb(Path(config.state_dir)),
        power_mode=board_files.power_mode_name(mode, root) or mode,
        labels=config.labels,
        python=software.python,
        machine=software.machine,
        glibc=software.glibc,
        l4t=software.l4t,
    )


def board_software(root: Path = Path("/")) -> BoardSoftware:
    """Return what a release of the agent is compared with."""
    try:
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
    except (OSError, ValueError):  # another C library
        glibc = ""
    return BoardSoftware(
        python=platform.python_version(),
        machine=platform.machine(),
        glibc=glibc,
        l4t=board_files.l4t_of(board_files.read_text(root / "etc/nv_tegra_release")),
    )


def jetpack_of(l4t: str) -> str:
    """Return the JetPack that an L4T release belongs to, "" if it is not known."""
    if not l4t:
        return ""
    return next((jetpack.version for jetpack in load_jetpacks() if l4t in jetpack.l4t), "")


def _free_mb(folder: Path) -> int:
    try:
        free_mb = shutil.disk_usage(folder).free // _MIB
    except OSError:
        return 0
    return free_mb // _FREE_STEP_MB * _FREE_STEP_MB


class Facts:
    """The facts as they were last read."""

    def __init__(self, config: AgentConfig, root: Path = Path("/")) -> None:
        self._config = config
        self._root = root
        self._facts = DeviceFacts()
        self._due_s = float("-inf")

    def of(self, state: SlotState, now_s: float) -> DeviceFacts:
        """Return the facts with the releases in the slots; read them again if that is due."""
        if now_s >= self._due_s:
            self._due_s = now_s + FACTS_S
            self._facts = read_facts(self._config, self._root)
        records = (state.record(slot) for slot in SLOTS)
        bundles = tuple(record.sha256 for record in records if record is not None)
        return msgspec.structs.replace(self._facts, bundles=bundles)
