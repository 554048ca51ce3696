"""Regions of system shared memory that libtandem copies, beside clients that take memory away."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from native_fixtures import NATIVE
from onnx import TensorProto
from serving_fixtures import identity, served
from tritonclient.utils import InferenceServerException

from pipelines.serving import mapped_memory
from pipelines.serving.mapped_memory import MappedMemory
from pipelines.serving.protocol import Parameters, Refusal
from pipelines.serving.shared_memory import Region, Regions

SIZE = 1 << 20
SHRINK = """
import os, sys
file = os.open(sys.argv[1], os.O_RDWR)
print(flush=True)
while True:
    os.ftruncate(file, 4096)
    os.ftruncate(file, int(sys.argv[2]))
"""
FAULT = """
import ctypes, faulthandler, mmap, os, signal, sys
library, path, what = sys.argv[1:]
file = os.open(path, os.O_RDWR)
mapping = mmap.mmap(file, 8192)
address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
copy = ctypes.CDLL(library).tandem_memory_copy
copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
target = ctypes.create_string_buffer(8192)
if what == "chained":
    faulthandler.enable()
if what == "ignored":
    signal.signal(signal.SIGBUS, signal.SIG_IGN)
os.ftruncate(file, 4096)
assert copy(target, address, 8192) == 1
assert copy(target, address, 4096) == 0
print("here", flush=True)
if what in ("sent", "ignored"):
    os.kill(os.getpid(), signal.SIGBUS)
    assert copy(target, address, 8192) == 1
print(mapping[4096])
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "libtandem.so.1"
    command = ["g++", "-std=gnu++17", "-Wall", "-Wextra", "-Werror", "-O3", "-fPIC", "-shared"]
    command += ["-fvisibility=hidden", f"-I{NATIVE}/include", str(NATIVE / "src/memory.cpp")]
    subprocess.run([*command, "-o", path], check=True)
    return path


