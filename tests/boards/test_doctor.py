"""`tandem doctor`: what it says of a board, of a host, and of each thing that may be missing."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from device.errors import TandemError
from device.runtime.tensorrt.plans import FORMAT, Comparison, Record
from device.start.packages import NAMES
from toolkit.cli.actions.doctor import write_report
from toolkit.cli.commands.doctor import doctor
from toolkit.cli.doctor import CHECKS, Result, examine, job_of
from toolkit.cli.doctor_probes import board_of
from toolkit.fleet.brokers.local import start_broker
from toolkit.machine import Machine, Module, mqtt_refusal, tensorrt_version, this_machine

MODULES = {
    name: Module("1.0", f"/venv/lib/python3.10/site-packages/{name}/__init__.py")
    for name in (
        "cv2",
        "onnx",
        "onnx_ir",
        "onnxscript",
        "highspy",
        "onnxruntime",
        "amqtt",
        "triton",
    )
}
MODULES["triton"] = replace(MODULES["triton"], version="3.8.0")
ORIN_NX = {
    "proc/device-tree/model": "NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0000\0nvidia,p3767-0000\0tegra234\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n",
    "usr/lib/aarch64-linux-gnu/nvidia/libnvdla_compiler.so": "",
    "usr/local/cuda-12.6/targets/aarch64-linux/lib/libcudla.so.1": "",
    "dev/video0": "",
    "var/lib/nvpmodel/status": "pmode:0000",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\nCPU_ONLINE CORE_0 1\n"
    "< POWER_MODEL ID=1 NAME=10W >\n< POWER_MODEL ID=9 NAME=NEW >\n",
    "proc/meminfo": "MemTotal:       15960000 kB\nMemFree: 1 kB\nMemAvailable:   12000000 kB\n",
    **{
        f"sys/class/devfreq/17000000.gpu/{name}_freq": "918000000\n"
        for name in ("cur", "min", "max")
    },
    **{
        f"sys/devices/system/cpu/cpu0/cpufreq/scaling_{name}_freq": "1984000\n"
        for name in ("cur", "min", "max")
    },
}
GPU = {"name": "Orin", "capability": "8.7", "cuda": "12.6", "count": "1"}
CV2 = {
    "version": "4.8.0",
    "gstreamer": "yes",
    "file": "/usr/lib/python3.10/dist-packages/cv2/__init__.py",
}


def machine(
    root: Path,
    *,
    files: Mapping[str, str] = {},
    modules: Mapping[str, Module] = MODULES,
    children: Mapping[str, Mapping[str, str]] = {"opencv": CV2},
    elements: Sequence[str] = ("rtspsrc", "avdec_h264", "nvv4l2decoder", "nvarguscamerasrc"),
    free_bytes: int = 10**11,
) -> Machine:
    """A machine that is nothing but what a test says; every question it is asked is answered."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    def command(words: Sequence[str]) -> str | None:
        if words == ("gst-launch-1.0", "--version"):
            return "gst-launch-1.0 version 1.20.3\nGStreamer 1.20.3\n"
        assert tuple(words[:2]) == ("gst-inspect-1.0", "--exists")
        return "" if words[2] in elements else None

    return Machine(
        root=root,
        python=(3, 10, 12),
        distributions={name: ["tandem-edge"] for name in {"tandem", *NAMES}},
        module=modules.get,
        command=command,
        isolated=children.get,
        free_bytes=lambda: free_bytes,
        broker=lambda host, port: "" if (host, port) == ("good", 1883) else "refused",
    )


def check(name: str, host: Machine) -> Result:
    return next(result for result in examine(host, "host") if result.name == name)


def with_tensorrt(version: str, cores: str) -> dict[str, Mapping[str, str]]:
    return {"opencv": CV2, "tensorrt_module": {"version": version, "dla_cores": cores}}


TENSORRT = {**MODULES, "tensorrt": Module("", "/usr/lib/python3.10/dist-packages/tensorrt")}


def test_a_whole_board_has_nothing_to_mend(tmp_path: Path) -> None:
    children = {**with_tensorrt("10.3.0", "2"), "cuda_device": GPU}
    board = machine(tmp_path, files=ORIN_NX, modules=TENSORRT, children=children)
    assert job_of(board) == "board"
    assert [(row.name, row.fix) for row in examine(board, "board") if row.status != "ok"] == []


