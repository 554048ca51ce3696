"""Times measured on a board, which replace predictions.

A TOML or JSON file, for instance:

    profile = "agx-orin-64gb"
    power_mode = "MAXN"          # left out: holds for every mode
    precision = "int8"
    source = "trtexec --dumpProfile, TensorRT 10.3, 2026-03-01"

    [[times]]
    nodes = ["conv1", "relu1"]   # one node, or nodes that ran as one
    processor = "gpu"            # "dla" holds for both cores
    time_us = 41.5

The first of several nodes gets the time, the others 0. Energy stays the model's, scaled with the
time.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import msgspec

from device.engine.manifest import Precision, Processor
from device.errors import ConfigError
from device.toml_file import decode_toml


class MeasuredTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time of nodes that ran together on a processor, in microseconds."""

    nodes: tuple[str, ...]
    processor: Literal["gpu", "dla", "dla0", "dla1", "cpu"]
    time_us: float


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of measured times, with board, precision and source."""

    profile: str
    precision: Precision
    source: str
    times: tuple[MeasuredTime, ...]
    power_mode: str | None = None

    def by_node(self, processor: Processor) -> dict[str, float]:
        """Return the time of every measured node on a processor; exact names override "dla"."""
        times: dict[str, float] = {}
        for general in (True, False):
            for row in self.times:
                if row.processor == ("dla" if general else processor) and (
                    not general or processor.startswith("dla")
                ):
                    times |= dict.fromkeys(row.nodes, 0.0)
                    times[row.nodes[0]] = row.time_us
        return times


def measured_in_both(first: Measured, second: Measured) -> tuple[frozenset[str], ...]:
    """Return nodes on the GPU that both have times of, those together that rows join.

    Only the sums over such a group can be compared: a row gives its first node the time of all.
    """
    groups: list[frozenset[str]] = []
    for row in (*first.times, *second.times):
        if row.processor == "gpu":
            touched = [group for group in groups if not group.isdisjoint(row.nodes)]
            groups = [group for group in groups if group not in touched]
            groups.append(frozenset(row.nodes).union(*touched))
    both = first.by_node("gpu").keys() & second.by_node("gpu").keys()
    return tuple(group for group in groups if group <= both)


def faster_on_gpu(times: Measured, others: Measured) -> Measured:
    """Return `times`, with those of `others` where these are less on the GPU."""
    known, more = times.by_node("gpu"), others.by_node("gpu")
    faster = frozenset[str]().union(
        *(
            group
            for group in measured_in_both(times, others)
            if sum(more[name] for name in group) < sum(known[name] for name in group)
        )
    )
    if not faster:
        return times

    def on_gpu(row: MeasuredTime) -> bool:
        return row.processor == "gpu" and faster.issuperset(row.nodes)

    rows = [row for row in times.times if not on_gpu(row)]
    return msgspec.structs.replace(times, times=(*rows, *filter(on_gpu, others.times)))


def load_measured(path: Path) -> Measured:
    """Read a file of measured times, TOML or JSON by its ending.

    Raises ConfigError: it cannot be read, does not have the form, or holds a time below zero.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".json":
            measured = msgspec.json.decode(data, type=Measured)
        else:
            measured = decode_toml(data, Measured)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: {error}: write it as `toolkit/partition/costs/measured.py` says."
        ) from error
    for row in measured.times:
        if not row.nodes or not row.time_us >= 0:
            raise ConfigError(
                f"{path}: a time of {row.time_us} us for {len(row.nodes)} nodes: give at least one "
                "node and a time of 0 or more."
            )
    return measured


def check_measured(
    measured: Measured,
    *,
    profile: str,
    power_mode: str | None,
    precision: Precision,
    nodes: Collection[str],
) -> None:
    """Refuse times of another board, mode, precision or model.

    Raises ConfigError, which names the first mismatch.
    """
    for field, measured_value, planned in (
        ("profile", measured.profile, profile),
        ("precision", measured.precision, precision),
    ):
        if measured_value != planned:
            raise ConfigError(
                f"The measured times are for {field} {measured_value!r}, the plan for {planned!r}: "
                "measure "
                "there, or leave the file out."
            )
    if measured.power_mode is not None and measured.power_mode != power_mode:
        raise ConfigError(
            f"The measured times are for power mode {measured.power_mode!r}, the plan for "
            f"{power_mode!r}: plan for that mode, or leave the file out."
        )
    known = set(nodes)
    unknown = next((n for row in measured.times for n in row.nodes if n not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"The measured times name a node {unknown!r} that the model does not have: name "
            "nodes as the plan does."
        )
