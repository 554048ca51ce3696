"""Which tactic runs: times by GPU in a file, and the choice among them."""

import itertools
import json
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.engine.cuda_manifest import CompiledKernel, Int32, Launch, Null, Weights, Workspace
from device.runtime.cuda.facts import GpuFacts, driver_version, power_mode
from device.runtime.cuda.program import Shared
from device.runtime.cuda.tactics import fastest, tactic_key
from device.runtime.timing_cache import TimingCache, TimingCacheError, add_timings, read_timings

ORIN = GpuFacts(
    name="Orin",
    sm=87,
    sm_count=8,
    sm_mhz=1173,
    memory_mhz=3199,
    l2_bytes=4194304,
    cuda="12.6",
    driver="36.4.3",
    power_mode="0",
)
CHANGES = {
    "name": "Thor",
    "sm": 110,
    "sm_count": 16,
    "sm_mhz": 918,
    "memory_mhz": 2133,
    "l2_bytes": 1,
    "cuda": "12.2",
    "driver": "35.4.1",
    "power_mode": "2",
}


def launch(**fields: object) -> Launch:
    one = Launch(kernel=0, grid=(4, 2, 1), arguments=(Workspace(0), Weights(16), Int32(5), Null()))
    return msgspec.structs.replace(one, **fields)


KERNEL = CompiledKernel(cubin="a.cubin", function="matmul", threads=128, shared_bytes=1024)


def key(*launches: Launch, kernel: CompiledKernel = KERNEL, sha256: str = "0") -> str:
    return tactic_key(launches, [kernel, kernel], lambda _: sha256)


def test_a_key_changes_with_everything_that_decides_the_time() -> None:
    keys = [
        key(launch()),
        key(launch(), launch()),
        key(launch(grid=(2, 4, 1))),
        key(launch(arguments=(Workspace(0), Weights(16), Int32(6), Null()))),
        key(launch(arguments=(Workspace(0), Workspace(16), Int32(5), Null()))),
        key(launch(arguments=(Workspace(0), Weights(16), Int32(5)))),
        key(launch(), sha256="1"),
        key(launch(), kernel=msgspec.structs.replace(KERNEL, threads=256)),
        key(launch(), kernel=msgspec.structs.replace(KERNEL, shared_bytes=0)),
        key(launch(), kernel=msgspec.structs.replace(KERNEL, function="other")),
    ]
    assert len(set(keys)) == len(keys)


def test_a_key_does_not_change_with_offsets_and_numbers_of_kernels() -> None:
    moved = launch(kernel=1, arguments=(Workspace(256), Weights(512), Int32(5), Null()))
    assert key(moved) == key(launch())


def test_a_key_holds_the_values_of_formulas() -> None:
    formula = launch(grid=("4*d0", 2, 1), arguments=(Int32("d0+1"),))
    number = launch(grid=(12, 2, 1), arguments=(Int32(4),))
    keys = [tactic_key([formula], [KERNEL], lambda _: "0", point) for point in ((3,), (2,))]
    assert keys[0] == key(number) != keys[1]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_the_fastest_of_timed_tactics_runs(times: list[float]) -> None:
    keys = [str(at) for at in range(len(times))]
    assert times[fastest(keys, dict(zip(keys, times, strict=True)))] == min(times)


def test_the_first_tactic_runs_unless_all_were_timed() -> None:
    assert fastest(["a", "b", "c"], {"a": 3.0, "c": 1.0}) == 0
    assert fastest(["a", "b"], {}) == 0


