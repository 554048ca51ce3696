"""A whole board under qemu, booted by its kernel and its systemd: `scripts/test_board_vm.sh`.

Real: kernel, systemd, sshd, sudo, the unit with its protections, a camera of vivid. Not there:
NVIDIA's parts; a double listens where the camera service does. The tests follow each other.
"""

import hashlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import board_fixtures
import pytest
from board_fixtures import colour_bundle
from board_vm_machine import BOOT_ID, HOST, BoardVm
from deploy_fixtures import deploy
from mqtt_fixtures import Mosquitto, Watcher
from unit_table import device_rules, read_unit
from video_fixtures import COLOUR_TOML

from device.protocol.documents import Reported
from scripts.board_vm import REPORT, SUITES, ImagePlan, parse
from toolkit.fleet.boards.texts import UNIT
from toolkit.fleet.transports.device_deployment import DeployResult

CHOSEN = os.environ.get("TANDEM_BOARD_VM", "")
PLAN: ImagePlan = parse(shlex.split(CHOSEN))[0]
SYSTEMD = SUITES[PLAN.suite].systemd
DEVICE = "board-vm"
WAIT_S = 900.0  # an emulator on a busy machine
BYTES_PER_S = 40_000
PADDING = 300_000  # bytes of a release that no other has
PATIENT = "stall_s = 60.0"
CAMERA = "v4l2:///dev/video0?width=320&height=180"
DROP_IN = "/etc/systemd/system/tandem-agent.service.d/test.conf"
TABLES = f"""
[update]
trial_timeout_s = {WAIT_S}
confirm_after_s = 15.0
max_bytes_per_s = {BYTES_PER_S}
[pipeline]
start_s = {WAIT_S}
stall_s = 300.0
[source]
uri = "{CAMERA}"
"""
ARGUS = """
import os, socket
path = "/tmp/argus_socket"
if os.path.exists(path): os.unlink(path)
server = socket.socket(socket.AF_UNIX); server.bind(path); os.chmod(path, 0o777); server.listen()
while True: server.accept()[0].close()
"""
ARGUS_UNIT = """[Unit]
Description=Double of NVIDIA's camera service
[Service]
ExecStart=/usr/bin/python3 /opt/argus.py
Restart=on-failure
"""
# What the unit lets a process do that it starts, by ExecStartPost.
PROBE = """
import ctypes, json, mmap, os, socket, threading
def tried(function):
    try: function()
    except Exception as error: return type(error).__name__
    return "works"
def connect():
    with socket.socket(socket.AF_UNIX) as client: client.connect("/tmp/argus_socket")
def executable():
    mmap.mmap(-1, 4096, prot=7)
    page = mmap.mmap(-1, 4096, prot=3)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), 4096, 5) == 0
def thread():
    one = threading.Thread(target=print); one.start(); one.join()
def write(path):
    with open(path, "w") as file: file.write("x")
home = os.path.expanduser("~")
rows = {
    "camera": tried(lambda: os.close(os.open("/dev/video0", os.O_RDWR))),
    "argus": tried(connect),
    "jit": tried(executable),
    "thread": tried(thread),
    "cache": tried(lambda: write(home + "/.probe")),
    "tmp": tried(lambda: write("/tmp/probe")),
    "etc": tried(lambda: write("/etc/probe")),
    "sysfs": tried(lambda: os.listdir("/sys/class")),
    "packet": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
}
with open("/var/lib/tandem/probe.json", "w") as file: json.dump(rows, file)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not CHOSEN, reason="scripts/test_board_vm.sh makes the board"),
]


@pytest.fixture(scope="module")
def vm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoardVm]:
    machine = BoardVm(PLAN, tmp_path_factory.mktemp("vm"))
    try:
        prove("boots", f"{machine.wait_boot():.0f} s until sshd answers")
        yield machine
    finally:
        machine.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    server = Mosquitto(tmp_path_factory.mktemp("broker"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def watcher(broker: Mosquitto) -> Iterator[Watcher]:
    with Watcher(broker.port, DEVICE) as one:
        yield one


def prove(what: str, how: str) -> None:
    """Add a row to the table that the script prints."""
    with (PLAN.place / REPORT).open("a") as file:
        if file.tell() == 0:
            file.write(f"proven on {PLAN.suite} {PLAN.arch} (systemd {SYSTEMD}, {PLAN.accel})\n")
        file.write(f"  {what:34s} {how}\n")


def show(vm: BoardVm, *names: str) -> dict[str, str]:
    """What systemd says of the agent's unit."""
    words = " ".join(f"-p {name}" for name in names)
    rows = vm.run(f"systemctl show tandem-agent {words}").splitlines()
    return dict(row.split("=", 1) for row in rows)


