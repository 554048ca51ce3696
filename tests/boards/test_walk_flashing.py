"""docs/flashing.md word by word: a fresh board on loopback, from the box to detections on MQTT."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import board_fixtures
import pytest
from board_fixtures import colour_bundle
from click.testing import CliRunner
from fresh_board import PASSWORD, FreshBoard
from mqtt_fixtures import free_port, wait_for_port
from ssh_fixtures import ROOT
from video_fixtures import COLOUR_TOML, scene, write_video

from toolkit.cli.actions.board import search
from toolkit.cli.main import tandem
from toolkit.fleet.boards import discovery
from toolkit.fleet.boards.discovery import SearchOptions

PAGE = (ROOT / "docs/flashing.md").read_text().partition("## Transports")[0]
LINES = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
TABLE = re.search(r"```text\n(serial,device.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[FreshBoard]:
    board = FreshBoard(tmp_path / "board")
    yield board
    board.close()


def test_the_page_has_the_commands_that_are_followed() -> None:
    assert [shlex.split(line)[:3] for line in LINES] == [
        ["tandem", "fleet", "init"],
        ["mosquitto", "-d", "-c"],
        ["tandem", "board", "init"],
        ["tandem", "board", "init"],
        ["tandem", "flash", "robot.bundle"],
        ["tandem", "board", "info"],
        ["mosquitto_sub", "-h", "192.168.55.100"],
        ["tandem", "board", "find"],
        ["tandem", "board", "logs"],
        ["tandem", "board", "power-mode"],
        ["tandem", "flash", "robot.bundle"],
        ["tandem", "board", "provision"],
    ]


@pytest.mark.slow
def test_a_user_who_follows_the_page_sees_detections(
    tmp_path: Path, fresh: FreshBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker_port, sshd = free_port(), fresh.sshd
    # This machine stands for the host and, through an sshd, for the board on its USB network.
    monkeypatch.setenv("TANDEM_SUDO_PASSWORD", PASSWORD)
    monkeypatch.setattr(discovery, "USB_HOST", "127.0.0.1")
    monkeypatch.setattr(discovery, "SSH_PORT", sshd.port)
    monkeypatch.setattr(discovery, "jetson_ports", list)
    monkeypatch.setattr(
        discovery, "_ssh_address", lambda *_words, **_options: fresh.address
    )  # with the port and the keys of the test
    monkeypatch.setattr(search, "SearchOptions", lambda *_words: SearchOptions())
    monkeypatch.chdir(tmp_path)
    video = write_video(tmp_path / "video.mp4", [scene(2, 3)] * 10)
    fresh.run(f"cp {video} /opt/video.mp4")
    sink = '[[sinks]]\nkind = "mqtt"\n'
    of_board = COLOUR_TOML.replace("{uri}", "/opt/video.mp4")
    monkeypatch.setattr(board_fixtures, "COLOUR_TOML", of_board)
    bundle = colour_bundle(tmp_path / "in", source="loop = true", sinks=sink)
    (tmp_path / "robot.bundle").write_bytes(bundle.read_bytes())
    assert TABLE is not None
    (tmp_path / "in.csv").write_text(TABLE[1].replace("ssh://robot@192.168.55.1", fresh.address))
    stands_for = {
        "ssh://robot@192.168.55.1": fresh.address,
        "192.168.55.100:8883": f"127.0.0.1:{broker_port}",
        "-h 192.168.55.100 -p 8883": f"-h 127.0.0.1 -p {broker_port}",
        "--device board-1 --fleet": "--device board-1 --profile laptop --fleet",  # no Jetson
        "--bundle robot.bundle": "--bundle robot.bundle --profile laptop",
    }
    messages: list[str] = []
    try:
        for line in LINES:
            command = line
            for words, here in stands_for.items():
                command = command.replace(words, here)
            messages.append(follow(command, fresh))
            if line.startswith("mosquitto -d"):
                wait_until_it_listens(broker_port)
    finally:
        pid_file = tmp_path / "robots/broker/mosquitto.pid"
        if pid_file.exists():
            os.kill(int(pid_file.read_text()), 15)
    texts = dict(zip(LINES, messages, strict=True))
    of = {line.split(" -")[0]: text for line, text in texts.items()}
    assert "would do" in messages[2]
    assert "is set up as board-1" in messages[3]
    assert "colours 1 is live on board-1" in messages[4]
    assert "runs        colours 1" in messages[5]
    assert json.loads(messages[6])["detections"], messages[6]
    assert "runs colours 1" in of["tandem board find"]
    assert "1 of 1 boards run it" in messages[10]
    assert "1 boards ok, 0 failed" in messages[11]
    for name in ("device", "profile", "free space", "slot a"):
        assert name in messages[5]


def follow(command: str, fresh: FreshBoard) -> str:
    """Do what the page says; return what was printed."""
    words = shlex.split(command)
    if words[0] == "tandem":
        done = CliRunner().invoke(tandem, words[1:])
        assert done.exit_code == 0, (command, done.output, done.exception, fresh.log())
        return done.output
    run = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, (command, run.stdout, run.stderr, fresh.log())
    return run.stdout


def wait_until_it_listens(port: int) -> None:
    class Started:
        def poll(self) -> None:
            """mosquitto -d has left for the background."""

        returncode = 0

    wait_for_port(port, Started())  # type: ignore[arg-type]
