"""The cuda part of a manifest: whatever stands in it is checked before anything is used."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from engine_fixtures import engine_parts, picture, split_network, write_network
from hypothesis import given
from hypothesis import strategies as st

from device.engine import cuda_check
from device.engine.container import lay_out
from device.engine.cuda_manifest import (
    CompiledKernel,
    Cuda,
    Int32,
    Launch,
    Null,
    Tactic,
    TunableOp,
    Weights,
    Workspace,
    WorkspaceTensor,
)
from device.engine.file import write_engine
from device.engine.manifest import Manifest, TensorInfo, largest_bytes
from device.engine.manifest_facts import Facts, gather_facts
from device.errors import EngineError
from device.runtime.cuda import driver
from device.runtime.executors import cuda, table
from device.runtime.session import open_session

Parts = tuple[Manifest, dict[str, np.ndarray]]


def parts(batch: int | str = 1) -> Parts:
    """A small engine whose first segment has kernels too."""
    manifest, entries = engine_parts(split_network(batch))
    segment = manifest.segments[0]
    tensors = {one.name: one for one in manifest.tensors}
    ranges = {dim.name: dim for dim in manifest.dims}
    names = (*segment.inputs, *segment.outputs)
    sizes = {n: largest_bytes(tensors[n], ranges) or 0 for n in names}
    offsets = {name: 16384 * at for at, name in enumerate(sizes)}
    boundary_tensors = {
        n: WorkspaceTensor(
            tensor=n, offset=offsets[n], bytes=sizes[n], shape=formulas_of(tensors[n])
        )
        for n in sizes
    }
    implementation = Cuda(
        sm=87,
        kernels=(
            CompiledKernel(cubin="cuda/a.cubin", function="matmul", threads=128, shared_bytes=0),
        ),
        works=(
            TunableOp(
                nodes=("n",),
                tactics=(
                    Tactic(
                        launches=(
                            Launch(
                                kernel=0,
                                grid=(4, 1, 1),
                                arguments=(Workspace(0), Weights(16), Int32(-7), Null()),
                            ),
                        )
                    ),
                ),
            ),
        ),
        weights="cuda/a.weights",
        workspace_bytes=16384 * len(sizes) + max(sizes.values()),
        inputs=tuple(boundary_tensors[n] for n in segment.inputs),
        outputs=tuple(boundary_tensors[n] for n in segment.outputs),
    )
    entries["cuda/a.cubin"] = np.frombuffer(b"\x7fELF", np.uint8)
    entries["cuda/a.weights"] = np.zeros(64, np.uint8)
    changed = msgspec.structs.replace(
        segment, implementations=(implementation, *segment.implementations)
    )
    segments = (changed, *manifest.segments[1:])
    return msgspec.structs.replace(manifest, segments=segments), entries


def formulas_of(tensor: TensorInfo) -> tuple[int | str, ...] | None:
    """The sizes of a tensor of the small engine, whose one dimension is the batch."""
    if "batch" not in tensor.shape:
        return None
    return tuple("d0" if dim == "batch" else int(dim or 0) for dim in tensor.shape)


def changed(manifest: Manifest, **fields: object) -> Manifest:
    """The manifest with other fields in its cuda implementation."""
    segment = manifest.segments[0]
    one = msgspec.structs.replace(segment.implementations[0], **fields)
    segment = msgspec.structs.replace(segment, implementations=(one, *segment.implementations[1:]))
    return msgspec.structs.replace(manifest, segments=(segment, *manifest.segments[1:]))


def part(kind: str, **fields: object) -> Callable[[Cuda], dict[str, object]]:
    """A change of the first kernel, input or output."""

    def make(one: Cuda) -> dict[str, object]:
        first, *rest = getattr(one, kind)
        return {kind: (msgspec.structs.replace(first, **fields), *rest)}

    return make


def waiting(one: Cuda) -> tuple[CompiledKernel, ...]:
    """Its kernels, as ones that wait for the kernel before by themselves."""
    return tuple(msgspec.structs.replace(kernel, waits=True) for kernel in one.kernels)


def launch(**fields: object) -> Callable[[Cuda], dict[str, object]]:
    """A change of the launch."""

    def make(one: Cuda) -> dict[str, object]:
        changed = msgspec.structs.replace(one.works[0].tactics[0].launches[0], **fields)
        return {"works": (TunableOp(nodes=("n",), tactics=(Tactic(launches=(changed,)),)),)}

    return make


def arguments(*values: object) -> Callable[[Cuda], dict[str, object]]:
    return launch(arguments=values)


# What is changed, and whether the result is still an engine: at the limit and one beyond.
CASES: dict[str, tuple[Callable[[Cuda], dict[str, object]], bool]] = {
    "sm 0": (lambda _: {"sm": 0}, False),
    "sm 110": (lambda _: {"sm": 110}, True),
    "negative workspace": (lambda _: {"workspace_bytes": -1}, False),
    "workspace too small": (lambda _: {"workspace_bytes": 64}, False),
    "workspace too large": (lambda _: {"workspace_bytes": 2**40 + 1}, False),
    "no such weights": (lambda _: {"weights": "cuda/b.weights"}, False),
    "weights of another type": (lambda _: {"weights": "w1"}, False),
    "no such cubin": (part("kernels", cubin="cuda/b.cubin"), False),
    "no name of a function": (part("kernels", function="a b"), False),
    "1024 threads": (part("kernels", threads=1024), True),
    "1056 threads": (part("kernels", threads=1056), False),
    "half a warp": (part("kernels", threads=16), False),
    "most shared memory": (part("kernels", shared_bytes=227 * 1024), True),
    "more shared memory": (part("kernels", shared_bytes=227 * 1024 + 1), False),
    "a kernel that waits on sm_90": (lambda one: {"sm": 90, "kernels": waiting(one)}, True),
    "a kernel that waits on sm_89": (lambda one: {"sm": 89, "kernels": waiting(one)}, False),
    "kernel before the first": (launch(kernel=-1), False),
    "kernel after the last": (launch(kernel=1), False),
    "widest grid": (launch(grid=(2**31 - 1, 65535, 65535)), True),
    "work without a way to do it": (lambda _: {"works": (TunableOp(tactics=()),)}, False),
    "empty grid": (launch(grid=(0, 1, 1)), False),
    "grid too high": (launch(grid=(1, 65536, 1)), False),
    "grid too deep": (launch(grid=(1, 1, 65536)), False),
    "many arguments": (arguments(*(Null(),) * 64), True),
    "too many arguments": (arguments(*(Null(),) * 65), False),
    "last byte of the weights": (arguments(Weights(63)), True),
    "after the weights": (arguments(Weights(64)), False),
    "before the weights": (arguments(Weights(-1)), False),
    "before the workspace": (arguments(Workspace(-1)), False),
    "after the workspace": (lambda one: arguments(Workspace(one.workspace_bytes))(one), False),
    "largest integer": (arguments(Int32(2**31 - 1)), True),
    "integer too large": (arguments(Int32(2**31)), False),
    "smallest integer": (arguments(Int32(-(2**31))), True),
    "integer too small": (arguments(Int32(-(2**31) - 1)), False),
    "another tensor": (part("inputs", tensor="elsewhere"), False),
    "no inputs": (lambda _: {"inputs": ()}, False),
    "unaligned tensor": (part("outputs", offset=4097), False),
    "tensor before the workspace": (part("outputs", offset=-64), False),
    "tensor after the workspace": (part("outputs", offset=2**30), False),
    "tensor of another size": (part("outputs", bytes=4), False),
}


# The same for an engine whose batch is 1 to 4: formulas of it.
DYNAMIC: dict[str, tuple[Callable[[Cuda], dict[str, object]], bool]] = {
    "as it is": (lambda _: {}, True),
    "a grid of the batch": (launch(grid=("4*d0", "(d0+3)//4", 1)), True),
    "an unknown dimension": (launch(grid=("d1", 1, 1)), False),
    "no formula": (launch(grid=("batch", 1, 1)), False),
    "an empty grid for one": (launch(grid=("d0-1", 1, 1)), False),
    "a grid too high for four": (launch(grid=(1, "16384*d0", 1)), False),
    "the highest grid for four": (launch(grid=(1, "16383*d0", 1)), True),
    "an integer too large for four": (arguments(Int32("536870912*d0")), False),
    "the largest integer for four": (arguments(Int32("536870912*d0-1")), True),
    "division by zero": (arguments(Int32("7//(d0-1)")), False),
    "an offset in the weights": (arguments(Weights("16*d0-1")), True),
    "after the weights": (arguments(Weights("16*d0")), False),
    "an offset in the workspace": (arguments(Workspace("4*(d0-1)")), True),
    "before the workspace": (arguments(Workspace("2-d0")), False),
    "another batch": (part("inputs", shape=("d0+1", 3, 16, 16)), False),
    "half of a picture": (part("inputs", shape=("d0", 3, 16, 8)), False),
    "another rank": (part("inputs", shape=("d0", 3, 256)), False),
    "no shape": (part("inputs", shape=None), False),
    "less room than four need": (part("inputs", bytes=3 * 16 * 16 * 4 * 4 - 4), False),
    "more room than four need": (part("inputs", bytes=3 * 16 * 16 * 4 * 4 + 4), True),
    "negative room": (part("inputs", bytes=-1), False),
}


@pytest.mark.parametrize(
    ("batch", "change", "fine"),
    [
        *(pytest.param("batch", *row, id=f"batch, {name}") for name, row in DYNAMIC.items()),
        *(pytest.param(1, *row, id=name) for name, row in CASES.items()),
    ],
)
def test_limits_of_kernels_launches_tensors_and_formulas(
    batch: int | str,
    change: Callable[[Cuda], dict[str, object]],
    fine: bool,
    tmp_path: Path,
) -> None:
    manifest, entries = parts(batch)
    one = manifest.segments[0].implementations[0]
    assert isinstance(one, Cuda)
    manifest = changed(manifest, **change(one))
    if fine:
        write_engine(tmp_path / "m.engine", manifest, entries)
        return
    with pytest.raises(EngineError, match="segment"):
        write_engine(tmp_path / "m.engine", manifest, entries)


def test_what_fits_at_the_ends_only_is_found_before_it_runs(tmp_path: Path) -> None:
    manifest, entries = parts("batch")
    one = manifest.segments[0].implementations[0]
    assert isinstance(one, Cuda)
    hump = launch(grid=("1-(d0-1)*(4-d0)*(d0-2)", 1, 1))  # 1 at 1, 2 and 4; -1 at 3
    manifest = changed(manifest, **hump(one))
    write_engine(tmp_path / "m.engine", manifest, entries)
    (changed_one, *_) = manifest.segments[0].implementations
    assert isinstance(changed_one, Cuda)
    tensors = {tensor.name: tensor for tensor in manifest.tensors}

    def problems(batch: int) -> list[str]:
        return list(cuda_check.problems_at(changed_one, (batch,), 64, tensors, manifest.dims))

    assert [problems(batch) for batch in (1, 2, 4)] == [[], [], []]
    assert "has the grid [-1, 1, 1]" in problems(3)[0]


ODD = st.one_of(
    st.integers(-(2**65), 2**65),
    st.none(),
    st.text(max_size=3),
    st.lists(st.sampled_from(["d0", "d9", "3", "+", "-", "*", "//", "(", ")"])).map("".join),
    st.lists(st.integers(), max_size=3),
)


@given(data=st.data(), batch=st.sampled_from([1, "batch"]))
def test_any_value_anywhere_is_accepted_or_refused(data: st.DataObject, batch: int | str) -> None:
    """No value in the JSON of a cuda implementation raises anything but what it should."""
    manifest, entries = parts(batch)
    document = json.loads(msgspec.json.encode(manifest))
    node: Any = document["segments"][0]["implementations"][0]
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(ODD)
    try:
        decoded = msgspec.json.decode(json.dumps(document), type=Manifest)
    except msgspec.DecodeError:
        return
    facts = facts_of(decoded, entries)
    for problem in cuda_check.cuda(facts):
        assert problem.startswith("segment")
        return


def facts_of(manifest: Manifest, entries: dict[str, np.ndarray]) -> Facts:
    placed = lay_out({n: (v.dtype.name, v.shape) for n, v in entries.items()})
    return gather_facts(manifest, placed)


def test_a_machine_without_the_gpu_runs_portable_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> str:
        return "there is no NVIDIA driver here"

    kinds = tuple(
        dataclasses.replace(kind, why_not=absent) if kind.tag == "cuda" else kind
        for kind in table.EXECUTORS
    )
    monkeypatch.setattr(table, "EXECUTORS", kinds)
    manifest, entries = parts()
    write_engine(tmp_path / "m.engine", manifest, entries)
    plain = open_session(write_network(tmp_path / "p.engine", split_network()))
    with open_session(tmp_path / "m.engine") as session, plain:
        report = session.reports[0]
        assert report.implementation == "portable"
        assert "cuda: there is no NVIDIA driver here" in report.reason
        feeds = {session.inputs[0].name: picture()}
        expected = plain.infer(feeds)
        assert all(np.array_equal(v, expected[n]) for n, v in session.infer(feeds).items())


def test_kernels_for_another_gpu_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, _ = parts()
    one = manifest.segments[0].implementations[0]
    assert isinstance(one, Cuda)
    monkeypatch.setattr(cuda, "device_sm", lambda: 90)
    assert "sm_87, this GPU is sm_90" in str(cuda.misfit(cast(Any, None), one))
    monkeypatch.setattr(cuda, "device_sm", lambda: 87)
    assert cuda.misfit(cast(Any, None), one) is None


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    driver.load_driver.cache_clear()
    monkeypatch.setattr(driver, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    assert "no NVIDIA driver" in str(cuda.why_not())
    driver.load_driver.cache_clear()