def wait_until(
    watcher: Watcher, vm: BoardVm, begin: int, fits: Callable[[Reported], bool]
) -> Reported:
    """Return the first report from number `begin` on that fits."""
    until_s = time.monotonic() + WAIT_S
    index = begin
    while True:
        reports = watcher.drain().reports
        while index < len(reports):
            if fits(reports[index]):
                return reports[index]
            index += 1
        assert time.monotonic() < until_s, (reports[-1:], vm.tail())
        watcher.take(1.0)


def runs(version: str) -> Callable[[Reported], bool]:
    def fits(report: Reported) -> bool:
        working = report.pipeline.status in ("running", "degraded")
        return report.running is not None and report.running.version == version and working

    return fits


def release(folder: Path, version: str) -> Path:
    """A release of which some hundred kB are its own."""
    lines = (f"# {secrets.token_hex(500)}" for _ in range(PADDING // 1000))
    # A first frame takes an emulator longer than the camera's usual patience.
    return colour_bundle(folder, version=version, source=PATIENT, sinks="\n".join(lines))


class Deployment(threading.Thread):
    """`tandem deploy`, which goes on while the board is away."""

    def __init__(self, bundle: Path, broker: Mosquitto) -> None:
        super().__init__(daemon=True)
        self._bundle, self._port = bundle, broker.port
        self.result: DeployResult | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = deploy(self._port, self._bundle)
        except Exception as error:  # noqa: BLE001  (it is the test's to look at)
            self.result = error

    def ended(self) -> DeployResult:
        self.join(WAIT_S)
        assert isinstance(self.result, DeployResult), self.result
        return self.result


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


def test_the_board_is_set_up_over_ssh(vm: BoardVm, broker: Mosquitto) -> None:
    assert vm.run("systemctl --version").split()[1] == str(SYSTEMD)
    vm.run(f"cat > /opt/argus.py <<'END'\n{ARGUS}\nEND")
    vm.run(f"cat > /etc/systemd/system/nvargus-daemon.service <<'END'\n{ARGUS_UNIT}\nEND")
    vm.run("systemctl daemon-reload; systemctl start nvargus-daemon")
    has_cv2 = vm.ask("python3 -c 'import cv2'").returncode == 0
    extras = ("portable",) if has_cv2 else ("portable", "camera")
    words = ["board", "init", vm.address, "--device", DEVICE, "--profile", "laptop", "--dev"]
    words += ["--broker", f"{HOST}:{broker.port}", "--timeout", "600", "--json"]
    for extra in extras:
        words += ["--extra", extra]
    begun_s = time.monotonic()
    done = subprocess.run(
        (sys.executable, "-m", "toolkit.cli", *words), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    steps = {row["step"]: row["outcome"] for row in json.loads(done.stdout)["steps"]}
    assert steps["agent"] == "done"
    prove("tandem board init over SSH", f"{time.monotonic() - begun_s:.0f} s, {len(steps)} steps")
    versions = vm.run(
        "/opt/tandem/bin/python -c 'import cv2, numpy; print(cv2.__version__, numpy.__version__)'"
    )
    if has_cv2:
        assert versions.split()[1].startswith("1.")
        # What pip brings without the constraint does not load: the constraint is what keeps it.
        prove(
            "the system's OpenCV loads", f"cv2 {versions.split()[0]}, NumPy {versions.split()[1]}"
        )


def test_systemd_takes_the_unit_as_the_table_says(vm: BoardVm) -> None:
    checked = vm.ask(f"systemd-analyze verify --man=no {UNIT}")
    assert [row for row in checked.stderr.splitlines() if "tandem-agent" in row] == []
    shown = show(vm, "ActiveState", "DevicePolicy", "DeviceAllow", "MemoryMax", "WatchdogUSec")
    assert (shown["ActiveState"], shown["DevicePolicy"]) == ("active", "auto")
    assert shown.get("DeviceAllow", "") == ""
    total = 1024 * int(vm.run("sed -n 's/^MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo"))
    assert int(shown["MemoryMax"]) == pytest.approx(0.8 * total, rel=0.01)
    level = vm.run("systemd-analyze security --no-pager tandem-agent | tail -1")
    prove("systemd-analyze verify", "nothing to say")
    prove("systemd-analyze security", level.partition(": ")[2] or level)


@pytest.mark.parametrize("line", ["", "ProtectClock=yes"])
def test_a_process_of_the_unit_reaches_camera_socket_and_jit(vm: BoardVm, line: str) -> None:
    vm.run(f"cat > /opt/probe.py <<'END'\n{PROBE}\nEND")
    post = "ExecStartPost=-/usr/bin/python3 /opt/probe.py"
    vm.run(f"mkdir -p {Path(DROP_IN).parent}; printf '[Service]\\n{line}\\n{post}\\n' > {DROP_IN}")
    # Started anew after the agent: the link leads to the socket of now.
    vm.run(
        "rm -f /var/lib/tandem/probe.json; systemctl daemon-reload; systemctl restart tandem-agent"
    )
    rows = json.loads(vm.run("cat /var/lib/tandem/probe.json"))
    unit = (*read_unit(vm.run(f"cat {UNIT}")), *([tuple(line.split("="))] if line else []))
    closed = bool(device_rules(unit, SYSTEMD))  # type: ignore[arg-type]
    assert closed == (SYSTEMD < 252 and bool(line))
    shown = show(vm, "DeviceAllow").get("DeviceAllow", "")
    assert ("char-rtc" in shown) == closed
    expected = dict.fromkeys(("argus", "jit", "thread", "cache", "tmp", "sysfs"), "works")
    expected["camera"] = "PermissionError" if closed else "works"
    assert {name: rows[name] for name in expected} == expected
    assert rows["etc"] == "OSError"
    assert rows["packet"] in ("OSError", "PermissionError")
    vm.run("rm /var/lib/tandem/probe.json /var/lib/tandem/.probe")
    vm.run(f"rm {DROP_IN}; systemctl daemon-reload; systemctl restart tandem-agent")
    how = "camera, argus_socket, JIT, threads, caches work"
    prove(f"the unit{f' with {line}' if line else ''}", "shuts the camera out" if closed else how)


def test_the_way_to_the_camera_service_outlives_its_restart(vm: BoardVm) -> None:
    pid = show(vm, "MainPID")["MainPID"]
    connect = "import socket; socket.socket(socket.AF_UNIX).connect('/tmp/argus_socket')"
    words = f'nsenter -t {pid} -m setpriv --reuid tandem --clear-groups python3 -c "{connect}"'
    vm.run(words)
    vm.run("systemctl restart nvargus-daemon; sleep 3")
    vm.run(words)
    assert show(vm, "MainPID")["MainPID"] == pid
    prove("argus_socket", "reached again after `systemctl restart nvargus-daemon`")


def test_a_release_runs_on_the_camera_and_another_follows(
    vm: BoardVm, broker: Mosquitto, watcher: Watcher, bundles: Path
) -> None:
    vm.run(f"cat >> /etc/tandem/agent.toml <<'END'\n{TABLES}\nEND\nsystemctl restart tandem-agent")
    for version in ("1", "2"):
        begin, begun_s = len(watcher.drain().reports), time.monotonic()
        result = Deployment(release(bundles, version), broker).ended()
        assert result.live, (result, vm.run("journalctl -u tandem-agent -n 40 --no-pager"))
        wait_until(watcher, vm, begin, runs(version))
        prove(f"release {version} live on /dev/video0", f"{time.monotonic() - begun_s:.0f} s")


@pytest.mark.parametrize(
    ("phase", "old", "new"),
    [("downloading", "2", "3"), ("staging", "3", "4"), ("trial", "4", "5"), ("live", "4", "6")],
)
def test_power_is_cut_in_each_phase_of_an_update(
    vm: BoardVm,
    broker: Mosquitto,
    watcher: Watcher,
    bundles: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    old: str,
    new: str,
) -> None:
    if phase == "trial":  # one that would not be confirmed: it must not stay after the cut
        bad = COLOUR_TOML.replace('boxes = "boxes"', 'boxes = "nothing"')
        monkeypatch.setattr(board_fixtures, "COLOUR_TOML", bad)
    bundle = release(bundles, new)
    sha256 = hashlib.sha256(bundle.read_bytes()).hexdigest()
    boot, begin = vm.run(f"cat {BOOT_ID}"), len(watcher.drain().reports)
    deployment = Deployment(bundle, broker)

    def reached(report: Reported) -> bool:
        inside = phase != "downloading" or report.update.received_bytes > 0
        return report.update.sha256 == sha256 and report.update.phase == phase and inside

    wait_until(watcher, vm, begin, reached)
    vm.cut_power()
    cut = len(watcher.drain().reports)
    back_s = vm.wait_boot(boot)
    fits = {phase: runs(old), "live": lambda report: runs(old)(report) or runs(new)(report)}[phase]
    report = wait_until(watcher, vm, cut, fits)
    assert report.running is not None
    if phase == "trial":
        end = wait_until(watcher, vm, cut, lambda one: one.update.phase == "rolled_back")
        assert not deployment.ended().live
        how = f"release {report.running.version} runs, {new} is {end.update.phase}"
    else:
        assert deployment.ended().live
        wait_until(watcher, vm, cut, runs(new))
        how = f"release {report.running.version} runs, then {new} is live"
    prove(f"power cut while {phase}", f"back after {back_s:.0f} s, {how}")


def test_systemd_kills_an_agent_that_hangs_and_starts_it_again(
    vm: BoardVm, watcher: Watcher
) -> None:
    vm.run(
        f"printf '[Service]\\nWatchdogSec=20\\nTimeoutAbortSec=10\\n' > {DROP_IN}\n"
        "systemctl daemon-reload; systemctl restart tandem-agent"
    )
    before = show(vm, "MainPID", "NRestarts")
    begin = len(watcher.drain().reports)
    vm.run(f"kill -STOP {before['MainPID']}")
    begun_s = time.monotonic()
    until_s = begun_s + WAIT_S
    while show(vm, "NRestarts")["NRestarts"] == before["NRestarts"]:
        assert time.monotonic() < until_s
        time.sleep(2.0)
    took_s = time.monotonic() - begun_s
    assert "watchdog" in vm.run("journalctl -u tandem-agent -n 60 --no-pager").lower()
    wait_until(watcher, vm, begin, runs("6"))
    vm.run(f"rm {DROP_IN}; systemctl daemon-reload; systemctl restart tandem-agent")
    prove(
        "the watchdog (20 s for this test)", f"the stopped agent is replaced after {took_s:.0f} s"
    )


def test_the_limit_of_memory_ends_what_is_large_and_not_the_agent(vm: BoardVm) -> None:
    before = show(vm, "MainPID", "ControlGroup")
    procs = f"/sys/fs/cgroup{before['ControlGroup']}/cgroup.procs"
    vm.run("systemctl set-property --runtime tandem-agent MemoryMax=700M MemorySwapMax=0")
    hog = f"echo $$ > {procs}; exec python3 -c 'x = bytearray(1200 << 20)'"
    done = vm.ask(f"sh -c {shlex.quote(hog)}; echo ended $?")
    assert "ended 137" in done.stdout, done
    after = show(vm, "MainPID", "ActiveState", "SubState")
    assert after["MainPID"] == before["MainPID"]
    assert (after["ActiveState"], after["SubState"]) == ("active", "running")
    prove("MemoryMax and OOMPolicy", "a process of 1.2 GiB is killed at 700 MiB, the agent stays")
