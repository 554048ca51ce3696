"""Thousands of damaged and hostile engine files: each is refused in one sentence, or is valid.

They are opened in a child process with little memory, so that a crash, a hang or a hunger for
memory shows as what it is. Repeat one seed with `python tests/engine/test_engine_fuzz.py SEED
COUNT`.
"""

import faulthandler
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import safetensors
from engine_fixtures import (
    engine_parts,
    single_network,
    split_network,
    without_checksums,
    write_network,
)

from device.engine.container import (
    MAX_ENTRIES,
    MAX_HEADER_BYTES,
    MAX_JSON_VALUES,
    header_length,
    parse_header,
)
from device.engine.file import encode_manifest, open_engine
from device.engine.manifest_check import check_manifest
from device.errors import EngineError

COUNT = 1_000
SLOW_COUNT = 10_000  # the files of the shorter run are among these
MOST_SECONDS = 2.0  # for one file, on a busy machine
MEMORY_BYTES = 1 << 30  # address space of the child, libraries included
RAW = "\x00raw:"  # marks text that goes into the JSON as it is

# Values that no builder writes, put wherever the JSON has a value.
HOSTILE: tuple[object, ...] = (
    *(-1, 0, 1, 3, 64, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(1.5, -0.0, 1e308, 5e-324, 4.0),
    *(None, True, False, "", "x", "x" * 5000, "\u2028\x01", "__metadata__", "tandem"),
    *([], {}, [[]], [0], [1, 2, 3], ["x"], {"x": 1}, [None], [2**62, 2**62, 0], [0, 2**62]),
    *([1] * 100_000, ["n"] * 100_000, [[]] * 50_000, {str(n): n for n in range(20_000)}),
    *(RAW + "[" * 100_000 + "]" * 100_000, RAW + '{"a":' * 50_000 + "1" + "}" * 50_000),
    *(RAW + "9" * 5000, RAW + "1e999", RAW + "-", RAW + "NaN", RAW + "Infinity", RAW + "01"),
    *(RAW + '"\\ud800"', RAW + '"\\u0000"', RAW + "tru", RAW + "1 2", RAW + "[" * 3_000_000),
)


def encode(value: object) -> str:
    """JSON, with the marked texts as they are."""
    text = json.dumps(value)
    if "\\u0000raw:" not in text:
        return text
    for one in HOSTILE:
        if isinstance(one, str) and one.startswith(RAW):
            text = text.replace(json.dumps(one), one[len(RAW) :])
    return text


def json_paths(tree: object) -> list[tuple[object, object]]:
    """Every (container, key) of a tree of dicts and lists."""
    results: list[tuple[object, object]] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict | list):
            items = node.items() if isinstance(node, dict) else enumerate(node)
            results += [(node, key) for key, _ in items]
            stack += [child for _, child in items]
    return results


def edit(draw: random.Random, tree: object) -> None:
    """Change one place: a hostile value, a neighbour's value, another name, none or one more."""
    spots = json_paths(tree)
    if not spots:
        return
    node, key = draw.choice(spots)
    action = draw.choice(("hostile", "hostile", "copy", "copy", "step", "drop", "add", "rename"))
    value = node[key]
    if action == "hostile":
        node[key] = deepcopy(draw.choice(HOSTILE))
    elif action == "copy":
        same = [(n, k) for n, k in spots if type(n[k]) is type(value)]
        other, at = draw.choice(same)
        node[key] = deepcopy(other[at])
    elif action == "step" and isinstance(value, int):
        node[key] = value + draw.choice((-64, -8, -1, 1, 8, 64)) * draw.choice((1, 1, 1000))
    elif action == "drop":
        del node[key]
    elif action == "add":
        if isinstance(node, list):
            node.insert(key, deepcopy(value))
        else:
            node["extra"] = value
    elif isinstance(node, dict):
        node[str(draw.choice(HOSTILE))[:50]] = node.pop(key)


