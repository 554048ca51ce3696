"""The agent updates itself: real processes, started again by a loop in the place of systemd."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from control_fixtures import client_of, desired_of
from fleet_fixtures import Fleet
from fleet_server_fixtures import report
from mqtt_fixtures import WAIT_S, AgentBox, Mosquitto, make_bundle
from self_update_fixtures import DIES, HANGS, SIGNED, SelfUpdateBoard, packed, real_bundle, until
from wheel_fixtures import agent_wheel, tandem_wheel

from device.agent.config import load_agent_config
from device.agent.environment import make_environment
from device.agent.launch import ENVIRONMENT
from device.control.__main__ import main as control_main
from device.control.client import Client
from device.control.self_update import install_version, try_version
from device.errors import BundleError, StateError, TrustError
from device.files import sha256_of
from device.protocol.control import Answer, Ask, AskProgress, Install, SwitchAgent
from device.protocol.documents import AgentReport, encode
from device.update import agent_versions as av
from device.update.agent_versions import AgentVersions
from toolkit.fleet.brokers.local import free_port
from toolkit.fleet.bundles.agent import pack_agent


@pytest.fixture
def board(tmp_path: Path) -> Iterator[SelfUpdateBoard]:
    board = SelfUpdateBoard(tmp_path / "board", free_port())
    yield board
    board.close()


def test_a_version_that_hangs_is_killed_and_the_one_before_runs_again(
    tmp_path: Path, board: SelfUpdateBoard
) -> None:
    bundle = packed(tmp_path, "2.0", HANGS)
    board.start()
    done = board.self_update(bundle, limit_s=1.0)
    assert done.returncode == 1
    assert "2.0-" in done.stderr
    assert "did not bring back what ran before within 1 s" in done.stderr
    until(board.answers)
    versions = msgspec.json.decode(done.stdout, type=AgentVersions)
    assert versions == board.versions
    assert (versions.current, versions.trial, versions.failed[:4]) == ("", "", "2.0-")
    assert board.environments() == []  # else failed releases would fill the disk
    board.pid_file.unlink(missing_ok=True)  # on a busy machine it ends before it writes that

    def kill() -> None:
        until(board.pid_file.exists)
        os.kill(int(board.pid_file.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    done = board.self_update(bundle, limit_s=300.0)  # far less, as it dies at once
    killer.join()
    assert "2.0-" in done.stderr
    assert done.returncode == 1
    until(board.answers)


def test_what_does_not_fit_is_refused_before_anything_ends(
    tmp_path: Path, board: SelfUpdateBoard
) -> None:
    config = load_agent_config(board.config)
    bundle = tmp_path / "l4t.bundle"
    folder = agent_wheel(tmp_path / "wheels", "2.0", HANGS)
    pack_agent(bundle, folder, "", min_l4t="99.1")
    with pytest.raises(BundleError, match=r"needs L4T 99\.1 or newer, this board has"):
        install_version(bundle, config, "")
    broken = packed(tmp_path, "3.0", "import a_package_that_is_not_there")
    with pytest.raises(BundleError, match="does not start: ModuleNotFoundError"):
        install_version(broken, config, "")
    assert board.environments() == []
    assert board.versions == AgentVersions()


def test_a_version_has_to_be_signed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "fleet")
    board = SelfUpdateBoard(tmp_path / "board", free_port())
    config = msgspec.structs.replace(
        load_agent_config(board.config),
        dev=False,
        trust=msgspec.structs.replace(
            load_agent_config(board.config).trust, dir=str(fleet.trust), repository="mqtt:"
        ),
    )
    bundle = packed(tmp_path, "2.0", HANGS, SIGNED)
    with pytest.raises(TrustError, match="--repository"):
        install_version(bundle, config, "")
    with pytest.raises(TrustError, match="was not published"):
        install_version(bundle, config, str(fleet.served))
    fleet.publish(bundle)
    name = install_version(bundle, config, str(fleet.served))
    assert av.is_usable(board.state_dir, name)
    agent_wheel(tmp_path / "wheels-2.0", "2.0", DIES)
    pack_agent(bundle, tmp_path / "wheels-2.0", "")
    with pytest.raises(TrustError, match="it is another file"):
        install_version(bundle, config, str(fleet.served))
    bundle = packed(tmp_path, "3.0", HANGS, SIGNED, missing="tuf")
    fleet.publish(bundle)
    with pytest.raises(BundleError, match=r"version 3\.0 of the agent cannot import tuf\.ngclient"):
        install_version(bundle, config, str(fleet.served))
    assert board.environments() == [name]


def test_a_bundle_that_changes_after_its_check_is_not_unpacked(tmp_path: Path) -> None:
    bundle = packed(tmp_path, "2.0", HANGS)
    checked = sha256_of(bundle)
    shutil.copy(packed(tmp_path, "3.0", DIES), bundle)
    with pytest.raises(BundleError, match="was changed while it was read"):
        make_environment(bundle, tmp_path / "agent", "2.0-x", checked)
    assert list((tmp_path / "agent").iterdir()) == []


def test_a_login_that_has_control_by_sudo_cannot_choose_whom_to_trust(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    board: SelfUpdateBoard,
) -> None:
    board.start()
    bundle = packed(tmp_path, "2.0", HANGS)
    monkeypatch.setenv("SUDO_UID", "1000")
    assert control_main(["--config", str(board.config), "self-update", str(bundle)]) != 0
    assert "self-update by sudo takes /etc/tandem/agent.toml alone" in capsys.readouterr().err
    assert not (board.state_dir / av.FOLDER).exists()


def test_a_pipeline_that_ran_has_to_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(AgentBox(tmp_path, free_port())) as box:
        _switch_with_a_pipeline(tmp_path, box, monkeypatch)


def _switch_with_a_pipeline(tmp_path: Path, box: AgentBox, monkeypatch: pytest.MonkeyPatch) -> None:
    box.start()
    client = client_of(box)
    desired = desired_of(make_bundle(tmp_path / "in"))
    client.ask(Install(desired=encode(desired).decode(), bundle=str(tmp_path / "in")))
    *_, last = client.follow(desired.request)
    assert last.reported is not None
    assert last.reported.update.phase == "live"
    with pytest.raises(StateError, match="no whole environment 2-x"):
        client.ask(SwitchAgent(environment="2-x", limit_s=9.0))
    make_environment(packed(tmp_path, "2", HANGS), box.state_dir / av.FOLDER, "2-x")
    try_to_switch(client)
    client.close()
    assert box.process is not None
    assert box.process.wait(WAIT_S) == 0
    box.process = None
    noted = av.read_versions(box.state_dir)
    assert (noted.trial, noted.needs_mqtt, noted.needs_pipeline) == ("2-x", False, True)
    # This very agent stands in for the version on trial.
    monkeypatch.setenv(ENVIRONMENT, "2-x")
    box.start()
    until(lambda: av.read_versions(box.state_dir) == AgentVersions(current="2-x"))
    assert len(box.runs()) == 2


class _Client:
    """A double: its agent runs `running`, and keeps each version that it is asked to try."""

    def __init__(self, state_dir: Path, running: str) -> None:
        self.state_dir, self._running = state_dir, running

    def ask(self, ask: Ask) -> Answer:
        if isinstance(ask, SwitchAgent):
            self._running = ask.environment
        reported = msgspec.structs.replace(report(), versions=AgentReport(running=self._running))
        return Answer(device="d", reported=reported)


@pytest.mark.parametrize("running", ["", "2-x"])
def test_a_current_version_is_tried_again_unless_it_runs(tmp_path: Path, running: str) -> None:
    av.write_versions(tmp_path, AgentVersions(current="2-x"))
    client = _Client(tmp_path, running)
    assert try_version(client, "2-x", 1.0) == ""  # type: ignore[arg-type]
    assert client.ask(AskProgress()).reported.versions.running == "2-x"  # type: ignore[union-attr]


def try_to_switch(client: Client) -> None:
    """The agent may end before its answer is sent."""
    with contextlib.suppress(StateError):
        client.ask(SwitchAgent(environment="2-x", limit_s=9.0))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_from_one_version_to_the_next_and_back_from_broken_ones(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, broker: Mosquitto
) -> None:
    wheel = tandem_wheel(tmp_path_factory)
    board = SelfUpdateBoard(tmp_path / "board", broker.port)
    try:
        board.start()
        for version in ("1.1", "1.2", "1.3"):
            done = board.self_update(real_bundle(tmp_path, wheel, version), limit_s=300.0)
            assert done.returncode == 0, done.stderr + board.log_file.read_text()
            until(board.answers)
            assert board.versions.current.startswith(f"{version}-")
            assert board.agent_version() in wheel.name
        assert [name[:3] for name in board.environments()] == ["1.2", "1.3"]  # two behind: gone
        for version, code in (("2.0", HANGS), ("2.1", DIES)):
            done = board.self_update(packed(tmp_path, version, code), limit_s=3.0)
            assert done.returncode == 1
            until(board.answers)
            assert board.versions.current.startswith("1.3-")
            assert board.versions.failed.startswith(f"{version}-")
    finally:
        board.close()