def test_plans_and_their_times_are_told(tmp_path: Path) -> None:
    board = replace(machine(tmp_path, modules=TENSORRT), plans=tmp_path / "plans")
    assert check("TensorRT plans", board).found == f"none in {tmp_path / 'plans'}"
    (tmp_path / "plans").mkdir()
    compared = Comparison(kernels="", tensorrt_us=812.4, cuda_us=954.0)
    record = Record(format=FORMAT, segment="gpu.0", board={}, sha256="0", seconds=1.0)
    for name, one in (
        ("a", msgspec.structs.replace(record, compared=compared)),
        ("b", msgspec.structs.replace(record, segment="dla0.0")),
    ):
        (tmp_path / "plans" / f"{name}.json").write_bytes(msgspec.json.encode(one))
    result = check("TensorRT plans", board)
    assert result.status == "ok"
    assert result.found == (
        f"2 plans in {tmp_path / 'plans'}; gpu.0: TensorRT 812 us, kernels 954 us"
    )
    refused = msgspec.structs.replace(record, problem="it crashed")
    (tmp_path / "plans" / "c.json").write_bytes(msgspec.json.encode(refused))
    result = check("TensorRT plans", board)
    assert result.status == "warning"
    assert "gpu.0: it crashed" in result.found
    assert "tandem-agent prepare" in result.fix


def test_a_laptop_is_a_host_and_can_build(tmp_path: Path) -> None:
    laptop = machine(tmp_path)
    assert job_of(laptop) == "host"
    results = examine(laptop, "host")
    assert not any(result.stops("host") for result in results)
    assert {row.name for row in results if row.status == "missing"} >= {"Jetson", "TensorRT"}
    assert not any(row.slows("host") for row in results if row.name == "TensorRT")


def test_every_check_that_fails_says_why_it_matters_and_what_mends_it(tmp_path: Path) -> None:
    bare = machine(tmp_path, modules={}, children={}, elements=(), free_bytes=0)
    bare = replace(bare, python=(3, 9, 2), command=lambda words: None, distributions={})
    results = examine(bare, "demo", ("bad", 1))
    assert [row.name for row in results if row.status == "ok"] == []
    assert [row.name for row in results if not (row.why and row.fix and row.found)] == []
    assert {row.name for row in results if row.stops("demo")} == {
        "Python", "OpenCV", "onnxruntime", "ONNX", "amqtt", "disk", "broker bad:1",
    }  # fmt: skip