def edit_header(draw: random.Random, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    manifest = json.loads(header["__metadata__"]["tandem"])
    inner = draw.random() < 0.7
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        edit(draw, manifest if inner else header)
    if inner:
        header["__metadata__"]["tandem"] = repeat_key(draw, encode(manifest))
    text = repeat_key(draw, encode(header))
    blob = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.9:
        blob += b" " * (-len(blob) % 8)
    return len(blob).to_bytes(8, "little") + blob + data[8 + length :]


def repeat_key(draw: random.Random, text: str) -> str:
    """Now and then, state the first member of some object twice."""
    if draw.random() > 0.05 or "{" not in text:
        return text
    at = draw.choice([index for index, letter in enumerate(text) if letter == "{"])
    stop = min((text.find(mark, at) for mark in ",}" if mark in text[at:]), default=-1)
    return text if stop < 0 else f"{text[: at + 1]}{text[at + 1 : stop]},{text[at + 1 :]}"


def flip(draw: random.Random, data: bytes) -> bytes:
    result = bytearray(data)
    # Most flips go where the format is: the length and the header.
    head = 8 + int.from_bytes(data[:8], "little")
    for _ in range(draw.choice((1, 1, 2, 8, 100))):
        at = draw.randrange(draw.choice((8, head, head, head, len(result))))
        result[at] ^= 1 << draw.randrange(8)
    return bytes(result)


def truncate(draw: random.Random, data: bytes) -> bytes:
    cut = draw.choice((draw.randrange(20), draw.randrange(len(data)), len(data) - 1))
    return data[:cut] + draw.choice((b"", b"", b"\0" * draw.randrange(5000)))


def splice(draw: random.Random, data: bytes) -> bytes:
    one, two, three = (draw.randrange(len(data)) for _ in range(3))
    piece = data[min(one, two) : max(one, two)][: draw.choice((1, 8, 100, 10_000))]
    drop = draw.choice((0, len(piece), draw.randrange(50)))
    return data[:three] + piece + data[three + drop :]


def relength(draw: random.Random, data: bytes) -> bytes:
    length = draw.choice((0, 1, 2**31, 2**63, 2**64 - 1, 2**24, 2**24 + 1, draw.randrange(30_000)))
    return length.to_bytes(8, "little") + data[8:]


def noise(draw: random.Random, data: bytes) -> bytes:
    return draw.randbytes(draw.randrange(200)) + data[: draw.choice((0, 100))]


MUTATORS: tuple[tuple[Callable[[random.Random, bytes], bytes], int], ...] = (
    (edit_header, 55),
    (flip, 20),
    (truncate, 8),
    (splice, 10),
    (relength, 5),
    (noise, 2),
)


def mutated(seed: int, bases: list[bytes]) -> bytes:
    draw = random.Random(seed)
    change = draw.choices([one for one, _ in MUTATORS], [often for _, often in MUTATORS])[0]
    return change(draw, draw.choice(bases))


def library_takes(data: bytes) -> bool:
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


def container_refusal(data: bytes) -> str | None:
    """Why our reader refuses the container, whatever its manifest says."""
    try:
        end = 8 + header_length(data[:8], len(data), "it")
        parse_header(data[8:end], len(data), "it")
    except EngineError as error:
        return str(error)
    return None


def use(path: Path) -> str:
    """Open a file and touch all of it; return "valid" or the sentence that refuses it."""
    try:
        engine = open_engine(path)
        engine.verify()
    except EngineError as error:
        return str(error)
    with engine:
        for name in engine.entries:
            view = engine.entry(name)
            assert view.dtype.name == engine.entries[name].dtype
            view.tobytes()
        check_manifest(engine.manifest, engine.entries)
        encode_manifest(engine.manifest)
        assert len(engine.sha256) == 64
    return "valid"


def child(first: int, count: int) -> None:
    """Open the files of some seeds; print one JSON line about them. Any surprise is a traceback."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    outcomes: Counter[str] = Counter()
    slowest = (0.0, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "e"
        networks = (single_network(), split_network("batch"))
        bases = [write_network(path, network).read_bytes() for network in networks]
        # Most without checksums: with them nothing behind the first look would be tried.
        bases = [*map(without_checksums, bases), *map(without_checksums, bases), bases[0]]
        for seed in range(first, first + count):
            print(f"seed {seed}", file=sys.stderr)  # the last one is the culprit
            data = mutated(seed, bases)
            path.write_bytes(data)
            faulthandler.dump_traceback_later(60, exit=True)
            start = time.process_time()
            message = use(path)
            slowest = max(slowest, (time.process_time() - start, seed))
            faulthandler.cancel_dump_traceback_later()
            outcomes["valid" if message == "valid" else "refused"] += 1
            assert message == "valid" or message.startswith(str(path)), message
            assert "\n" not in message, message
            assert len(message) < 20_000, message[:1000]
            compare(data, outcomes)
    print(json.dumps({"outcomes": outcomes, "slowest": slowest}))


def compare(data: bytes, outcomes: Counter[str]) -> None:
    """Our reader and the safetensors library agree, but for what we refuse on purpose."""
    refusal, taken = container_refusal(data), library_takes(data)
    if refusal is None:
        assert taken, "we read what the library refuses"
        outcomes["both read"] += 1
    elif taken:
        assert any(
            word in refusal for word in ("twice", "has dtype", "unknown field", "the limit is")
        ), refusal
        outcomes["only we refuse"] += 1


@pytest.mark.parametrize("count", [COUNT, pytest.param(SLOW_COUNT, marks=pytest.mark.slow)])
def test_hostile_files_are_refused_or_valid(count: int) -> None:
    halves = [
        subprocess.Popen(
            [sys.executable, __file__, str(first), str(count // 2)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first in (0, count // 2)
    ]
    total: Counter[str] = Counter()
    for half in halves:
        output, errors = half.communicate()
        assert half.returncode == 0, errors[-4000:]
        report = json.loads(output)
        total.update(report["outcomes"])
        seconds, seed = report["slowest"]
        assert seconds < MOST_SECONDS, f"seed {seed} took {seconds} s"
    assert total["valid"] + total["refused"] == count
    # The mutations reach every depth: some files stay valid, some only break the manifest.
    assert total["valid"] > 0.03 * count
    assert total["refused"] > 0.5 * count
    assert total["both read"] > total["valid"] + 0.1 * count
    assert total["only we refuse"] > 0.002 * count


def header_of(entries: int) -> bytes:
    """A header of entries without a byte: small in the file, large as objects."""
    row = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return ("{" + ",".join(row % number for number in range(entries)) + "}").encode()


def test_the_number_of_entries_is_at_its_limit() -> None:
    header = header_of(MAX_ENTRIES)
    assert len(parse_header(header, len(header) + 8, "it").entries) == MAX_ENTRIES
    header = header_of(MAX_ENTRIES + 1)
    with pytest.raises(EngineError, match=f"{MAX_ENTRIES + 1} entries, the limit is {MAX_ENTRIES}"):
        parse_header(header, len(header) + 8, "it")


def test_a_header_of_empty_entries_is_refused_before_it_becomes_objects() -> None:
    header = header_of(250_000)
    assert len(header) < MAX_HEADER_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(EngineError, match=f"values, the limit is {MAX_JSON_VALUES}"):
            parse_header(header, len(header) + 8, "it")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_always_gives_the_same_file(seed: int) -> None:
    base = np.arange(5000, dtype=np.uint8).tobytes()
    manifest, _ = engine_parts(single_network())
    header = json.dumps({"__metadata__": {"tandem": encode_manifest(manifest)}}).encode()
    data = len(header).to_bytes(8, "little") + header + base
    assert mutated(seed, [data]) == mutated(seed, [data])


if __name__ == "__main__":
    child(int(sys.argv[1]), int(sys.argv[2]))
