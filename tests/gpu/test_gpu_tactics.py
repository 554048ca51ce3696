"""Which tactics an engine carries, what memory they take, and what is said of its kernels."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from gpu_graphs import ORIN, Case, convolution, node
from hypothesis import given
from hypothesis import strategies as st

from device.engine.cuda_manifest import CompiledKernel, Cuda, Launch, Tactic
from device.engine.cuda_manifest import TunableOp as EngineOp
from device.runtime.cuda.facts import GpuFacts
from device.runtime.cuda.tactics import tactic_key
from device.runtime.timing_cache import TimingCache, TimingCacheError
from toolkit.cli.main import tandem
from toolkit.errors import BuildError
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.compile_segment import GpuSegment, compile_segment
from toolkit.gpu.ir.launch import KernelLaunch, KernelSpec, TunableOp
from toolkit.gpu.lower import lower_segment
from toolkit.gpu.report import memory_line, report_lines, report_segment
from toolkit.gpu.schedule.tactics import TacticOptions, fastest_first, timed_text, times_for
from toolkit.gpu.schedule.workspace import fit_workspace
from toolkit.gpu.target import GpuTarget

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")

BOARD = GpuFacts(
    name="Orin",
    sm=87,
    sm_count=8,
    sm_mhz=1173,
    memory_mhz=3199,
    l2_bytes=4194304,
    cuda="12.6",
    driver="36.4.3",
    power_mode="2",
)
SPEC = KernelSpec("matmul", (), (), 4, 1)


def call(reads: str, writes: str) -> KernelLaunch:
    return KernelLaunch(SPEC, (1, 1, 1), (), tuple(reads.split()), tuple(writes.split()))


def names(ops: Sequence[TunableOp]) -> list[list[str]]:
    """What the last call of each tactic is named after: its grid's width."""
    return [[str(tactic[-1].grid[0]) for tactic in op.tactics] for op in ops]


def numbered(*counts: int) -> tuple[TunableOp, ...]:
    """Work with this many tactics each, told apart by their grids."""
    return tuple(
        TunableOp(
            (f"n{at}",),
            tuple((KernelLaunch(SPEC, (number + 1, 1, 1), (), (), ()),) for number in range(n)),
        )
        for at, n in enumerate(counts)
    )


def cache(**times: float) -> TimingCache:
    return TimingCache().with_times(BOARD, times)


def test_the_fastest_tactic_stays_alone_or_comes_first() -> None:
    ops, keys = numbered(3, 2), [["a", "b", "c"], ["d", "e"]]
    (times,) = cache(a=3.0, b=1.0, c=2.0, d=1.0).devices
    assert names(fastest_first(ops, keys, times, only=True)) == [["2"], ["1", "2"]]
    assert names(fastest_first(ops, keys, times, only=False)) == [["2", "1", "3"], ["1", "2"]]


def test_times_are_those_of_the_gpu_of_this_kind_that_has_most() -> None:
    fewer = msgspec.structs.replace(BOARD, power_mode="0")
    larger = msgspec.structs.replace(BOARD, sm_count=16)
    timings = (
        TimingCache()
        .with_times(fewer, {"a": 1.0})
        .with_times(larger, {"a": 1.0, "b": 1.0, "c": 1.0})
        .with_times(BOARD, {"a": 1.0, "b": 1.0})
    )
    result = times_for(timings, ORIN, [["a", "b"], ["c"]])
    assert result is not None
    assert result.gpu == BOARD
    assert "Orin (driver 36.4.3, power mode 2), 1 of 1 choices" in timed_text(
        "gpu0", [["a", "b"], ["c"]], result, ORIN
    )


@pytest.mark.parametrize("gpu", [GpuTarget(87, 16), GpuTarget(90, 8)])
def test_times_of_another_kind_of_gpu_are_not_used(gpu: GpuTarget) -> None:
    assert times_for(cache(a=1.0), gpu, [["a"]]) is None
    text = timed_text("gpu0", [["a", "b"]], None, gpu)
    assert f"sm_{gpu.sm} with {gpu.sm_count} SMs" in text
    assert "by estimate" in text


def test_times_of_other_tactics_are_not_used() -> None:
    assert times_for(cache(a=1.0), ORIN, [["b"]]) is None


SPLIT = (
    TunableOp(("first",), ((call("x", "y"),),)),
    # One tactic in place, two with scratch of their own.
    TunableOp(
        ("second",),
        (
            (call("y", "large"), call("large", "z")),
            (call("y", "z"),),
            (call("y", "small"), call("small", "z")),
        ),
    ),
)
SIZES = {"x": 256, "y": 256, "z": 256, "large": 4096, "small": 1024}


