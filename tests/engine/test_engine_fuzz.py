"""Thousands of damaged and hostile engine files: each is refused in one sentence, or is valid.

They are opened in a child process with little memory, so that a crash, a hang or a hunger for
memory shows as what it is. Repeat one seed with `python tests/engine/test_engine_fuzz.py SEED
COUNT`.
"""

import faulthandler
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors
from engine_fixtures import engine_parts, single_network
from engine_mutants import mutant_bases, mutated

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

COUNT = 400
SLOW_COUNT = 10_000  # the files of the shorter run are among these
MOST_SECONDS = 2.0  # for one file, on a busy machine
MEMORY_BYTES = 1 << 30  # address space of the child, libraries included


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
        bases = mutant_bases(Path(folder))
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