def test_check_names_are_unique() -> None:
    assert len({row.name for row in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(
    ("compatible", "profile"),
    [
        ("nvidia,p3768-0000+p3767-0000\0nvidia,tegra234", "orin-nx-16gb"),
        ("nvidia,p3768-0000+p3767-0000-super\0nvidia,p3767-0000", "orin-nx-16gb-super"),
        ("nvidia,p3768-0000+p3767-0001\0", "orin-nx-8gb"),
        ("nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005", "orin-nano-8gb"),
        ("nvidia,p3768-0000+p3767-0004-super\0", "orin-nano-4gb-super"),
        ("nvidia,p3737-0000+p3701-0000\0nvidia,p3701-0000", "agx-orin-64gb"),
        ("nvidia,p3737-0000+p3701-0004\0", "agx-orin-32gb"),
        ("nvidia,p3509-0000+p3668-0001\0nvidia,tegra194", "xavier-nx-8gb"),
        ("nvidia,p2822-0000+p2888-0004\0", "agx-xavier-32gb"),
        ("nvidia,p3449-0000-b00+p3448-0000-b00\0nvidia,jetson-nano", "jetson-nano"),
        ("nvidia,p9999-0000", None),
    ],
)
def test_a_board_is_known_by_its_part_number(
    tmp_path: Path, compatible: str, profile: str | None
) -> None:
    files = {**ORIN_NX, "proc/device-tree/compatible": compatible}
    result = board_of(machine(tmp_path, files=files)).profile
    assert (result.name if result else None) == profile


def test_a_board_names_its_jetpack_by_its_l4t(tmp_path: Path) -> None:
    board = board_of(machine(tmp_path, files=ORIN_NX))
    assert (board.l4t, board.jetpack) == ("36.4.3", "6.2")
    assert check("Jetson", machine(tmp_path)).found.endswith(
        "orin-nx-16gb, L4T 36.4.3 (JetPack 6.2)"
    )


def test_a_release_that_nobody_knows_is_a_warning(tmp_path: Path) -> None:
    files = {**ORIN_NX, "etc/nv_tegra_release": "# R99 (release), REVISION: 1.0, GCID: 1\n"}
    row = check("Jetson", machine(tmp_path, files=files))
    assert row.status == "warning"
    assert "99.1.0" in row.found


def test_the_profile_answers_for_the_dla_where_tensorrt_cannot(tmp_path: Path) -> None:
    row = check("DLA cores", machine(tmp_path, files=ORIN_NX))
    assert (row.status, row.found) == (
        "ok",
        "2 by profile orin-nx-16gb; no TensorRT here to ask",
    )


def test_a_jetpack_whose_tensorrt_lost_the_dla_is_named(tmp_path: Path) -> None:
    children = with_tensorrt("10.16.2", "0")
    row = check("DLA cores", machine(tmp_path, files=ORIN_NX, modules=TENSORRT, children=children))
    assert row.status == "warning"
    assert "JetPack 6.2" in row.fix


def test_a_board_without_cudla_gets_the_package_of_its_cuda(tmp_path: Path) -> None:
    board = machine(tmp_path, files=ORIN_NX)
    assert check("cuDLA", board).status == "ok"
    (tmp_path / "usr/local/cuda-12.6/targets/aarch64-linux/lib/libcudla.so.1").unlink()
    row = check("cuDLA", board)
    assert (row.status, row.fix) == ("missing", "sudo apt-get install libcudla-12-6")
    broken = replace(board, module={"tensorrt": TENSORRT["tensorrt"]}.get)
    (tmp_path / "usr/lib/aarch64-linux-gnu/libnvinfer.so.10").write_text("")
    assert "libcudla-12-6" in check("TensorRT", broken).fix


@pytest.mark.parametrize(
    ("pmode", "status", "row_text"),
    [
        ("0000", "ok", "MAXN (0), the fastest of orin-nx-16gb"),
        ("0001", "warning", "10W (1); plans of orin-nx-16gb are for MAXN (0)"),
        ("0009", "warning", "NEW (9), which orin-nx-16gb does not list (MAXN, 10W, 15W, 25W)"),
    ],
)
def test_the_power_mode_is_compared_with_the_profile(
    tmp_path: Path, pmode: str, status: str, row_text: str
) -> None:
    files = {**ORIN_NX, "var/lib/nvpmodel/status": f"pmode:{pmode} fmode:fanNull"}
    row = check("power mode", machine(tmp_path, files=files))
    assert (row.status, row.found) == (status, row_text)
    if pmode == "0001":
        assert "nvpmodel -m 0" in row.fix
        assert "--power-mode 10W" in row.fix


def test_clocks_that_follow_the_load_are_a_warning(tmp_path: Path) -> None:
    board = machine(tmp_path, files=ORIN_NX)
    assert check("clocks", board).found == "gpu 918 of 918 MHz, cpu0 1984 of 1984 MHz, held there"
    (tmp_path / "sys/class/devfreq/17000000.gpu/min_freq").write_text("306000000")
    row = check("clocks", board)
    assert row.status == "warning"
    assert "jetson_clocks" in row.fix


@pytest.mark.parametrize(("kilobytes", "status"), [(1_953_125, "ok"), (1_953_124, "warning")])
def test_little_free_memory_is_a_warning(tmp_path: Path, kilobytes: int, status: str) -> None:
    text = f"MemTotal: 16000000 kB\nMemAvailable: {kilobytes} kB\n"
    board = machine(tmp_path, files={**ORIN_NX, "proc/meminfo": text})
    assert check("memory", board).status == status


def test_an_orin_nano_needs_no_dla_compiler(tmp_path: Path) -> None:
    files = {**ORIN_NX, "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005"}
    nano = machine(tmp_path, files=files)
    (tmp_path / "usr/lib/aarch64-linux-gnu/nvidia/libnvdla_compiler.so").unlink()
    assert check("DLA compiler", nano).status == "ok"
    assert check("DLA cores", nano).found.startswith("0")


def test_a_board_without_the_dla_compiler_gets_its_package(tmp_path: Path) -> None:
    board = machine(tmp_path, files=ORIN_NX)
    (tmp_path / "usr/lib/aarch64-linux-gnu/nvidia/libnvdla_compiler.so").unlink()
    row = check("DLA compiler", board)
    assert row.status == "missing"
    assert "nvidia-l4t-dla-compiler" in row.fix


@pytest.mark.parametrize(
    ("children", "status", "row_text"),
    [
        ({"tensorrt_library": {"version": "10.3.0"}}, "warning", "libnvinfer 10.3.0"),
        ({"tensorrt_library": {"error": "no libnvinfer"}}, "missing", "neither"),
    ],
)
def test_tensorrt_without_its_python_module_is_not_enough(
    tmp_path: Path, children: Mapping[str, Mapping[str, str]], status: str, row_text: str
) -> None:
    row = check("TensorRT", machine(tmp_path, children=children))
    assert row.status == status
    assert row_text in row.found


@pytest.mark.parametrize(
    ("number", "version"),
    [(7103, "7.1.3"), (8502, "8.5.2"), (100300, "10.3.0"), (101602, "10.16.2")],
)
def test_the_version_number_of_the_bare_library_is_read(number: int, version: str) -> None:
    assert tensorrt_version(number) == version


def test_a_tensorrt_that_crashes_its_process_is_reported(tmp_path: Path) -> None:
    row = check("TensorRT", machine(tmp_path, modules=TENSORRT, children={}))
    assert (row.status, "does not load" in row.found) == ("warning", True)


def test_a_pip_wheel_that_hides_jetpacks_opencv_is_a_warning(tmp_path: Path) -> None:
    wheel = {**CV2, "gstreamer": "no", "file": MODULES["cv2"].origin}
    files = {"usr/lib/python3.10/dist-packages/cv2/__init__.py": ""}
    row = check("OpenCV", machine(tmp_path, files=files, children={"opencv": wheel}))
    assert row.status == "warning"
    assert row.fix.startswith("pip uninstall opencv-python")


def test_missing_gstreamer_elements_name_their_packages(tmp_path: Path) -> None:
    row = check("GStreamer elements", machine(tmp_path, files=ORIN_NX, elements=("rtspsrc",)))
    assert row.status == "warning"
    assert row.fix == "sudo apt-get install gstreamer1.0-libav nvidia-l4t-gstreamer"


def test_a_host_is_not_asked_for_jetson_elements(tmp_path: Path) -> None:
    host = machine(tmp_path, elements=("rtspsrc", "avdec_h264"))
    assert check("GStreamer elements", host).status == "ok"


def test_a_distribution_with_the_same_folder_names_is_found(tmp_path: Path) -> None:
    owners = {name: ["tandem_edge", "tandem-edge"] for name in {"tandem", *NAMES}}
    owners["tandem"].append("tandem-edge-demo")  # models and pictures, below tandem/configs
    host = replace(machine(tmp_path), distributions=owners)
    assert check("distribution", host).status == "ok"
    name = NAMES[0]
    row = check(
        "distribution", replace(host, distributions={**owners, name: ["tandem-edge", "other"]})
    )
    assert (row.status, row.found) == ("missing", f"other also ships {name}/")
    assert row.stops("board")


def test_an_editable_install_that_is_listed_twice_is_fine(tmp_path: Path) -> None:
    owners = {name: ["tandem_edge", "tandem-edge"] for name in {"tandem", *NAMES}}
    assert check("distribution", replace(machine(tmp_path), distributions=owners)).status == "ok"


@pytest.mark.parametrize(
    ("free", "status"), [(10**8, "missing"), (10**9, "warning"), (10**10, "ok")]
)
def test_little_disk_space_warns_before_it_stops(tmp_path: Path, free: int, status: str) -> None:
    assert check("disk", machine(tmp_path, free_bytes=free)).status == status


def test_a_broker_is_asked_only_when_named(tmp_path: Path) -> None:
    host = machine(tmp_path)
    assert len(examine(host, "host")) == len(CHECKS)
    assert examine(host, "host", ("good", 1883))[-1].status == "ok"
    assert examine(host, "host", ("bad", 1883))[-1].stops("host")


def test_a_driver_that_crashes_is_reported(tmp_path: Path) -> None:
    assert check("NVIDIA driver", machine(tmp_path)).found == "driver crashed"


def test_this_machine_answers_every_question_with_what_is_really_here() -> None:
    here = this_machine()
    assert here.python == sys.version_info[:3]
    assert here.module("msgspec") is not None
    assert here.module("no_such_module_anywhere") is None
    assert here.command([sys.executable, "-c", "print(7)"]) == "7\n"
    assert here.command(["/no/such/program"]) is None
    assert here.command([sys.executable, "-c", "raise SystemExit(3)"]) is None
    assert here.isolated("no_such_function") is None
    assert (here.isolated("cuda_device") or {}).keys() & {"error", "capability"}
    assert here.free_bytes() > 0


def test_opencv_is_described_by_the_child_that_loads_it() -> None:
    cv2 = pytest.importorskip("cv2")
    described = this_machine().isolated("opencv")
    assert described is not None
    assert described["version"] == cv2.__version__
    assert ("GStreamer:                   YES" in cv2.getBuildInformation()) == (
        described["gstreamer"] == "yes"
    )


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def answering_broker(reply: bytes) -> int:
    """A listener that takes one client, waits for its CONNECT and sends `reply`; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = listener.accept()
        with client, listener:
            assert client.recv(4096)[:1] == b"\x10"
            client.sendall(reply)
            client.recv(4096)

    threading.Thread(target=serve, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def test_nobody_listening_is_no_broker() -> None:
    assert "refused" in mqtt_refusal("127.0.0.1", closed_port())


def test_a_broker_that_accepts_is_reachable() -> None:
    assert mqtt_refusal("127.0.0.1", answering_broker(b"\x20\x03\x00\x00\x00")) == ""


def test_a_broker_that_knows_only_the_old_mqtt_is_reachable() -> None:
    with start_broker() as embedded:
        assert mqtt_refusal(embedded.host, embedded.port) == ""


def test_a_broker_that_does_not_let_us_in_says_so() -> None:
    refusal = mqtt_refusal("127.0.0.1", answering_broker(b"\x20\x03\x00\x87\x00"))
    assert "Not authorized" in refusal


def test_a_listener_that_stays_silent_is_no_broker() -> None:
    assert "no answer" in mqtt_refusal("127.0.0.1", answering_broker(b""), timeout_s=0.2)


def test_the_command_prints_json_that_agrees_with_its_exit_status() -> None:
    result = CliRunner().invoke(doctor, ["--json", "--broker", f"127.0.0.1:{closed_port()}"])
    report = json.loads(result.output)
    assert (result.exit_code, report["ok"]) == (1, False)
    assert report["checks"][-1]["status"] == "missing"


def test_the_command_tells_what_the_job_needs() -> None:
    result = CliRunner().invoke(doctor, ["--job", "board"])
    driver = (this_machine().isolated("cuda_device") or {}).get("capability")
    assert ("Needed for this machine's job (board)" in result.output) == (driver is None)
    assert result.exit_code == (0 if driver else 1)


@pytest.mark.parametrize("address", ["host:0", "host:http", ":1883", "host:70000", ""])
def test_an_address_without_a_port_number_is_refused(address: str) -> None:
    result = CliRunner().invoke(doctor, ["--broker", address])
    assert result.exit_code == 2
    assert "HOST:PORT" in result.output


def test_help_shows_examples() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "toolkit.cli", "doctor", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "tandem doctor --broker" in shown


def test_a_report_has_facts_and_no_names_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_SOME_TOKEN", "s3cret")
    monkeypatch.setattr("socket.gethostname", lambda: "annas-laptop")
    finding = "plans in /home/anna/plans, broker 10.1.2.3:1883 of anna@example.org at annas-laptop"
    rows = [Result("plans", "warning", finding, (), (), "why", "fix")]
    write_report(tmp_path / "r.json", "host", rows)
    text = (tmp_path / "r.json").read_text()
    assert not any(word in text for word in ("anna", "10.1.2.3", "s3cret", "example.org"))
    report = json.loads(text)
    assert report["packages"]["numpy"] == metadata.version("numpy")
    assert report["settings"].count("TANDEM_SOME_TOKEN") == 1
    (check,) = report["checks"]
    assert check["found"].startswith("plans in (path), broker (address) of (mail)")
    with pytest.raises(TandemError, match=r"r\.json/x cannot be written"):
        write_report(tmp_path / "r.json" / "x", "host", rows)
