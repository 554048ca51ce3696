"""Releases over a serial line and UDP, end to end: a real agent, and stock clients."""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from fleet_fixtures import Fleet
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, free_port, make_bundle
from smp_fixtures import Cable, cable, smpmgr, upload_once

from toolkit.cli.main import tandem


@pytest.fixture
def wire() -> Iterator[Cable]:
    with cable() as one:
        yield one


class Board(AgentBox):
    """A board without a broker, at the end of a cable."""

    def __init__(self, folder: Path, wire: Cable, *, dev: bool) -> None:
        super().__init__(folder, free_port(), dev=dev, ca=None if dev else folder / "none.crt")
        self.wire = wire
        with self.config.open("a") as file:
            file.write(f'[smp]\ndevice = "{wire.board}"\n')

    def smpmgr(self, *words: str) -> str:
        return smpmgr("--port", self.wire.host, "--line-length", "128", *words)

    def wait(self, holds: Callable[[str], bool]) -> str:
        """Read the images until they are as told."""
        until = time.monotonic() + 2 * WAIT_S
        while not holds(images := self.smpmgr("image", "state-read")):
            assert time.monotonic() < until, images + self.log()
        return images


@pytest.fixture
def bench(tmp_path: Path, wire: Cable) -> Iterator[Board]:
    box = Board(tmp_path, wire, dev=True)
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


def test_a_stock_client_brings_a_bench_to_a_release_and_a_bad_one_is_rolled_back(
    tmp_path: Path, bench: Board
) -> None:
    good = make_bundle(tmp_path / "in")
    bench.smpmgr("image", "upload", str(good), "--format", "any")
    bench.smpmgr("image", "state-write", sha256(good))
    bench.wait(live("good 1"))
    bench.smpmgr("image", "state-write", "--confirm")
    bad = make_bundle(tmp_path / "in", "crash", engine_bytes=3000)
    bench.smpmgr("image", "upload", str(bad), "--format", "any")
    bench.smpmgr("image", "state-write", sha256(bad))
    bench.smpmgr("os", "reset")  # in the midst of it
    until = time.monotonic() + 2 * WAIT_S
    while "is rolled back" not in bench.log() and "rolled back" not in bench.log():
        assert time.monotonic() < until, bench.log()
        time.sleep(0.1)
    bench.wait(live("good 1"))
    assert [name for name, _pid in bench.runs()][-1] == "good"


def test_a_board_takes_by_cable_what_its_fleet_has_signed(tmp_path: Path, wire: Cable) -> None:
    fleet = Fleet(tmp_path)
    shutil.copytree(fleet.trust, tmp_path / "trust")
    board = Board(tmp_path, wire, dev=False)
    board.start()
    try:
        bundle, out = make_bundle(tmp_path / "in", version="2"), tmp_path / "cam.statement"
        words = ("fleet", "statement", str(bundle), "--device", DEVICE, "--out", str(out))
        done = CliRunner().invoke(tandem, (*words, "--fleet", str(fleet.folder)))
        assert done.exit_code == 0, done.output
        upload_once("console", wire.host, bundle.read_bytes())
        refused = board.smpmgr("image", "state-write", sha256(bundle))
        assert "this device takes only signed ones" in refused
        upload_once("console", wire.host, out.read_bytes(), image=1)
        board.smpmgr("image", "state-write", sha256(bundle))
        board.wait(live("good 2"))
    finally:
        board.close()