@pytest.mark.parametrize("field", GpuFacts.__struct_fields__)
def test_times_of_another_gpu_are_never_used(field: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    add_timings(path, ORIN, {"k": 1.0})
    second = msgspec.structs.replace(ORIN, **{field: CHANGES[field]})
    assert read_timings(path).times_us(second) == {}
    add_timings(path, second, {"k": 2.0})
    assert read_timings(path).times_us(ORIN) == {"k": 1.0}
    assert read_timings(path).times_us(second) == {"k": 2.0}


def test_writing_keeps_what_others_wrote_and_takes_newer_times(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    add_timings(path, ORIN, {"a": 1.0, "b": 2.0})
    add_timings(path, ORIN, {"b": 3.0, "c": 4.0})
    assert read_timings(path).times_us(ORIN) == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert [one.name for one in tmp_path.iterdir()] == ["times.json"]


def test_the_file_is_json_that_people_can_read(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    add_timings(path, ORIN, {"a": 1.5})
    document = json.loads(path.read_text())
    assert document["devices"][0]["gpu"]["name"] == "Orin"
    assert document["devices"][0]["median_us"] == {"a": 1.5}
    assert len(path.read_text().splitlines()) > 10


def test_no_file_is_an_empty_cache(tmp_path: Path) -> None:
    assert read_timings(tmp_path / "times.json") == TimingCache()


def valid() -> dict[str, object]:
    document: dict[str, object] = json.loads(
        msgspec.json.encode(TimingCache().with_times(ORIN, {"a": 1.0}))
    )
    return document


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "no UTF-8": b'{"devices": "\xff"}',
    "deep": b"[" * 100_000,
    "no time": json.dumps(valid()).replace("1.0", '"fast"').encode(),
    "a time of zero": json.dumps(valid()).replace("1.0", "0.0").encode(),
    "another key": json.dumps(valid() | {"more": 1}).encode(),
    "another format": json.dumps(valid() | {"tandem_timings": 2}).encode(),
    "a GPU twice": json.dumps(valid() | {"devices": valid()["devices"] * 2}).encode(),  # type: ignore[operator]
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_cache_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(TimingCacheError, match=r"times\.json"):
        read_timings(path)
    with pytest.raises(TimingCacheError, match=r"times\.json"):
        add_timings(path, ORIN, {"a": 1.0})
    assert path.read_bytes() == DAMAGED[name]


def test_a_cache_of_a_later_version_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"tandem_timings": 2, "boards": []}))
    with pytest.raises(TimingCacheError, match="has format 2, this Tandem reads 1"):
        read_timings(path)


def test_the_undamaged_twin_of_those_is_read(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(valid()))
    assert read_timings(path).times_us(ORIN) == {"a": 1.0}


@given(st.binary(max_size=200))
def test_any_bytes_are_a_cache_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    try:
        result: object = read_timings(path)
    except TimingCacheError as error:
        result = error
    assert isinstance(result, TimingCache) or "any.json" in str(result)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TimingCacheError, match="cannot be written"):
        add_timings(tmp_path / "elsewhere" / "times.json", ORIN, {"a": 1.0})


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12", "535.183.01"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release",
            "580.159.04",
        ),
        ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic", "36.4.3"),
        ("# R35 (release), REVISION: 4.1, GCID: 33958178", "35.4.1"),
        ("", ""),
        ("no version here", ""),
    ],
)
def test_the_driver_s_version_is_read_on_computers_and_boards(text: str, version: str) -> None:
    assert driver_version(text) == version


@pytest.mark.parametrize(
    ("text", "mode"), [("pmode:0002 fmode:fanNull", "2"), ("pmode:0000", "0"), ("", ""), ("x", "")]
)
def test_the_power_mode_is_nvpmodel_s_number(text: str, mode: str) -> None:
    assert power_mode(text) == mode


def test_a_shared_value_lives_from_the_first_user_to_the_last() -> None:
    given_up: list[str] = []
    numbers = itertools.count()
    shared: Shared[str, str] = Shared(given_up.append)

    def acquire(name: str) -> str:
        return shared.acquire(name, lambda: f"{name}{next(numbers)}")

    assert [acquire("a"), acquire("a"), acquire("b")] == ["a0", "a0", "b1"]
    shared.release("a")
    assert given_up == []
    shared.release("a")
    assert given_up == ["a0"]
    assert acquire("a") == "a2"
    assert len(shared) == 2


def test_a_value_that_could_not_be_made_is_not_held() -> None:
    def fail() -> str:
        raise OSError("no memory")

    shared: Shared[str, str] = Shared(lambda _: None)
    with pytest.raises(OSError, match="no memory"):
        shared.acquire("a", fail)
    assert len(shared) == 0
    assert shared.acquire("a", lambda: "made") == "made"


def test_threads_share_one_value_and_give_it_up_once() -> None:
    values: list[object] = []
    given_up: list[object] = []
    shared: Shared[str, object] = Shared(given_up.append)
    together = threading.Barrier(8)

    def make() -> object:
        values.append(object())
        return values[-1]

    def use() -> None:
        together.wait()
        assert shared.acquire("a", make) is values[0]
        together.wait()
        shared.release("a")

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(values) == len(given_up) == 1
    assert len(shared) == 0
