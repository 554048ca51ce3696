"""The rules of the manifest: each is broken once, and the sentence says which and where."""

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from engine_fixtures import engine_parts, split_network
from hypothesis import given
from hypothesis import strategies as st

from device.engine.container import Entry, lay_out
from device.engine.manifest import (
    ARENA_ALIGNMENT,
    Buffer,
    DimRange,
    Manifest,
    MemoryPlan,
    Segment,
    TensorInfo,
    largest_bytes,
)
from device.engine.manifest_check import check_manifest
from device.errors import EngineError

MANIFEST, ARRAYS = engine_parts(split_network("batch"))
ENTRIES = lay_out({name: (value.dtype.name, value.shape) for name, value in ARRAYS.items()})
Path = tuple[str | int, ...]
REMOVED = object()


def edited(path: Path, value: object) -> Manifest:
    """The valid manifest with one value replaced, or removed."""
    tree = msgspec.to_builtins(MANIFEST)
    tree = msgspec.json.decode(msgspec.json.encode(tree))  # lists in place of tuples
    place = tree
    for key in path[:-1]:
        place = place[key]
    if value is REMOVED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return msgspec.convert(tree, Manifest, strict=False)


def problem(manifest: Manifest, entries: dict[str, Entry] = ENTRIES) -> str:
    with pytest.raises(EngineError) as caught:
        check_manifest(manifest, entries)
    return str(caught.value)


def test_the_manifest_of_a_real_engine_keeps_all_rules() -> None:
    check_manifest(MANIFEST, ENTRIES)


