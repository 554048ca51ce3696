"""The selftest of a board, before the strict double of TensorRT: what it proves and what it loses.

What a GPU alone can prove is proven there, with a kit: docs/board_kit.md.
"""

import getpass
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import cuda_double
import numpy as np
import onnx
import pytest
from model_fixtures import small_convnet
from tensorrt_fixtures import install
from video_fixtures import wait_for

from device.errors import TandemError
from device.runtime.tensorrt.releases import find_release
from device.selftest import dla, rules
from device.selftest.kit import Kit, KitError, load_kit
from device.selftest.machine import read_machine
from device.selftest.report import (
    RECORDED,
    KernelRow,
    Machine,
    Report,
    RuleRow,
    is_report,
    read_report,
    write_report,
)
from device.selftest.runner import Work, not_reached, run_step
from device.selftest.sensors import clocks_locked, clocks_mhz, rails_watts
from device.selftest.steps import MINUTES, STEPS, deadlines_s
from scripts.make_board_kit import check_agent_runs, copy_script, rule_models
from scripts.read_board_report import lines
from scripts.rule_corrections import summarize_rules
from toolkit.board_kit.make import (
    KitRequest,
    NetworkModel,
    ReferenceModel,
    in_order,
    make_kit,
)
from toolkit.board_kit.recorded import recorded_in
from toolkit.engine.target import choose_target
from toolkit.importers.onnx import ModelBytes

ROOT = Path(__file__).parents[2]
RULES = ("conv.stride", "pool.window", "lrn.window")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelBytes:
    path = small_convnet(tmp_path_factory.mktemp("model") / "m.onnx", np.random.default_rng(5))
    return ModelBytes("m.onnx", path.read_bytes())


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory, model: ModelBytes) -> Path:
    """A kit for a board with a DLA: a reference on it, and three rules on both sides."""
    folder = tmp_path_factory.mktemp("kit")
    reference = ReferenceModel("m", model, {"x": (1, 3, 32, 32)}, ("int8",), on="dla")
    cases = [row for row in rule_models(choose_target("orin-nx-16gb")) if row.case.rule in RULES]
    request = KitRequest("orin-nx-16gb", references=[reference], rules=cases, demo=False)
    with cuda_double.interpreted_cubins():
        make_kit(folder, request, lambda _: None)
    return folder


def test_a_network_for_a_board_with_a_dla_is_there_on_each_processor(
    tmp_path: Path, model: ModelBytes
) -> None:
    request = KitRequest(
        "orin-nx-16gb", networks=[NetworkModel("m", model, "ab" * 32)], precisions=("int8",),
        demo=False,
    )  # fmt: skip
    with cuda_double.interpreted_cubins():
        kit, left_out = make_kit(tmp_path, request, lambda _: None)
    assert [case.variant for case in kit.networks][:2] == ["dla", "gpu"]
    assert all("nothing on the DLA" in reason for reason in left_out)


@pytest.fixture(scope="module")
def laptop_kit(tmp_path_factory: pytest.TempPathFactory, model: ModelBytes) -> Path:
    """A kit that this machine can run to the end: on its CPU, with a network and the demo."""
    folder = tmp_path_factory.mktemp("laptop")
    request = KitRequest(
        "laptop",
        references=[ReferenceModel("m", model, {"x": (1, 3, 32, 32)}, ("fp32",))],
        networks=[NetworkModel("m", model, "ab" * 32)],
        precisions=("int8",),
    )
    make_kit(folder, request, lambda _: None)
    return folder


