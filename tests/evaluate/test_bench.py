"""`tandem bench`: figures of many times, the machine's state, and what is refused."""

import dataclasses
import io
import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from engine_fixtures import picture, split_network, write_network
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from device.engine.file import open_engine
from device.errors import SessionError
from toolkit.cli.main import tandem
from toolkit.errors import BenchError
from toolkit.evaluate.bench.distribution import distribution
from toolkit.evaluate.bench.measure import BenchOptions, GpuTimes, Layer, measure
from toolkit.evaluate.bench.report import BenchResult, bench_builtins, bench_table
from toolkit.evaluate.bench.state import readings, versions
from toolkit.machine import Machine, this_machine

FAST = ("--duration", "0", "--warmup", "0")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_network(tmp_path_factory.mktemp("bench") / "m.engine", split_network())


@pytest.fixture
def engine(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(written, tmp_path))


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(tandem, ["bench", *map(str, arguments)])


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=300))
def test_percentiles_are_times_that_were_measured(times_ms: list[float]) -> None:
    result = distribution(times_ms)
    named = {"median_ms": 50, "p90_ms": 90, "p95_ms": 95, "p99_ms": 99}
    for name, percent in named.items():
        value = getattr(result, name)
        assert value == np.percentile(times_ms, percent, method="inverted_cdf")
    assert (result.min_ms, result.max_ms) == (min(times_ms), max(times_ms))
    assert result.mean_ms == pytest.approx(np.mean(times_ms))
    assert result.count == len(times_ms)


def test_a_portable_engine_is_measured_and_says_that_no_gpu_was(engine: Path) -> None:
    shown = bench(engine, *FAST, "--profile")
    assert shown.exit_code == 0, shown.output
    assert "no segment runs on a GPU here" in shown.output
    assert "throughput" in shown.output
    assert "portable" in shown.output


def test_a_timing_cache_without_a_gpu_is_said_to_be_left_alone(
    engine: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "times.json"
    document = json.loads(bench(engine, *FAST, "--timing-cache", cache, "--json").stdout)
    assert any(str(cache) in note and "no tactic was timed" in note for note in document["notes"])
    assert not cache.exists()
    assert not any(
        "tactic" in n for n in json.loads(bench(engine, *FAST, "--json").stdout)["notes"]
    )


def test_json_holds_the_times_and_the_machine(engine: Path) -> None:
    document = json.loads(bench(engine, *FAST, "--json").stdout)
    measured = document["measured"]
    assert measured["latency"]["count"] == measured["inferences"] >= 10
    assert measured["throughput_qps"] == pytest.approx(measured["inferences"] / measured["wall_s"])
    assert measured["gpu"] == []
    assert document["versions"]["numpy"] == np.__version__
    with open_engine(engine) as opened:
        assert document["sha256"] == opened.sha256
        assert document["precision"] == opened.manifest.provenance.precision


def test_iterations_are_for_each_stream(engine: Path) -> None:
    with open_engine(engine) as opened:
        result = measure(opened, BenchOptions(iterations=7, warmup_s=0, streams=3))
    assert result.inferences == result.latency.count == 21


def test_a_profile_has_a_row_for_each_segment_on_the_cpu(engine: Path) -> None:
    with open_engine(engine) as opened:
        result = measure(opened, BenchOptions(iterations=1, warmup_s=0, profile=True))
        segments = opened.manifest.segments
    assert [row.segment for row in result.layers] == [one.name for one in segments]
    assert [row.nodes for row in result.layers] == [one.nodes for one in segments]
    assert sum(row.share for row in result.layers) == pytest.approx(1)


def test_the_machine_is_read_while_the_engine_runs(engine: Path) -> None:
    called: list[bool] = []
    with open_engine(engine) as opened:
        options = BenchOptions(iterations=1, warmup_s=0)
        measure(opened, options, under_load=lambda: called.append(True))
    assert called == [True]


def test_inputs_come_from_a_file(engine: Path, tmp_path: Path) -> None:
    with open_engine(engine) as opened:
        (name,) = opened.manifest.inputs
    np.savez(tmp_path / "x.npz", **{name: picture()})  # type: ignore[arg-type]
    assert bench(engine, *FAST, "--input", tmp_path / "x.npz").exit_code == 0
    np.savez(tmp_path / "wrong.npz", elsewhere=picture())
    refused = bench(engine, *FAST, "--input", tmp_path / "wrong.npz")
    assert "does not take 'elsewhere'" in str(refused.exception)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 broken"])
def test_a_file_that_is_no_npz_is_refused(engine: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    refused = bench(engine, *FAST, "--input", tmp_path / "x.npz")
    assert isinstance(refused.exception, BenchError)
    assert "numpy.savez" in str(refused.exception)


def test_one_array_is_no_npz(engine: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", picture())
    refused = bench(engine, *FAST, "--input", tmp_path / "x.npy")
    assert "one array without a name" in str(refused.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shape", "elsewhere=1x2"), "no such input"),
        (("--shape", "{name}=1x2"), "the engine takes"),
        (("--batch", "7"), "has the fixed batch"),
    ],
)
def test_sizes_that_the_engine_does_not_have_are_refused(
    engine: Path, words: tuple[str, ...], message: str
) -> None:
    with open_engine(engine) as opened:
        (name,) = opened.manifest.inputs
    refused = bench(engine, *FAST, *(word.format(name=name) for word in words))
    assert isinstance(refused.exception, BenchError)
    assert message in str(refused.exception)


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        (BenchOptions(), 2),  # what the engine was built for
        (BenchOptions(batch=4), 4),
        (BenchOptions(shapes={"x": (3, *picture().shape[1:])}), 3),
    ],
)
def test_dynamic_dimensions_have_the_sizes_asked_for(
    options: BenchOptions, batch: int, tmp_path: Path
) -> None:
    path = write_network(tmp_path / "m.engine", split_network("batch"))
    with open_engine(path) as opened:
        assert [dim.opt for dim in opened.manifest.dims] == [2]
        result = measure(opened, dataclasses.replace(options, iterations=1, warmup_s=0))
    assert result.items == batch
    assert result.shapes["x"][0] == batch


