"""Releases over a serial line and UDP, end to end: a real agent, and stock clients."""

import hashlib
import os
import re
import select
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cbor2
import pytest
from click.testing import CliRunner
from fleet_fixtures import Fleet
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, free_port, make_bundle
from smp_fixtures import Cable, cable, smpmgr, upload_once

from device.smp.framing import ConsoleFraming
from device.smp.message import HEADER
from device.smp.server import open_tty, write_all
from toolkit.cli.main import tandem


@pytest.fixture
def wire() -> Iterator[Cable]:
    with cable() as one:
        yield one


class SmpInstallBoard(AgentBox):
    """A board without a broker, at the end of a cable."""

    def __init__(self, folder: Path, wire: Cable, *, dev: bool) -> None:
        super().__init__(folder, free_port(), dev=dev, ca=None if dev else folder / "none.crt")
        self.wire = wire
        with self.config.open("a") as file:
            file.write(f'[smp]\ndevice = "{wire.board}"\n')

    def smpmgr(self, *words: str) -> str:
        return smpmgr("--port", self.wire.host, *words)

    def status(self) -> dict[str, object]:
        """Ask the group of Tandem, which stock clients reach by its number."""
        request = HEADER.pack(8, 0, 0, 65, 3, 0)
        framing, file = ConsoleFraming(), open_tty(self.wire.host, 115200)
        try:
            write_all(file, framing.encode(request))
            until = time.monotonic() + WAIT_S
            while time.monotonic() < until:
                if select.select([file], [], [], 1.0)[0]:
                    for message in framing.feed(os.read(file, 65536)):
                        return cbor2.loads(message[HEADER.size :])
        finally:
            os.close(file)
        raise AssertionError(self.log())

    def wait(self, holds: Callable[[str], bool]) -> str:
        """Read the images until they are as told."""
        until = time.monotonic() + 2 * WAIT_S
        while not holds(images := self.smpmgr("image", "state-read")):
            assert time.monotonic() < until, images + self.log()
        return images


@pytest.fixture
def bench(tmp_path: Path, wire: Cable) -> Iterator[SmpInstallBoard]:
    box = SmpInstallBoard(tmp_path, wire, dev=True)
    box.start()
    yield box
    box.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def live(version: str) -> Callable[[str], bool]:
    return lambda images: (
        f"slot=0, version='{version}'" in images
        and "confirmed=True, active=True" in images.split("slot=1")[0]
    )


@pytest.mark.slow
def test_a_stock_client_brings_a_bench_to_a_release_and_a_bad_one_is_rolled_back(
    tmp_path: Path, bench: SmpInstallBoard
) -> None:
    good = make_bundle(tmp_path / "in")
    bench.smpmgr("image", "upload", str(good), "--format", "any")
    bench.smpmgr("image", "state-write", sha256(good))
    bench.smpmgr("os", "reset")  # in the midst of it
    bench.wait(live("good 1"))
    bench.smpmgr("image", "state-write", "--confirm")
    bad = make_bundle(tmp_path / "in", "fails", engine_bytes=3000)
    upload_once("console", bench.wire.host, bad.read_bytes())
    bench.smpmgr("image", "state-write", sha256(bad))
    until = time.monotonic() + 2 * WAIT_S
    while "rolled back" not in str(bench.status()["phase"]).replace("_", " "):
        assert time.monotonic() < until, bench.log()
        time.sleep(0.1)
    assert "camera /dev/video9 does not exist" in str(bench.status()["reason"])
    bench.wait(live("good 1"))
    assert bench.runs()[-1][0] == "good"


def test_a_board_takes_by_cable_what_its_fleet_has_signed(tmp_path: Path, wire: Cable) -> None:
    fleet = Fleet(tmp_path)
    shutil.copytree(fleet.trust, tmp_path / "trust")
    board = SmpInstallBoard(tmp_path, wire, dev=False)
    board.start()
    try:
        bundle, out = make_bundle(tmp_path / "in", version="2"), tmp_path / "cam.statement"
        page = (Path(__file__).parents[2] / "docs" / "flash_serial.md").read_text()
        (command,) = re.findall(r"^tandem (fleet statement .*)$", page, re.MULTILINE)
        places = {"robot.bundle": bundle, "board-1": DEVICE, "board-1.statement": out}
        words = [str(places.get(word, word)) for word in command.split()]
        words[-1] = str(fleet.folder)
        done = CliRunner().invoke(tandem, words)
        assert done.exit_code == 0, done.output
        upload_once("console", wire.host, bundle.read_bytes())
        refused = board.smpmgr("image", "state-write", sha256(bundle))
        assert "this device takes only signed ones" in refused
        upload_once("console", wire.host, out.read_bytes(), image=1)
        board.smpmgr("image", "state-write", sha256(bundle))
        board.wait(live("good 2"))
    finally:
        board.close()