TWO = 2**31
BROKEN: list[tuple[Path, object, str]] = [
    (("format",), 2, "format version 2, this Tandem reads 1; update Tandem"),
    (("format",), -1, "format version -1, this Tandem reads 1; build it again"),
    (("profile",), "", "profile: there is none"),
    (("inputs",), ["x", "x"], "inputs: 'x' stands there twice"),
    (("inputs",), [], "inputs: there is none"),
    (("inputs",), ["nope"], "inputs: 'nope' is not among the tensors"),
    (("outputs",), [], "outputs: there is none"),
    (("outputs",), ["x"], "output 'x' is not made by any segment"),
    (("outputs",), ["nope"], "output 'nope' is not made by any segment"),
    (("segments",), [], "segments: there is none"),
    (("tensors", 1, "name"), "x", "tensors: 'x' stands there twice"),
    (("tensors", 1, "name"), "", "tensors: a name has 0 characters"),
    (("tensors", 1, "name"), "n" * 4097, "tensors: a name has 4097 characters"),
    (("tensors", 0, "dtype"), "bfloat16", "tensor 'x' has dtype 'bfloat16'; known are bool, int8"),
    (("tensors", 0, "shape"), ["batch", -1], "tensor 'x' has a size of -1"),
    (("tensors", 0, "shape"), [1] * 33, "tensor 'x' has 33 dimensions, the limit is 32"),
    (("tensors", 0, "shape"), ["batch", TWO - 1], "has up to 8589934588 elements"),
    (("tensors", 0, "shape"), ["batch", TWO], "tensor 'x' has a size of 2147483648"),
    (("tensors", 0, "shape"), ["rows", 3], "uses the dimension 'rows', which is not declared"),
    (("tensors", 0, "shape"), [None, 3], "input 'x' has a dimension of unknown size"),
    (("tensors", 0, "shape"), [1, 3], "'q1' uses the dimension 'batch', which no input sets"),
    (("tensors", 0, "scale"), 0.5, "tensor 'x' has a scale but dtype float32"),
    (("tensors", 1, "scale"), 0.0, "tensor 'q1' has the scale 0.0"),
    (("tensors", 1, "scale"), -1.0, "tensor 'q1' has the scale -1.0"),
    (("tensors", 1, "scale"), float("inf"), "tensor 'q1' has the scale inf"),
    (("tensors", 1, "scale"), float("nan"), "tensor 'q1' has the scale nan"),
    (("dims", 0, "min"), 0, "dimension 'batch' has min 0, opt 2, max 4"),
    (("dims", 0, "min"), 3, "dimension 'batch' has min 3, opt 2, max 4"),
    (("dims", 0, "opt"), 5, "dimension 'batch' has min 1, opt 5, max 4"),
    (("dims", 0, "max"), TWO, "dimension 'batch' has min 1, opt 2, max 2147483648"),
    (("dims", 0, "step"), 0, "dimension 'batch' goes in steps of 0"),
    (("dims", 0, "step"), 2, "goes in steps of 2; its min 1, opt 2 and max 4 must be multiples"),
    (("segments", 1, "name"), "gpu.0", "segments: 'gpu.0' stands there twice"),
    (("segments", 0, "inputs"), ["x", "x"], "inputs of segment 'gpu.0': 'x' stands there twice"),
    (("segments", 0, "inputs"), ["nope"], "segment 'gpu.0' uses 'nope', which is not among"),
    (("segments", 0, "inputs"), ["r2"], "segment 'gpu.0' reads 'r2', which is neither an input"),
    (("segments", 0, "inputs"), ["q1"], "segment 'gpu.0' reads 'q1', which is neither an input"),
    (("segments", 0, "outputs"), [], "segment 'gpu.0' has no outputs"),
    (("segments", 0, "outputs"), ["x"], "segment 'gpu.0' makes 'x', which is made or given"),
    (("segments", 1, "outputs"), ["q1"], "segment 'dla0.0' makes 'q1', which is made or given"),
    (("segments", 0, "implementations"), [], "segment 'gpu.0' has no outputs or no impl"),
    (("segments", 0, "nodes"), ["n", "n"], "nodes of segment 'gpu.0': 'n' stands there twice"),
    (
        ("segments", 0, "implementations", 0, "model"),
        "nope",
        "segment 'gpu.0' names the entry 'nope', which is missing",
    ),
    (
        ("segments", 0, "implementations", 0, "model"),
        "w1",
        "names the entry 'w1' of dtype float32 and shape [8, 3, 3, 3]; it must be a row",
    ),
    (
        ("segments", 0, "implementations", 0, "weights"),
        ["w1", "nope"],
        "segment 'gpu.0' names the entry 'nope', which is missing",
    ),
    (("crossings", 0), REMOVED, "tensor 'q1' of segment 'gpu.0' changes processor but is not"),
    (("crossings", 0, "tensor"), "y", "crossing 'y' goes from 'gpu.0' to ['dla0.0']"),
    (("crossings", 0, "source"), "gpu.1", "crossing 'q1' goes from 'gpu.1' to ['dla0.0'], by the"),
    (("crossings", 0, "targets"), ["gpu.1"], "crossing 'q1' goes from 'gpu.0' to ['gpu.1']"),
    (("crossings", 0, "targets"), ["a", "a"], "targets of crossing 'q1': 'a' stands there twice"),
    (("crossings", 0, "bytes"), 512, "crossing 'q1' has 512 bytes, its largest shape has 2048"),
    (("crossings", 0, "bytes"), None, "crossing 'q1' has None bytes"),
    (("segments", 1, "processor"), "gpu", "crossing 'q1' goes from 'gpu.0' to ['dla0.0'], by"),
    (("memory", "buffers", 0, "tensor"), "nope", "memory has a buffer for 'nope', which is not"),
    (("memory", "buffers", 0, "tensor"), "r2", "memory: 'r2' stands there twice"),
    (("memory", "buffers", 0, "bytes"), 1, "the buffer of 'q1' has 1 bytes, its largest shape has"),
    (("memory", "buffers", 0, "offset"), -64, "the buffer of 'q1' starts at -64; it must be"),
    (("memory", "buffers", 0, "offset"), 8, "the buffer of 'q1' starts at 8; it must be a multi"),
    (("memory", "buffers", 0, "offset"), 64, "the buffers of 'r2' (2048 to 18432) and 'q1' (64"),
    (("memory", "buffers", 2, "offset"), 2048, "the buffers of 'p3' (2048 to 2304) and 'r2'"),
    (("memory", "buffers", 1, "offset"), 1 << 20, "the buffer of 'r2' ends at 1064960, the arena"),
    (("memory", "arena_bytes"), 100, "the buffer of 'q1' ends at 2048, the arena at 100"),
    (("memory", "arena_bytes"), 1 << 40, "the arena has 1099511627776 bytes, its buffers need"),
    (("plan", 0, "segment"), "nope", "is in the segment 'nope', which is not there"),
    (("plan", 0, "processor"), "dla0", "is on dla0, its segment 'gpu.0' on gpu"),
    (("plan", 0, "predicted_us"), -1.0, "takes -1.0 us; it must be 0 or more"),
    (("plan", 0, "predicted_us"), float("nan"), "takes nan us"),
    (("plan", 1, "node"), "Conv:c1", "plan: 'Conv:c1' stands there twice"),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN)