def selftest(kit: Path, out: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "device.agent", "selftest", "--kit", str(kit)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"}
    return subprocess.run(
        [*command, "--out", str(out), *options],
        cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


def _obey_signals() -> None:
    """Tests in the background of a shell ignore SIGINT, below nohup SIGHUP; a child inherits it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start_selftest(kit: Path, out: Path, *options: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "device.agent", "selftest", "--kit", str(kit)]
    return subprocess.Popen(
        [*command, "--out", str(out), *options],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=_obey_signals,  # noqa: PLW1509
    )  # fmt: skip


def run(
    kit: Path, folder: Path, name: str, *, seconds: float = 60.0, **changes: float
) -> tuple[object, tuple[RuleRow, ...]]:
    """Run one step of a kit in this process."""
    folder.mkdir(exist_ok=True)
    work = Work(load_kit(kit), kit, folder, lambda *_: None, lambda *_: None)
    step = next(step for step in STEPS if step.name == name)
    row, rows = run_step(work, replace(step, **changes), time.monotonic() + seconds)
    return row, rows


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_a_whole_selftest_comes_back_as_one_file_without_private_data(
    laptop_kit: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.tandem-report"
    done = selftest(laptop_kit, out, "--json")
    assert done.returncode == 0, done.stderr
    steps = {step["name"]: step for step in json.loads(done.stdout)["steps"]}
    assert {name: step["done"] for name, step in steps.items()} == {
        "machine": 1, "kernels": 1, "rules": 0, "dla": 0, "networks": 1, "demo": 1,
        "tactics": 0,
    }  # fmt: skip
    report = read_report(out).report
    (kernels,) = report.kernels
    assert (kernels.problem, kernels.repeatable) == ("", True)
    assert [output.relative for output in kernels.outputs] == [0.0]
    (network,) = report.networks
    assert (network.problem, network.network, network.precision) == ("", "m", "int8")
    assert 0 < network.p10_ms <= network.median_ms <= network.p90_ms
    assert [s.implementation for s in network.segments] == ["portable"]
    (demo,) = report.demo
    assert (demo.problem, demo.frames) == ("", 30)
    assert demo.detections > 0
    assert is_report(out)
    assert out.stat().st_size < 5_000_000
    listed = selftest_list(out)
    for secret in (socket.gethostname(), str(tmp_path), str(Path.home()), str(laptop_kit)):
        assert secret not in listed
    user = getpass.getuser()
    assert user == "root" or user not in listed


def selftest_list(out: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "device.agent", "selftest", "--list", str(out)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("version", ["8.6.1", "11.4.1"])
def test_each_rules_case_is_put_to_tensorrt(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(version, tmp_path, monkeypatch)
    step, rows = run(kit, tmp_path / "work", "rules")
    assert (step.done, step.crashes, step.problem) == (step.items, 0, "")
    assert {row.rule for row in rows} == set(RULES)
    assert [row.problem for row in rows] == [""] * len(rows)
    # The double has rules of its own, which agree with the table on these cases.
    assert {row.expected for row in rows} == {True, False}
    assert all((row.can_run, row.built) == (row.expected, row.expected) for row in rows)
    assert {row.precision for row in rows} == ({"fp16"} if version == "11.4.1" else {"int8"})


@pytest.mark.parametrize("version", ["10.3.0", "11.4.1"])
def test_a_case_whose_ports_no_dla_can_have_is_asked_and_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """What it would say is of the ports, and would be read as a correction of the rule."""
    install(version, tmp_path, monkeypatch)
    models = rule_models(choose_target("orin-nx-16gb"))
    (gemm,) = (
        m for m in models if (m.case.rule, m.case.side, m.case.op) == ("product.form", "at", "Gemm")
    )
    typed = version == "11.4.1"
    (tmp_path / "m.onnx").write_bytes(gemm.half if typed else gemm.model)
    release = find_release(version)
    try:
        can_run, built, message = rules._ask(release, tmp_path / "m.onnx", int8=not typed)
    finally:
        sys.modules.pop("tensorrt", None)
    assert (gemm.case.expected, can_run, built) == (True, True, None)
    assert "has 2 dimensions" in message


def test_a_refusal_is_reported_with_what_tensorrt_said(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", f"refuse:{rules.NODE}")
    _, rows = run(kit, tmp_path / "work", "rules")
    assert {(row.can_run, row.built) for row in rows} == {(False, False)}
    assert all("does not run layer node on the DLA" in row.message for row in rows)


def test_a_crash_loses_one_item_and_says_which(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "segfault")
    short = replace_rules(kit, tmp_path / "short", 2)
    step, rows = run(short, tmp_path / "work", "rules")
    assert (step.done, step.crashes) == (2, 2)
    assert all("its process crashed (SIGSEGV)" in row.problem for row in rows)
    assert [(row.rule, row.built) for row in rows] == [(row.rule, None) for row in rows]


def test_an_item_that_hangs_is_ended_and_the_step_too(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "hang")
    step, rows = run(kit, tmp_path / "work", "rules", seconds=3.0, item_s=1.0)
    assert "it took longer than 1 s" in rows[0].problem
    assert len(rows) < step.items
    assert step.problem.startswith(f"out of time, {step.items - len(rows)} left out; give more")
    names = [case.name for case in load_kit(kit).rules]
    assert step.left_out == tuple(names[len(rows) :])
    machine = Machine()
    report = Report(
        tandem="", kit="", profile="orin-nx-16gb", seconds=3.0, steps=(step,), machine=machine
    )
    assert f"  left out: {', '.join(step.left_out)}" in lines(report, summarize_rules(report))


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)],
)
def test_a_selftest_that_is_ended_leaves_the_report_of_what_was_done(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_TIMES", "2 0 2")
    out, begun = tmp_path / "r.tandem-report", tmp_path / "begun"
    monkeypatch.setenv("TENSORRT_DOUBLE_BEGUN", str(begun))
    with start_selftest(
        kit, out, "--only", "machine", "--only", "rules", "--only", "networks"
    ) as run:
        # A rule takes two plans at most, so one of 8 is done; the others take 12 s and more.
        wait_for(lambda: begun.exists() and begun.read_text().count("plan") > 2, 60, "rules")
        run.send_signal(number)
        assert run.wait(20) == 0
    report = read_report(out).report
    steps = {step.name: step for step in report.steps}
    assert report.machine.python
    assert 0 < steps["rules"].done == len(report.rules) < steps["rules"].items
    assert steps["rules"].problem.startswith("the selftest was ended here,")
    assert len(steps["rules"].left_out) == steps["rules"].items - steps["rules"].done
    assert steps["networks"].problem == ""  # the kit has none


def test_a_selftest_below_nohup_goes_on_when_the_connection_ends(
    laptop_kit: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.tandem-report"
    command = ["nohup", sys.executable, "-m", "device.agent", "selftest", "--kit", str(laptop_kit)]
    with subprocess.Popen(
        [*command, "--out", str(out), "--only", "machine", "--only", "kernels"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as run_:  # fmt: skip
        wait_for(out.exists, 30, "the report")
        run_.send_signal(signal.SIGHUP)
        assert run_.wait(60) == 0
    assert [step.done for step in read_report(out).report.steps] == [1, 1]


def test_a_step_that_was_not_reached_is_in_the_report_from_the_start(kit: Path) -> None:
    step = next(step for step in STEPS if step.name == "rules")
    row = not_reached(load_kit(kit), step)
    assert (row.done, row.items) == (0, len(row.left_out))
    assert row.problem == f"not reached: the selftest was ended before it, {row.items} left out"


def test_the_first_cases_are_of_the_least_certain_rules_and_one_of_each() -> None:
    models = in_order(rule_models(choose_target("orin-nx-16gb")))
    rules = [row.case.rule for row in models]
    distinct = len(set(rules))
    certainties = [row.case.certainty for row in models]
    assert set(certainties[: certainties.index("documented")]) == {"recalled", "observed"}
    assert len({row.case.rule for row in models[: 2 * distinct]}) == distinct
    names = [row.case.name for row in models]
    for name in names:
        second = f"{name.removesuffix('-beyond')}-at"
        assert (
            not name.endswith("-beyond")
            or second not in names
            or (names.index(name) == names.index(second) + 1)
        )


def replace_rules(kit: Path, folder: Path, count: int) -> Path:
    """A kit with fewer cases."""
    folder.mkdir()
    (folder / "kit.zip").symlink_to(kit / "kit.zip")
    listed = json.loads((kit / "kit.json").read_text())
    listed["rules"] = listed["rules"][:count]
    (folder / "kit.json").write_text(json.dumps(listed))
    return folder


def test_a_board_without_tensorrt_says_so_for_each_case(kit: Path, tmp_path: Path) -> None:
    _, rows = run(kit, tmp_path / "work", "rules")
    assert {row.problem for row in rows} == {
        "TensorRT is not installed; install JetPack's python3-libnvinfer"
    }


def test_the_outputs_of_a_dla_come_back_for_the_emulator(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    (name,) = [row.name for row in load_kit(kit).references]
    with cuda_double.installed():
        row = dla.run(load_kit(kit), kit, tmp_path, name)
    assert (row.problem, row.item) == ("", name)
    report = Report(
        tandem="", kit="", profile="orin-nx-16gb", seconds=1.0, steps=(), recorded=(row,)
    )
    data = (tmp_path / RECORDED / f"{name}.npz").read_bytes()
    write_report(tmp_path / "r", report, {f"{RECORDED}{name}.npz": data})
    assert set(recorded_in(tmp_path / "r", row.engine_sha256)) == {"x", "y"}


def test_a_reference_that_does_not_reach_the_dla_records_nothing(kit: Path, tmp_path: Path) -> None:
    (name,) = [row.name for row in load_kit(kit).references]
    row = dla.run(load_kit(kit), kit, tmp_path, name)
    assert "did not run on the DLA" in row.problem
    assert not (tmp_path / RECORDED).exists()


def test_a_kit_that_was_changed_or_is_not_whole_is_refused(kit: Path, tmp_path: Path) -> None:
    with pytest.raises(KitError, match=r"kit\.json cannot be read"):
        load_kit(tmp_path)
    copy = replace_rules(kit, tmp_path / "copy", 1)
    (copy / "kit.zip").unlink()
    (copy / "kit.zip").write_bytes(b"other")
    with pytest.raises(KitError, match=r"is not the one that kit\.json lists"):
        load_kit(copy)
    listed = json.loads((copy / "kit.json").read_text())
    (copy / "kit.json").write_text(json.dumps({**listed, "format": 2}))
    with pytest.raises(KitError, match="has format 2, this Tandem reads 1"):
        load_kit(copy)


def test_the_cases_of_rules_are_valid_models_on_both_sides_of_most_rules() -> None:
    models = rule_models(choose_target("orin-nx-16gb"))
    sides: dict[str, set[str]] = {}
    for row in models:
        for data in filter(None, (row.model, row.half)):
            onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
        sides.setdefault(row.case.rule, set()).add(row.case.side)
        assert row.case.expected == (row.case.side == "at")
    assert len(models) >= 180
    assert sum(len(each) == 2 for each in sides.values()) >= 60
    assert rule_models(choose_target("orin-nano-8gb")) == []  # no DLA, nothing to ask


@pytest.mark.slow
def test_the_command_makes_a_kit_with_its_script_and_wheels(tmp_path: Path) -> None:
    (tmp_path / "tandem_edge-0.whl").write_bytes(b"wheel")
    model_file = small_convnet(tmp_path / "mine.onnx", np.random.default_rng(5))
    done = subprocess.run(
        [sys.executable, "-m", "scripts.make_board_kit", "--profile", "laptop", "--no-networks",
         "--reference", "convolutions", "--model", str(model_file), "--no-demo", "--json",
         "--wheel", str(tmp_path / "tandem_edge-0.whl"), "--out", str(tmp_path / "kit")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["references"], counts["rules"], counts["networks"]) == (3, 0, 1)
    kit = load_kit(tmp_path / "kit")
    assert kit.networks[0].model_sha256 == hashlib.sha256(model_file.read_bytes()).hexdigest()
    assert (tmp_path / "kit/board_kit.sh").exists()
    assert (tmp_path / "kit/numpy_bound.py").exists()
    assert (tmp_path / "kit/wheels/tandem_edge-0.whl").read_bytes() == b"wheel"


@pytest.mark.parametrize(
    ("profile", "jetpack", "runs"),
    [
        ("orin-nx-16gb", "6.0", True), ("orin-nx-16gb", "5.1.6", False),
        ("agx-xavier-32gb", None, False), ("jetson-nano", None, False), ("laptop", None, True),
    ],
)  # fmt: skip
def test_a_kit_for_a_jetpack_without_the_agent_is_refused(
    profile: str, jetpack: str | None, runs: bool
) -> None:
    target = choose_target(profile, jetpack)
    if runs:
        check_agent_runs(target)
        return
    with pytest.raises(TandemError, match=r"needs 3\.10: plan and export for it instead"):
        check_agent_runs(target)


def test_the_page_of_the_kit_has_the_steps_in_their_order_with_their_ends() -> None:
    page = (ROOT / "docs/board_kit.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\d.]+) \|$", page, re.MULTILINE)
    ends = [f"{seconds / 60:.1f}" for seconds in deadlines_s(MINUTES)]
    assert rows == list(zip([step.name for step in STEPS], ends, strict=True))
    assert sum(step.share for step in STEPS) == pytest.approx(1)


def test_the_page_of_the_kit_lists_every_file_of_one(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "w.whl").touch()
    copied = tmp_path / "copied"
    copied.mkdir()
    copy_script(copied, [tmp_path / "w.whl"])
    files = {path.name + "/" * path.is_dir() for path in (*kit.iterdir(), *copied.iterdir())}
    table = (
        (ROOT / "docs/board_kit.md").read_text().partition("| in `kit/`")[2].partition("\n\n")[0]
    )
    assert files == set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE))


def test_the_steps_fit_into_the_time_and_have_distinct_names() -> None:
    times = deadlines_s(MINUTES)
    assert list(times) == sorted(times)
    assert times[-1] <= MINUTES * 60
    assert len({step.name for step in STEPS}) == len(STEPS)
    empty = Kit(tandem="", profile="laptop", sha256="")
    assert [step.name for step in STEPS if step.items(empty)] == ["machine"]


# Documentation/hwmon/ina3221.rst of the kernel, and the rails of an Orin NX as tegrastats has them.
ORIN_NX: Mapping[str, str] = {
    "sys/class/hwmon/hwmon3/name": "ina3221",
    "sys/class/hwmon/hwmon3/in1_label": "VDD_IN",
    "sys/class/hwmon/hwmon3/in1_input": "5040",
    "sys/class/hwmon/hwmon3/curr1_input": "1000",
    "sys/class/hwmon/hwmon3/in2_label": "VDD_CPU_GPU_CV",
    "sys/class/hwmon/hwmon3/in2_input": "5000",
    "sys/class/hwmon/hwmon3/curr2_input": "250",
    "sys/class/hwmon/hwmon3/in3_label": "NC",
    "sys/class/hwmon/hwmon3/in3_input": "1",
    "sys/class/hwmon/hwmon3/curr3_input": "1",
    "sys/class/hwmon/hwmon1/name": "other",
    "sys/class/hwmon/hwmon1/in1_label": "VCC",
    "sys/class/hwmon/hwmon1/in1_input": "1",
    "sys/class/hwmon/hwmon1/curr1_input": "1",
    "sys/class/devfreq/17000000.gpu/cur_freq": "306000000",
    "sys/class/devfreq/17000000.gpu/min_freq": "306000000",
    "sys/class/devfreq/17000000.gpu/max_freq": "918000000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1984000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq": "1984000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1984000",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=2 NAME=15W >\n",
    "var/lib/nvpmodel/status": "pmode:0002 fmode:fanNull",
    "proc/device-tree/model": "NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0000\0nvidia,tegra234\0",
    "proc/device-tree/serial-number": "1421223344556\0",
    "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n",
}


def recorded_tree(root: Path, files: Mapping[str, str] = ORIN_NX) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_power_and_clocks_are_read_from_the_boards_files(tmp_path: Path) -> None:
    root = recorded_tree(tmp_path)
    assert rails_watts(root) == {"VDD_IN": 5.04, "VDD_CPU_GPU_CV": 1.25}
    clocks = clocks_mhz(root)
    assert (clocks["gpu now"], clocks["gpu max"], clocks["cpu0 max"]) == (306.0, 918.0, 1984.0)
    assert not clocks_locked(clocks)
    (root / "sys/class/devfreq/17000000.gpu/min_freq").write_text("918000000")
    assert clocks_locked(clocks_mhz(root))


# AGX Thor with L4T 39.2: GPU and video engines as two devices, one INA238 before all rails
# (rbonghi/jetson_stats#885, #900; Documentation/hwmon/ina238.rst of the kernel).
THOR: Mapping[str, str] = {
    "sys/class/hwmon/hwmon2/name": "ina238",
    "sys/class/hwmon/hwmon2/in0_input": "3",
    "sys/class/hwmon/hwmon2/in1_input": "20031",
    "sys/class/hwmon/hwmon2/curr1_input": "2106",
    "sys/class/hwmon/hwmon2/power1_input": "42185000",
    "sys/class/hwmon/hwmon4/name": "ina3221",
    "sys/class/hwmon/hwmon4/in1_label": "VDD_GPU",
    "sys/class/hwmon/hwmon4/in1_input": "20000",
    "sys/class/hwmon/hwmon4/curr1_input": "276",
    "sys/class/devfreq/gpu-gpc-0/cur_freq": "315000000",
    "sys/class/devfreq/gpu-gpc-0/min_freq": "315000000",
    "sys/class/devfreq/gpu-gpc-0/max_freq": "1575000000",
    "sys/class/devfreq/gpu-nvd-0/cur_freq": "1692000000",
    "sys/class/devfreq/gpu-nvd-0/min_freq": "1692000000",
    "sys/class/devfreq/gpu-nvd-0/max_freq": "1692000000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2601000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq": "2601000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "2601000",
}


def test_the_gpu_of_a_thor_is_not_called_locked_while_it_is_free(tmp_path: Path) -> None:
    root = recorded_tree(tmp_path, THOR)
    clocks = clocks_mhz(root)
    assert (clocks["gpu now"], clocks["gpu max"], clocks["cpu0 now"]) == (315.0, 1575.0, 2601.0)
    assert not clocks_locked(clocks)
    (root / "sys/class/devfreq/gpu-gpc-0/min_freq").write_text("1575000000")
    assert clocks_locked(clocks_mhz(root))
    assert not clocks_locked({"cpu0 min": 2601.0, "cpu0 max": 2601.0})


def test_the_total_power_of_a_thor_is_that_of_its_ina238(tmp_path: Path) -> None:
    root = recorded_tree(tmp_path, THOR)
    assert rails_watts(root) == {"VIN": 42.185, "VDD_GPU": 5.52}
    (root / "sys/class/hwmon/hwmon2/label").write_text("VDD_TOTAL\n")
    assert set(rails_watts(root)) == {"VDD_TOTAL", "VDD_GPU"}
    (root / "sys/class/hwmon/hwmon2/power1_input").unlink()
    assert set(rails_watts(root)) == {"VDD_GPU"}


def test_the_board_is_described_without_its_serial_number(tmp_path: Path) -> None:
    machine = read_machine(tmp_path, root=recorded_tree(tmp_path))
    assert (machine.l4t, machine.soc, machine.power_mode_name) == ("36.4.3", "tegra234", "15W")
    assert (machine.memory_mb, machine.free_memory_mb) == (16384, 8192)
    assert machine.idle_watts["VDD_IN"] == 5.04
    assert "1421223344556" not in repr(machine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"etc/nv_tegra_release": "# R35 (release), REVISION: 4.1, GCID: 1\n"}, "JetPack 5"),
        ({}, "holds no kit.json"),
    ],
)
def test_the_script_says_what_a_board_cannot_do(
    tmp_path: Path, changes: Mapping[str, str], message: str
) -> None:
    (tmp_path / "board_kit.sh").write_bytes((ROOT / "scripts/board_kit.sh").read_bytes())
    root = recorded_tree(tmp_path / "root", {**ORIN_NX, **changes})
    done = subprocess.run(
        ["bash", str(tmp_path / "board_kit.sh"), "--out", str(tmp_path / "r")],
        capture_output=True, text=True, check=False,
        env={**os.environ, "TANDEM_BOARD_ROOT": str(root), "TANDEM_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 1
    assert message in done.stderr
    if "JetPack 5" in message:
        assert "tandem export --to trtexec" in done.stderr


def test_the_script_for_a_bare_board_passes_shellcheck() -> None:
    subprocess.run(["shellcheck", str(ROOT / "scripts/board_kit.sh")], check=True)


@pytest.mark.slow
def test_the_script_makes_an_environment_and_runs_the_kit(laptop_kit: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kit"
    folder.mkdir()
    for name in ("kit.json", "kit.zip"):
        (folder / name).symlink_to(laptop_kit / name)
    copy_script(folder, ())
    out = tmp_path / "r.tandem-report"
    packages = next(p for p in sys.path if p.endswith("site-packages"))
    done = subprocess.run(
        ["bash", str(folder / "board_kit.sh"), "--out", str(out), "--only", "kernels"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "TANDEM_BOARD_ROOT": str(tmp_path), "TANDEM_PYTHON": sys.executable,
             "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = read_report(out).report.kernels
    assert isinstance(row, KernelRow)
    assert row.problem == ""
    assert (folder / ".venv/bin/python").exists()