@pytest.mark.parametrize(
    ("limit", "tactics"),
    [(None, 3), (5632, 3), (5631, 2), (1536, 2), (1535, 1), (512, 1)],
)
def test_tactics_whose_scratch_breaks_the_limit_are_left_out(
    limit: int | None, tactics: int
) -> None:
    fitted = fit_workspace(SPLIT, SIZES, ["x"], ["z"], limit)
    assert len(fitted.ops[1].tactics) == tactics
    assert limit is None or fitted.workspace_bytes <= limit
    assert (call("y", "z"),) in fitted.ops[1].tactics


def test_scratch_that_several_tactics_share_is_left_out_with_all_of_them() -> None:
    shared = tuple((call("x", s), call(s, "y")) for s in ("large", "large", "small"))
    op = TunableOp(("both",), (*shared, (call("x", "y"),)))
    fitted = fit_workspace((op,), SIZES, ["x"], ["y"], 512 + 1024)
    assert fitted.ops[0].tactics == op.tactics[2:]


def test_a_workspace_that_cannot_keep_the_limit_is_refused_with_the_numbers() -> None:
    sizes = {name: size * 2**20 // 16 for name, size in SIZES.items()}  # 32 MiB without scratch
    with pytest.raises(
        BuildError, match=r"takes 32\.000 MiB, the limit is 31\.500; 32\.000 MiB are"
    ):
        fit_workspace(SPLIT, sizes, ["x"], ["z"], 63 * 2**19)
    fit_workspace(SPLIT, sizes, ["x"], ["z"], 32 * 2**20)


@given(
    st.lists(st.integers(1, 5000), min_size=2, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=8),
)
def test_tensors_that_live_at_once_share_no_byte(
    sizes: list[int], edges: list[tuple[int, int]]
) -> None:
    count = len(sizes)
    ops = tuple(TunableOp((), ((call(f"t{a % count}", f"t{b % count}"),),)) for a, b in edges)
    known = {f"t{at}": size for at, size in enumerate(sizes)}
    first, last = f"t{edges[0][0] % count}", f"t{edges[-1][1] % count}"
    fitted = fit_workspace(ops, known, [first], [last])
    uses: dict[str, list[int]] = {first: [0], last: [len(ops)]}
    for at, one in enumerate(ops):
        for base in one.touched:
            uses.setdefault(base, []).append(at)
    assert set(fitted.offsets) == set(uses)
    live = 0
    for at in range(len(ops) + 1):
        held = [name for name, when in uses.items() if min(when) <= at <= max(when)]
        ends = [(fitted.offsets[name], fitted.offsets[name] + known[name]) for name in held]
        ordered = sorted(ends)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered))
        live = max(live, sum(known[name] for name in held))
    assert fitted.largest_live_bytes == live <= fitted.workspace_bytes


def segment(*kernels: CompiledKernel) -> GpuSegment:
    launches = [Launch(kernel=at, grid=(1, 1, 1), arguments=()) for at in range(len(kernels))]
    ops = tuple(
        EngineOp(nodes=(f"node{at}",), tactics=(Tactic(launches=(one,)),))
        for at, one in enumerate(launches)
    )
    one = Cuda(
        sm=87,
        kernels=kernels,
        works=ops,
        weights="w",
        workspace_bytes=2**20,
        inputs=(),
        outputs=(),
    )
    return GpuSegment(one, {"w": np.zeros(2**21, np.uint8)}, (), 2**20, 2**19)


def kernel(name: str, **fields: object) -> CompiledKernel:
    one = CompiledKernel(
        cubin=name, function=name, threads=128, shared_bytes=0, registers=32, spill_bytes=0
    )
    return msgspec.structs.replace(one, **fields)


def test_the_report_names_the_lowest_occupancy_and_every_spill() -> None:
    segment_report = report_segment(
        "gpu0", segment(kernel("fine"), kernel("large", registers=255, spill_bytes=64))
    )
    lines = "\n".join(report_lines(segment_report))
    # 1536 threads an SM, 65536 registers: 2 blocks of 4 warps with 8192 registers each.
    assert [row.occupancy for row in segment_report.kernels] == [1.0, pytest.approx(8 / 48)]
    assert "lowest occupancy 17%: large, 255 registers" in lines
    assert "large spills 64 bytes a thread (node1)" in lines
    assert "weights 2.00 MiB, workspace 1.00 MiB (at least 0.50 MiB" in lines


def test_the_report_adds_up_the_memory_of_all_segments() -> None:
    segment_report = report_segment("gpu0", segment(kernel("fine")))
    assert memory_line([segment_report, segment_report], 2**19) == (
        "memory of a session: 0.50 MiB arena between segments, 2.00 MiB GPU workspace; "
        "GPU weights 4.00 MiB, once for all sessions"
    )


def test_the_report_says_that_nothing_spills() -> None:
    lines = report_lines(report_segment("gpu0", segment(kernel("fine"))))
    assert lines[-1] == "  no kernel spills registers"


