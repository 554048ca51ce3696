"""Power and clocks of a Jetson, read from its files below a root folder.

Power: the kernel's drivers of current monitors, by rail. Of the INA3221
(Documentation/hwmon/ina3221.rst) each of three channels has `in<n>_label`, `in<n>_input` in mV and
`curr<n>_input` in mA; Jetson boards name the channels after their rails: VDD_IN, VDD_CPU_GPU_CV,
VDD_SOC and others. The INA238 (Documentation/hwmon/ina238.rst) has `power1_input` in uW and no
channels; AGX Thor has one in front of all rails, whose power jetson_stats and tegrastats call VIN
(rbonghi/jetson_stats#900).
Clocks: devfreq of the GPU in Hz, and cpufreq of a core in kHz. `jetson_clocks` sets the lowest of
both to the highest.
"""

import statistics
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from device.board_files import gpu_devfreq, read_text

_CPU = "sys/devices/system/cpu/cpu0/cpufreq"
_PERIOD_S = 0.05


def rails_watts(root: Path = Path("/")) -> dict[str, float]:
    """Return the power of each rail now, in W; empty where there are no such sensors."""
    watts: dict[str, float] = {}
    for folder in sorted(root.glob("sys/class/hwmon/hwmon*")):
        read = _MONITORS.get(read_text(folder / "name"))
        if read is not None:
            watts |= read(folder)
    return watts


def _ina3221(folder: Path) -> dict[str, float]:
    watts = {}
    for channel in "123":
        rail = read_text(folder / f"in{channel}_label")
        millivolts = _number(folder / f"in{channel}_input")
        milliamperes = _number(folder / f"curr{channel}_input")
        if millivolts is not None and milliamperes is not None and rail not in ("", "NC"):
            watts[rail] = max(0.0, millivolts * milliamperes / 1e6)
    return watts


def _ina238(folder: Path) -> dict[str, float]:
    microwatts = _number(folder / "power1_input")
    rail = read_text(folder / "label") or "VIN"  # a label only where the device tree has one
    return {} if microwatts is None else {rail: max(0.0, microwatts / 1e6)}


_MONITORS: Mapping[str, Callable[[Path], dict[str, float]]] = {
    "ina3221": _ina3221,
    "ina238": _ina238,
}


class PowerSampler:
    """Reads the rails again and again in a thread; use it in a `with`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._samples: list[dict[str, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "PowerSampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def mean_watts(self) -> dict[str, float]:
        """The mean power of each rail, in W."""
        rails = {rail for sample in self._samples for rail in sample}
        return {
            rail: statistics.fmean(sample[rail] for sample in self._samples if rail in sample)
            for rail in sorted(rails)
        }

    def _read(self) -> None:
        while True:
            sample = rails_watts(self._root)
            if sample:
                self._samples.append(sample)
            if not sample or self._stop.wait(_PERIOD_S):  # a board without sensors has none later
                return


def clocks_mhz(root: Path = Path("/")) -> dict[str, float]:
    """Return the clocks of GPU and first CPU core: now, and the lowest and highest allowed."""
    clocks: dict[str, float] = {}
    gpu = gpu_devfreq(root / "sys")
    rows = [("cpu0", root / _CPU, "scaling_{}_freq", 1e3)]
    if gpu is not None:
        rows.append(("gpu", gpu, "{}_freq", 1e6))
    for name, folder, pattern, unit in rows:
        for when, word in (("now", "cur"), ("min", "min"), ("max", "max")):
            value = _number(folder / pattern.format(word))
            if value is not None:
                clocks[f"{name} {when}"] = value / unit
    return clocks


def clocks_locked(clocks: dict[str, float]) -> bool:
    """Whether GPU and CPU are held at their highest clock, as jetson_clocks does.

    A GPU whose clocks cannot be read is not held.
    """
    names = {name.partition(" ")[0] for name in clocks}
    return "gpu" in names and all(
        clocks.get(f"{name} min", 0.0) == clocks.get(f"{name} max", -1.0) for name in names
    )


def _number(path: Path) -> float | None:
    text = read_text(path)
    try:
        return float(text)
    except ValueError:
        return None