@pytest.fixture(params=["libtandem", "kernel"])
def copied_by(
    request: pytest.FixtureRequest, library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """What copies shared memory."""
    name: str = request.param
    path = library if name == "libtandem" else library.with_name("none.so")
    monkeypatch.setattr(mapped_memory, "LIBRARY", str(path))
    monkeypatch.setattr(mapped_memory, "MAPPED_AFTER", 0)
    mapped_memory._native_copy.cache_clear()
    yield name
    mapped_memory._native_copy.cache_clear()


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path(f"/dev/shm/tandem-mapped-{os.getpid()}")
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def shrinking(path: Path) -> Iterator[None]:
    """A process that shrinks the object and lets it grow, again and again."""
    command = [sys.executable, "-c", SHRINK, str(path), str(SIZE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


def test_what_is_copied_is_what_is_there(
    copied_by: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = Regions("")
    regions.register("r", path.name, 100, SIZE - 100)  # begins within a page
    region = regions.find("r")
    assert isinstance(region, Region)
    assert (region.mapping.get() is not None) == (copied_by == "libtandem")
    before = path.read_bytes()
    for offset, size in ((0, SIZE - 100), (4000, 500), (7, 1), (5, 0)):
        start = 100 + offset
        assert bytes(region.read(offset, size)) == before[start : start + size]
    assert region.write(9, memoryview(b"abcd")) == 4
    assert region.write(9, memoryview(b"")) == 0
    if copied_by == "libtandem":
        monkeypatch.setattr(os, "pwrite", None)
    assert region.write(13, memoryview(bytearray(b"efg"))) == 3
    assert path.read_bytes() == before[:109] + b"abcdefg" + before[116:]
    regions.close()
    assert region.mapping.get() is None


def test_a_part_that_was_cut_within_its_page_is_a_refusal(copied_by: str, path: Path) -> None:
    regions = Regions("")
    regions.register("r", path.name, 0, SIZE)
    os.truncate(path, SIZE - 8)
    row: Parameters = {"shared_memory_region": "r", "shared_memory_byte_size": SIZE}
    tensor = regions.input("x", "UINT8", (SIZE,), row)
    with pytest.raises(Refusal, match=f"has {SIZE - 8} bytes from offset 0; {SIZE} were asked"):
        asyncio.run(regions.read(tensor))
    with pytest.raises(Refusal, match=f"the object '{path.name}' has {SIZE - 8} bytes"):
        asyncio.run(regions.write("y", regions.place("y", row), memoryview(b"a")))
    regions.close()


def test_a_region_that_cannot_be_mapped_is_copied_by_the_kernel(
    copied_by: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("out of memory")

    monkeypatch.setattr(mapped_memory.mmap, "mmap", refuse)
    regions = Regions("")
    regions.register("r", path.name, 0, SIZE)
    region = regions.find("r")
    assert isinstance(region, Region)
    assert region.read(0, 8) == path.read_bytes()[:8]
    assert region.mapping.get() is None
    regions.close()


def test_a_region_is_mapped_once_it_is_used_often(
    copied_by: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_memory, "MAPPED_AFTER", 2)
    regions = Regions("")
    regions.register("r", path.name, 0, SIZE)
    region = regions.find("r")
    assert isinstance(region, Region)
    kinds = [type(region.read(0, 8)) for _ in range(4)]
    kind = memoryview if copied_by == "libtandem" else bytes
    assert kinds == [bytes, bytes, kind, kind]
    regions.close()


@pytest.mark.usefixtures("shrinking")
def test_copies_in_threads_outlive_a_process_that_shrinks_the_object(
    library: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_memory, "LIBRARY", str(library))
    mapped_memory._native_copy.cache_clear()
    ends = time.monotonic() + 60
    counts = [[0, 0] for _ in range(3)]

    def run(ended: list[int]) -> None:
        data = memoryview(bytearray(SIZE))
        with path.open("r+b") as file:
            while min(ended) < 20 and time.monotonic() < ends:
                os.ftruncate(file.fileno(), SIZE)
                try:
                    memory = MappedMemory(mapped_memory._native_copy(), file.fileno(), 0, SIZE)
                except ValueError:  # it is small now
                    continue
                with memory:
                    ended[memory.read(0, data)] += 1
                    ended[memory.write(0, data)] += 1

    threads = [threading.Thread(target=run, args=(one,)) for one in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mapped_memory._native_copy.cache_clear()
    assert all(min(one) >= 20 for one in counts), counts


@pytest.mark.parametrize(
    ("what", "text"),
    [("alone", ""), ("sent", ""), ("ignored", ""), ("chained", "Fatal Python error: Bus error")],
)
def test_a_fault_of_other_code_ends_the_process(
    library: Path, path: Path, what: str, text: str
) -> None:
    command = [sys.executable, "-c", FAULT, str(library), str(path), what]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (-signal.SIGBUS, "here\n"), run.stderr
    assert text in run.stderr


def of_shared_memory(library: Any) -> tuple[Any, Any]:
    one = library.InferInput("INPUT0", [1, SIZE // 8], "FP32")
    one.set_shared_memory("r", SIZE // 2)
    output = library.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory("r", SIZE // 2, offset=SIZE // 2)
    return one, output


@pytest.mark.parametrize("protocol", [triton_http, triton_grpc])
def test_a_server_copies_the_bits(
    copied_by: str, protocol: Any, path: Path, tmp_path: Path
) -> None:
    identity(tmp_path, "one", TensorProto.FLOAT, ["batch", "n"])
    with served(tmp_path) as ports:
        port = ports.http if protocol is triton_http else ports.grpc
        with protocol.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.register_system_shared_memory("r", path.name, SIZE)
            one, output = of_shared_memory(protocol)
            client.infer("one", [one], outputs=[output])
            content = path.read_bytes()
            assert content[: SIZE // 2] == content[SIZE // 2 :]


@pytest.mark.usefixtures("copied_by")
@pytest.mark.parametrize("protocol", [triton_http, triton_grpc])
def test_a_server_refuses_what_a_process_takes_away(
    protocol: Any, path: Path, shrinking: None, tmp_path: Path
) -> None:
    identity(tmp_path, "one", TensorProto.FLOAT, ["batch", "n"])
    with served(tmp_path) as ports:
        port = ports.http if protocol is triton_http else ports.grpc
        with protocol.InferenceServerClient(f"127.0.0.1:{port}") as client:
            for _ in range(100):
                with suppress(InferenceServerException):  # it is small now
                    client.register_system_shared_memory("r", path.name, SIZE)
                    break
            one, output = of_shared_memory(protocol)
            ends, answered, refusals = time.monotonic() + 60, 0, []
            while min(answered, len(refusals)) < 5 and time.monotonic() < ends:
                try:
                    client.infer("one", [one], outputs=[output])
                    answered += 1
                except InferenceServerException as error:
                    refusals.append((error.status(), str(error)))
            assert min(answered, len(refusals)) >= 5, (answered, refusals)
            status = "400" if protocol is triton_http else "StatusCode.INVALID_ARGUMENT"
            assert {one for one, _ in refusals} == {status}
            assert all("shared memory region 'r'" in one for _, one in refusals)
            assert client.is_server_live()