@pytest.mark.parametrize("tactics", [1, 2])
def test_the_report_says_what_the_board_s_times_may_gain_where_there_is_a_choice(
    tactics: int,
) -> None:
    segment_report = report_segment("gpu0", segment(kernel("fine")))
    lines = report_lines(msgspec.structs.replace(segment_report, tactics=tactics, operations=1))
    assert ("a timing cache of the board" in "\n".join(lines)) == (tactics > 1)


def test_the_report_says_that_registers_are_not_known() -> None:
    bare = kernel("bare", registers=None, spill_bytes=None)
    segment_report = report_segment("gpu0", segment(bare))
    assert segment_report.kernels[0].occupancy is None
    assert "not known" in report_lines(segment_report)[-1]


def small(rng: np.random.Generator) -> Case:
    return convolution(rng, (1, 8, 8, 8), 16, (3, 3), node("Relu", "c", "y"))


@needs_compiler
def test_a_build_with_the_board_s_times_carries_the_fastest_alone(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    piece = small(rng).segment()

    def lower(tactics: TacticOptions) -> GpuSegment:
        gpu = GpuTarget(87, 8, exhaustive=tactics.exhaustive)
        program = lower_segment(piece.model, gpu=gpu, precision="fp16")
        return compile_segment(piece.name, program, gpu=gpu, tactics=tactics)

    plain = lower(TacticOptions())
    at, chosen = next(
        (at, op) for at, op in enumerate(plain.implementation.works) if len(op.tactics) > 1
    )
    sha256 = [one.sha256 for one in plain.kernels]
    keys = [
        tactic_key(tactic.launches, plain.implementation.kernels, sha256.__getitem__)
        for tactic in chosen.tactics
    ]
    times = {key: float(len(keys) - index) for index, key in enumerate(keys)}  # the last is fastest
    result = lower(TacticOptions(timings=cache(**times)))
    (tactic,) = result.implementation.works[at].tactics
    functions = [result.implementation.kernels[launch.kernel].cubin for launch in tactic.launches]
    expected = [
        plain.implementation.kernels[one.kernel].cubin for one in chosen.tactics[-1].launches
    ]
    assert functions == expected
    assert len(result.kernels) < len(plain.kernels)
    assert set(result.entries) < set(plain.entries)
    assert "1 of 1 choices" in result.notes[0]


def test_an_exhaustive_build_carries_more(rng: np.random.Generator) -> None:
    case = convolution(rng, (1, 64, 32, 32), 128, (3, 3), node("Relu", "c", "y"))
    few, every = (
        case.lower("fp16", GpuTarget(87, 8, exhaustive=exhaustive)) for exhaustive in (False, True)
    )
    more = [len(b.tactics) - len(a.tactics) for a, b in zip(few.ops, every.ops, strict=True)]
    assert max(more) > 0 <= min(more)


def test_a_build_asks_for_a_timing_cache_that_is_there_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    arguments = ["build", str(tmp_path / "m.onnx"), "--timing-cache", str(path)]
    missing = CliRunner().invoke(tandem, arguments)
    assert missing.exit_code == 2
    assert "tandem bench" in missing.output
    path.write_text("{")
    damaged = CliRunner().invoke(tandem, arguments)
    assert isinstance(damaged.exception, TimingCacheError)


@needs_compiler
def test_a_build_refuses_a_workspace_that_is_too_small(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    onnx.save(small(rng).model(), tmp_path / "m.onnx")
    arguments = [
        "build",
        str(tmp_path / "m.onnx"),
        "--profile",
        "orin-nano-8gb",
        "--precision",
        "fp16",
    ]
    refused = CliRunner().invoke(tandem, [*arguments, "--workspace-mib", "0.001"])
    assert isinstance(refused.exception, BuildError)
    assert str(refused.exception).startswith("m.onnx: segment gpu.0: the GPU workspace takes ")
    assert "MiB, the limit is 0.001; " in str(refused.exception)
    assert not (tmp_path / "m.engine").exists()
    enough = str(refused.exception).split("takes ")[1].split(" MiB")[0]
    built = CliRunner().invoke(tandem, [*arguments, "--workspace-mib", enough, "--json"])
    assert built.exit_code == 0, built.output
    built = CliRunner().invoke(tandem, [*arguments, "--workspace-mib", "1", "--json"])
    (report,) = json.loads(built.stdout)["gpu"]
    assert report["largest_live_bytes"] <= report["workspace_bytes"] <= 2**20
    assert all(0 < row["occupancy"] <= 1 for row in report["kernels"])
    shown = CliRunner().invoke(tandem, ["inspect", str(tmp_path / "m.engine")]).output
    assert (
        f"kernels for sm_87: {report['operations']} operations, {report['tactics']} tactics, "
        f"{len(report['kernels'])} kernels"
    ) in shown
