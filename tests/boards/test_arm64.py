"""The agent on the architecture of the boards: a Debian arm64 user land under qemu.

`scripts/test_arm64.sh` makes the root and names it in TANDEM_ARM64_ROOT. What this proves is that
the wheels of aarch64 install and the agent works there; its speed is that of an emulator.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import board_fixtures
import pytest
from board_fixtures import colour_bundle
from deploy_fixtures import deploy
from mqtt_fixtures import Mosquitto, Watcher
from video_fixtures import COLOUR_TOML, scene, write_video

from toolkit.fleet.boards.probe import Probe, probe_script
from toolkit.fleet.boards.wheels import gather, own_wheel, pip_wheel
from toolkit.fleet.transports.device_deployment import DeployResult

ROOT = os.environ.get("TANDEM_ARM64_ROOT", "")
WAIT_S = 900.0  # an emulator on a busy machine
LOOP = "loop = true"
EXTRAS = ("camera", "fleet", "portable", "serial")
AGENT_TOML = """device = "arm64"
profile = "laptop"
state_dir = "/var/lib/tandem"
dev = true
[broker]
host = "127.0.0.1"
port = {port}
[update]
trial_timeout_s = {wait_s}
confirm_after_s = 2.0
[pipeline]
start_s = {wait_s}
stall_s = 300.0
[source]
uri = "/srv/video.mp4"
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not ROOT, reason="scripts/test_arm64.sh makes the arm64 root"),
]


class Arm64:
    """The root, entered by chroot in a mount namespace of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        mount = f"mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev"
        self._enter = ("unshare", "-m", "sh", "-c", f'{mount} && exec chroot {root} "$@"', "sh")

    def run(self, *command: str, stdin: str = "") -> str:
        done = subprocess.run(
            (*self._enter, *command), input=stdin, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *command: str, log: Path) -> "subprocess.Popen[bytes]":
        with log.open("ab") as file:
            return subprocess.Popen((*self._enter, *command), stdout=file, stderr=file)


@pytest.fixture(scope="module")
def arm64(tmp_path_factory: pytest.TempPathFactory) -> Arm64:
    """The root with the agent installed as `tandem board init` does: by wheels of this host."""
    import msgspec

    board, work = Arm64(Path(ROOT)), tmp_path_factory.mktemp("wheels")
    answer = board.run("python3", "-s", "-", stdin=probe_script())
    probe = msgspec.json.decode(answer, type=Probe)
    assert probe.machine == "aarch64"
    wheels = gather(own_wheel(work), EXTRAS, probe, work, None)
    assert any("aarch64" in path.name for path in wheels)
    shutil.rmtree(board.root / "opt/tandem", ignore_errors=True)
    board.run("python3", "-m", "venv", "--without-pip", "--system-site-packages", "/opt/tandem")
    folder = board.root / "opt/tandem/wheels"
    folder.mkdir()
    for path in (*wheels, pip := pip_wheel(work)):
        shutil.copy(path, folder)
    board.run(
        "/opt/tandem/bin/python", f"/opt/tandem/wheels/{pip.name}/pip", "install", "-q",
        "--no-index", "--no-cache-dir", "--root-user-action=ignore",
        "--find-links", "/opt/tandem/wheels", f"tandem-edge[{','.join(EXTRAS)}]",
    )  # fmt: skip
    return board


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    server = Mosquitto(tmp_path)
    yield server
    server.close()


def test_the_agent_installs_starts_updates_and_rolls_back_on_arm64(
    tmp_path: Path, arm64: Arm64, broker: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "aarch64" in arm64.run("/opt/tandem/bin/python", "-c", "import os; print(os.uname())")
    write_video(arm64.root / "srv/video.mp4", [scene(2, 3)] * 50)
    shutil.rmtree(arm64.root / "var/lib/tandem", ignore_errors=True)
    text = AGENT_TOML.format(port=broker.port, wait_s=WAIT_S)
    (arm64.root / "etc/agent.toml").write_text(text)
    log = tmp_path / "agent.log"
    agent = arm64.start("/opt/tandem/bin/tandem-agent", "--config", "/etc/agent.toml", log=log)

    until_s = time.monotonic() + WAIT_S
    while not (arm64.root / "var/lib/tandem/control.sock").exists():
        assert agent.poll() is None, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.5)

    def deploy_there(bundle: Path) -> DeployResult:
        return deploy(broker.port, bundle, device="arm64")

    try:
        with Watcher(broker.port, "arm64") as watcher:
            first = deploy_there(colour_bundle(tmp_path / "in", version="1", source=LOOP))
            assert first.live, (first, log.read_text())
            second = deploy_there(colour_bundle(tmp_path / "in", version="2", source=LOOP))
            assert second.live, (second, log.read_text())
            no_such_output = COLOUR_TOML.replace('boxes = "boxes"', 'boxes = "nothing"')
            monkeypatch.setattr(board_fixtures, "COLOUR_TOML", no_such_output)
            third = deploy_there(colour_bundle(tmp_path / "in", version="3", source=LOOP))
            assert third.phase == "rolled_back", third
            while not runs_again(watcher, "2") or not watcher.seen.stats:
                assert watcher.take(WAIT_S), (watcher.seen.reports[-1:], log.read_text())
    finally:
        agent.terminate()
        agent.wait(60.0)


def runs_again(watcher: Watcher, version: str) -> bool:
    """Whether the last report says that this release runs after a rollback."""
    report = watcher.seen.reports[-1] if watcher.seen.reports else None
    if report is None or report.running is None:
        return False
    state = (report.running.version, report.pipeline.status, report.update.phase)
    return state == (version, "running", "rolled_back")


def test_the_root_is_what_the_script_says() -> None:
    release = (Path(ROOT) / "etc/os-release").read_text()
    assert "Debian" in release
    assert sys.platform == "linux"