def test_a_size_out_of_range_is_refused(tmp_path: Path) -> None:
    path = write_network(tmp_path / "m.engine", split_network("batch"))
    refused = bench(path, *FAST, "--batch", "5")
    assert isinstance(refused.exception, SessionError)
    assert "takes 1 to 4" in str(refused.exception)


def test_sizes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = write_network(tmp_path / "m.engine", split_network("batch"))
    rest = "x".join(map(str, picture().shape[1:]))
    refused = bench(path, *FAST, "--batch", "2", "--shape", f"x=3x{rest}")
    assert isinstance(refused.exception, BenchError)
    assert "'batch' is asked to be 3 and, for input 'x', 2" in str(refused.exception)
    assert bench(path, *FAST, "--batch", "3", "--shape", f"x=3x{rest}").exit_code == 0


@pytest.mark.parametrize("option", ["--duration", "--warmup"])
def test_a_time_that_is_no_number_is_refused(engine: Path, option: str) -> None:
    refused = bench(engine, option, "nan")
    assert refused.exit_code == 2
    assert "'nan' is not a finite number" in refused.output


def test_a_file_in_an_npz_that_is_no_array_is_refused(engine: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("x.txt", "words")
    refused = bench(engine, *FAST, "--input", tmp_path / "x.npz")
    assert isinstance(refused.exception, BenchError)
    assert "'x.txt' is no array" in str(refused.exception)


def test_an_npz_with_damaged_compression_is_refused(engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros(4000))
    data = bytearray(path.read_bytes())
    name, extra = (int.from_bytes(data[at : at + 2], "little") for at in (26, 28))
    data[30 + name + extra] = 0xFF  # the first byte of the deflated data: a block of no known type
    path.write_bytes(data)
    refused = bench(engine, *FAST, "--input", path)
    assert isinstance(refused.exception, BenchError)
    assert "cannot be read as .npz" in str(refused.exception)


def test_an_input_file_has_its_own_shapes(engine: Path) -> None:
    assert bench(engine, "--input", "x.npz", "--batch", "2").exit_code == 2


def machine(root: Path, files: Mapping[str, str], commands: Mapping[str, str]) -> Machine:
    """A machine with these files, and programs with this output."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    def command(arguments: Sequence[str]) -> str | None:
        return commands.get(arguments[0])

    return dataclasses.replace(this_machine(), root=root, command=command)


def test_a_jetson_says_its_clocks_and_its_power_mode(tmp_path: Path) -> None:
    files = {
        "proc/device-tree/model": "NVIDIA Jetson Orin NX Engineering Reference Kit\0",
        "sys/class/devfreq/17000000.ga10b/cur_freq": "918000000\n",
        "sys/class/devfreq/17000000.ga10b/max_freq": "1173000000\n",
        "sys/kernel/debug/bpmp/debug/clk/emc/rate": "3199000000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1984000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n",
        "proc/cpuinfo": "processor\t: 0\nprocessor\t: 1\n",
    }
    commands = {"nvpmodel": "NV Power Mode: MAXN_SUPER\n2\n"}
    assert readings(machine(tmp_path, files, commands)) == {
        "board": "NVIDIA Jetson Orin NX Engineering Reference Kit",
        "GPU clock": "918 MHz",
        "GPU clock, highest": "1173 MHz",
        "memory clock": "3199 MHz",
        "CPU clock": "1984 MHz",
        "CPU governor": "schedutil",
        "CPU cores": "2",
        "power mode": "MAXN_SUPER",
    }


def test_a_thor_says_the_clock_of_its_gpu_and_not_of_its_video_engines(tmp_path: Path) -> None:
    files = {
        "sys/class/devfreq/bwmgr/cur_freq": "4266000000\n",
        "sys/class/devfreq/gpu-gpc-0/cur_freq": "315000000\n",
        "sys/class/devfreq/gpu-gpc-0/max_freq": "1575000000\n",
        "sys/class/devfreq/gpu-nvd-0/cur_freq": "1692000000\n",
        "sys/class/devfreq/gpu-nvd-0/max_freq": "1692000000\n",
    }
    assert readings(machine(tmp_path, files, {})) == {
        "GPU clock": "315 MHz",
        "GPU clock, highest": "1575 MHz",
        "memory clock": "4266 MHz",
    }


def test_a_computer_with_a_gpu_says_what_nvidia_smi_prints(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": "processor : 0\nmodel name : A CPU @ 2 GHz\n"}
    commands = {"nvidia-smi": "1980 MHz, 1980 MHz, 3201 MHz, 184.32 W, [N/A], 43, P0\n"}
    assert readings(machine(tmp_path, files, commands)) == {
        "CPU": "A CPU @ 2 GHz",
        "CPU cores": "1",
        "GPU clock": "1980 MHz",
        "GPU clock, highest": "1980 MHz",
        "GPU memory clock": "3201 MHz",
        "GPU power": "184.32 W",
        "GPU temperature": "43 C",
        "GPU performance state": "P0",
    }


@pytest.mark.parametrize("output", ["", "No devices were found\n", "1, 2\n"])
def test_what_is_no_answer_of_nvidia_smi_is_left_out(tmp_path: Path, output: str) -> None:
    assert readings(machine(tmp_path, {}, {"nvidia-smi": output})) == {}


def test_a_clock_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    files = {"sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "<unknown>\n"}
    assert readings(machine(tmp_path, files, {})) == {}


def test_a_report_of_a_gpu_has_trtexec_s_rows_and_fits_80_columns(engine: Path) -> None:
    times = distribution([0.1, 0.2, 345.678])
    gpu = GpuTimes(segment="gpu0", enqueue=times, copy_in=times, compute=times, copy_out=times)
    layer = Layer(
        segment="gpu0",
        nodes=("a", "b", "c", "d"),
        kernels=("matmul", "add"),
        tactic=1,
        tactics=3,
        time_ms=0.0125,
        share=1.0,
    )
    with open_engine(engine) as opened:
        measured = measure(opened, BenchOptions(iterations=1, warmup_s=0))
        manifest = opened.manifest
    measured = msgspec.structs.replace(measured, gpu=(gpu,), layers=(layer,), items=4)
    result = BenchResult(
        engine="m.engine",
        sha256="0" * 64,
        profile="h200",
        precision="fp16",
        measured=measured,
        machine={"GPU clock": "1980 MHz"},
        versions=versions(this_machine()),
    )
    console = Console(width=80, record=True, quiet=False, file=io.StringIO())
    console.print(bench_table(result, manifest))
    shown = console.export_text()
    for word in ("latency (infer)", "enqueue (CPU)", "H2D", "GPU compute", "D2H", "345.68"):
        assert word in shown
    assert "a b c and 1 more" in shown
    assert "matmul + add" in shown
    assert "2 of 3" in shown
    assert "12.5" in shown
    assert "at batch 4" in shown
    assert "1980 MHz" in shown
    assert "…" not in shown
    assert json.loads(json.dumps(bench_builtins(result)))["measured"]["gpu"][0]["segment"] == "gpu0"
