"""Look-up tables for the rules of a manifest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from device.engine.container import Entry
from device.engine.manifest import DimRange, Manifest, Segment, TensorInfo


@dataclass(frozen=True, slots=True)
class Facts:
    """A manifest with what the rules look up in it. `made_by` and `read_by` hold positions of
    segments, -1 for the caller who gives the inputs, and the number of segments for the outputs.
    """

    manifest: Manifest
    entries: Mapping[str, Entry]
    tensors: Mapping[str, TensorInfo]
    dims: Mapping[str, DimRange]
    segments: Mapping[str, Segment]
    made_by: Mapping[str, int]
    read_by: Mapping[str, tuple[int, ...]]


def check_bytes_entry(facts: Facts, name: str, where: str) -> Iterator[str]:
    """Yield what is wrong with an entry of bytes that `where` names."""
    entry = facts.entries.get(name)
    if entry is None:
        yield f"{where} names the entry {name!r}, which is missing"
    elif (entry.dtype, len(entry.shape)) != ("uint8", 1):
        yield (
            f"{where} names the entry {name!r} of dtype {entry.dtype} and shape "
            f"{list(entry.shape)}; it must be a row of uint8"
        )


def gather_facts(manifest: Manifest, entries: Mapping[str, Entry]) -> Facts:
    """Return the facts of any manifest, also one that breaks rules."""
    made_by = dict.fromkeys(manifest.inputs, -1)
    read_by: dict[str, list[int]] = {}
    for index, segment in enumerate(manifest.segments):
        for name in segment.outputs:
            made_by.setdefault(name, index)
        for name in segment.inputs:
            read_by.setdefault(name, []).append(index)
    for name in manifest.outputs:
        read_by.setdefault(name, []).append(len(manifest.segments))
    return Facts(
        manifest,
        entries,
        {tensor.name: tensor for tensor in manifest.tensors},
        {dim.name: dim for dim in manifest.dims},
        {segment.name: segment for segment in manifest.segments},
        made_by,
        {name: tuple(indices) for name, indices in read_by.items()},
    )
