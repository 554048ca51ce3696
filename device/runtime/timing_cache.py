"""The timing cache: the measured times of tactics on GPUs, in a JSON file.

Each row has the GPU and its state (`GpuFacts`): times of another GPU, driver, clock or power mode
are never used.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from device.errors import SessionError
from device.files import replacing
from device.runtime.cuda.facts import GpuFacts

FORMAT = 1

Microseconds = Annotated[float, msgspec.Meta(gt=0)]


class DeviceTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of one GPU: the median in microseconds by
    `device.runtime.cuda.tactics.tactic_key`.
    """

    gpu: GpuFacts
    median_us: dict[str, Microseconds]


class TimingCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: one row for each GPU in each state."""

    tandem_timings: int = FORMAT
    devices: tuple[DeviceTimes, ...] = ()

    def times_us(self, gpu: GpuFacts) -> Mapping[str, float]:
        """Return the times of this GPU in this state."""
        return next((device.median_us for device in self.devices if device.gpu == gpu), {})

    def with_times(self, gpu: GpuFacts, median_us: Mapping[str, float]) -> "TimingCache":
        """Return the cache with times of a GPU added; new ones replace old ones."""
        merged = {**self.times_us(gpu), **median_us}
        rows = tuple(device for device in self.devices if device.gpu != gpu)
        row = DeviceTimes(gpu=gpu, median_us=dict(sorted(merged.items())))
        return TimingCache(devices=(*rows, row))


class _Version(msgspec.Struct):
    """The part of the file that every format has."""

    tandem_timings: int = FORMAT


class TimingCacheError(SessionError):
    """A timing cache cannot be read or written."""


def read_timings(path: Path) -> TimingCache:
    """Read a timing cache; a file that is not there is an empty one.

    Raises TimingCacheError: it cannot be read, is damaged, or is of another version.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return TimingCache()
    except OSError as error:
        raise TimingCacheError(f"timing cache {path} cannot be read: {error.strerror}") from error
    try:
        version = msgspec.json.decode(data, type=_Version).tandem_timings
        cache = msgspec.json.decode(data, type=TimingCache) if version == FORMAT else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TimingCacheError(
            f"timing cache {path} is damaged ({error}); delete it, and it is measured again"
        ) from error
    if cache is None:
        raise TimingCacheError(
            f"timing cache {path} has format {version}, this Tandem reads {FORMAT}; "
            "give another file"
        )
    gpus: Sequence[GpuFacts] = [device.gpu for device in cache.devices]
    if len(set(gpus)) != len(gpus):
        raise TimingCacheError(
            f"timing cache {path} is damaged: it names a GPU twice; delete it, and it is "
            "measured again"
        )
    return cache


def add_timings(path: Path, gpu: GpuFacts, median_us: Mapping[str, float]) -> None:
    """Add times to the file, keeping what others have written since it was read.

    The file appears whole or not at all. Two that write at the same moment may lose the times of
    one, which are then measured again. Raises TimingCacheError.
    """
    merged = read_timings(path).with_times(gpu, median_us)
    try:
        with replacing(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(merged), indent=1) + b"\n")
    except OSError as error:
        raise TimingCacheError(
            f"timing cache {path} cannot be written: {error.strerror}; name a file in a folder "
            "that is writable"
        ) from error