def test_a_broken_rule_is_named(path: Path, value: object, message: str) -> None:
    assert message in problem(edited(path, value))


def test_too_many_of_anything_are_refused() -> None:
    many = [f"n{n}" for n in range(100_001)]
    message = problem(edited(("segments", 0, "nodes"), many))
    assert message == "nodes of segment 'gpu.0': 100001 of them, the limit is 100000"


def test_a_buffer_of_a_tensor_of_unknown_size_is_refused() -> None:
    tree = msgspec.json.decode(msgspec.json.encode(MANIFEST))
    tree["tensors"][1]["shape"][1] = None
    tree["crossings"][0]["bytes"] = None
    message = problem(msgspec.convert(tree, Manifest))
    assert message == "the buffer of 'q1' has 2048 bytes, its largest shape has None"


def test_an_entry_that_went_missing_is_named() -> None:
    less = {name: entry for name, entry in ENTRIES.items() if name != "w3"}
    message = problem(MANIFEST, less)
    assert message == "segment 'dla0.1' names the entry 'w3', which is missing"


def test_the_largest_bytes_are_those_of_the_largest_shape() -> None:
    ranges = {"n": DimRange(name="n", min=1, opt=2, max=7)}
    tensor = TensorInfo(name="t", dtype="float16", shape=("n", 3))
    assert largest_bytes(tensor, ranges) == 7 * 3 * np.dtype(np.float16).itemsize
    unknown = TensorInfo(name="t", dtype="float16", shape=("n", None))
    assert largest_bytes(unknown, ranges) is None


@st.composite
def chains(draw: st.DrawFn) -> tuple[Manifest, list[tuple[int, int, int, int]]]:
    """A chain of segments where each reads any earlier tensors, with buffers anywhere.

    Beside the manifest: offset, end, first and last segment of each buffer.
    """
    count = draw(st.integers(1, 6))
    base = MANIFEST.segments[0]
    names = [f"t{n}" for n in range(count)]
    segments, tensors = [], [TensorInfo(name="x", dtype="float32", shape=(1,))]
    reads: list[Sequence[str]] = []
    for place, name in enumerate(names):
        earlier = draw(st.lists(st.sampled_from(["x", *names[:place]]), unique=True))
        reads.append(earlier)
        segments.append(
            msgspec.structs.replace(
                base, name=f"s{place}", inputs=tuple(earlier), outputs=(name,), nodes=()
            )
        )
        size = draw(st.integers(1, 4)) * ARENA_ALIGNMENT
        tensors.append(TensorInfo(name=name, dtype="uint8", shape=(size,)))
    buffers, lives = [], []
    for place, (name, tensor) in enumerate(zip(names, tensors[1:], strict=True)):
        offset = draw(st.integers(0, 8)) * ARENA_ALIGNMENT
        size = int(tensor.shape[0] or 0)
        buffers.append(Buffer(tensor=name, offset=offset, bytes=size))
        readers = [at for at, earlier in enumerate(reads) if name in earlier]
        last = count if place == count - 1 else max(readers, default=place)
        lives.append((offset, offset + size, place, last))
    manifest = msgspec.structs.replace(
        MANIFEST,
        outputs=(names[-1],),
        tensors=tuple(tensors),
        dims=(),
        segments=tuple[Segment, ...](segments),
        crossings=(),
        plan=(),
        memory=MemoryPlan(arena_bytes=max(life[1] for life in lives), buffers=tuple(buffers)),
    )
    return manifest, lives


@given(chains())
def test_overlaps_are_found_exactly_where_every_pair_compared_finds_one(
    chain: tuple[Manifest, list[tuple[int, int, int, int]]],
) -> None:
    manifest, lives = chain
    clash = any(
        one[0] < before[1] and before[0] < one[1] and one[2] <= before[3] and before[2] <= one[3]
        for at, one in enumerate(lives)
        for before in lives[:at]
    )
    if clash:
        assert re.search("overlap while both are in use", problem(manifest))
    else:
        check_manifest(manifest, ENTRIES)
