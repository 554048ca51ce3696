"""Figures of this computer for ONBOARD_COMPUTER_STATUS, from /proc and /sys; what is not there is
sent as unknown."""

from pathlib import Path

from pipelines.sinks.mavlink import Value

CORES = 8
UNKNOWN_U8, UNKNOWN_I8, UNKNOWN_I16, UNKNOWN_U32 = 0xFF, 0x7F, 0x7FFF, 0xFFFFFFFF


class BoardStatus:
    """Reads figures; the load of a core is that since the last reading."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before: list[tuple[int, int]] = []

    def values(self, wall_ns: int) -> dict[str, Value]:
        """Return the fields of ONBOARD_COMPUTER_STATUS."""
        total_mib, used_mib = self._memory()
        loads = self._loads()
        return {
            "time_usec": wall_ns // 1000,
            "uptime": self._uptime_ms(),
            "ram_usage": used_mib,
            "ram_total": total_mib,
            **dict.fromkeys(("storage_type", "storage_usage", "storage_total"), (UNKNOWN_U32,) * 4),
            **dict.fromkeys(
                ("link_type", "link_tx_rate", "link_rx_rate", "link_tx_max", "link_rx_max"),
                (UNKNOWN_U32,) * 6,
            ),
            "fan_speed": (UNKNOWN_I16,) * 4,
            "cpu_cores": (loads + [UNKNOWN_U8] * CORES)[:CORES],
            "cpu_combined": (UNKNOWN_U8,) * 10,
            "gpu_cores": (UNKNOWN_U8,) * 4,
            "gpu_combined": (UNKNOWN_U8,) * 10,
            "temperature_board": self._temperature(),
            "temperature_core": (UNKNOWN_I8,) * CORES,
        }

    def _uptime_ms(self) -> int:
        words = self._read("proc/uptime").split()
        return int(float(words[0]) * 1000) & UNKNOWN_U32 if words else 0

    def _memory(self) -> tuple[int, int]:
        """Return total and used MiB."""
        rows = dict(line.split(":", 1) for line in self._read("proc/meminfo").splitlines())
        if "MemTotal" not in rows or "MemAvailable" not in rows:
            return UNKNOWN_U32, UNKNOWN_U32
        total, free = (int(rows[name].split()[0]) // 1024 for name in ("MemTotal", "MemAvailable"))
        return total, total - free

    def _loads(self) -> list[int]:
        """Return the load of each core in percent."""
        rows = [line.split() for line in self._read("proc/stat").splitlines()]
        cores = [row[1:] for row in rows if row and row[0][:3] == "cpu" and row[0] != "cpu"]
        now = [(sum(map(int, core[:8])), int(core[3]) + int(core[4])) for core in cores]
        before, self._before = self._before, now
        if len(before) != len(now):
            return [UNKNOWN_U8] * len(now)
        spans = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(now, before, strict=True)]
        return [round(100 * (1 - idle / ticks)) if ticks > 0 else 0 for ticks, idle in spans]

    def _temperature(self) -> int:
        """Return the hottest zone in degrees Celsius."""
        texts = [
            self._read(path.relative_to(self._root))
            for path in self._root.glob("sys/class/thermal/thermal_zone*/temp")
        ]
        degrees = [int(text) // 1000 for text in texts if text.strip().lstrip("-").isdigit()]
        return min(126, max(-128, *degrees)) if degrees else UNKNOWN_I8

    def _read(self, path: str | Path) -> str:
        try:
            return (self._root / path).read_text()
        except OSError:  # a kernel without it, or a sensor that is asleep
            return ""
