"""The step `machine`: versions, cores, clocks, memory and the power of an idle board."""

import platform
import shutil
import time
from pathlib import Path

from device.board_files import memory_mb, power_mode_name, power_mode_number, read_text
from device.runtime.cuda.driver import CudaError
from device.runtime.cuda.facts import GpuFacts, read_gpu
from device.runtime.tensorrt.board import read_board
from device.selftest.kit import Kit
from device.selftest.report import Machine
from device.selftest.sensors import (
    PowerSampler,
    clocks_locked,
    clocks_mhz,
)

_IDLE_S = 2.0


def run(kit: Kit, kit_folder: Path, folder: Path, item: str) -> Machine:
    """Read the board."""
    return read_machine(folder, idle_s=_IDLE_S)


def read_machine(disk: Path, *, root: Path = Path("/"), idle_s: float = 0.0) -> Machine:
    """Read the board whose file system begins at `root`; `disk`: where free space counts."""
    board = read_board(root)
    clocks = clocks_mhz(root)
    mode = power_mode_number(root)
    total, free = memory_mb(root)
    with PowerSampler(root) as power:
        time.sleep(idle_s)
    gpu, problem = _gpu()
    return Machine(
        model=read_text(root / "proc/device-tree/model"),
        soc=board.soc,
        l4t=board.l4t,
        python=platform.python_version(),
        tensorrt=board.tensorrt,
        dla_compiler=board.dla_compiler,
        dla_cores=board.dla_cores,
        power_mode=mode,
        power_mode_name=power_mode_name(mode, root),
        clocks_mhz=clocks,
        locked=clocks_locked(clocks),
        memory_mb=total,
        free_memory_mb=free,
        free_disk_mb=shutil.disk_usage(disk).free // 10**6,
        idle_watts=power.mean_watts,
        gpu=gpu,
        problem=problem,
    )


def _gpu() -> tuple[GpuFacts | None, str]:
    try:
        return read_gpu(), ""
    except CudaError as error:
        return None, f"no GPU: {error}"
