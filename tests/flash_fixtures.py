"""`tandem flash` as a function, a bundle of a size, and a fleet with one board."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from control_fixtures import client_of
from mqtt_fixtures import PROFILE, AgentBox, Mosquitto

from device.update.bundle import write_bundle
from toolkit.cli.main import tandem
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.transports.addresses import open_board, parse_address
from toolkit.fleet.transports.deliver import flash_board
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.transport import (
    Flashed,
    Progress,
)

MEGABYTE = 1_000_000


def bundle_of(folder: Path, engine: bytes, version: str, behaviour: str = "good") -> Path:
    """A bundle with this engine."""
    folder.mkdir(exist_ok=True)
    files = {"e": engine, "p": behaviour.encode(), "l": b"person\n"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    out = folder / f"{version}.bundle"
    paths = {"engine": folder / "e", "pipeline": folder / "p", "labels": folder / "l"}
    write_bundle(out, **paths, name="robot", version=version, profile=PROFILE)
    return out


def flash(way: str, bundle: Path, on_progress: Callable[[Progress], None] | None = None) -> Flashed:
    delivery = Delivery(bundle, None)
    try:
        return flash_board(
            open_board(parse_address(way)),
            way,
            delivery,
            on_facts=lambda _facts: None,
            on_progress=on_progress or (lambda _progress: None),
        )
    finally:
        delivery.close()


def run(*words: str) -> Result:
    return CliRunner().invoke(tandem, ("flash", *words))


@dataclass(frozen=True)
class Site:
    """A fleet's folder, a broker and a board that takes signed releases of version 1 and above."""

    fleet: Path
    broker: Mosquitto
    box: AgentBox


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    broker = Mosquitto(tmp_path)
    fleet = tmp_path / "fleet"
    make_fleet(fleet, name="robots", broker="127.0.0.1:1")  # the plain one is used
    shutil.copytree(fleet / "trust", tmp_path / "trust")
    box = AgentBox(tmp_path, broker.tls_port, dev=False, ca=broker.ca)
    box.config.write_text(
        box.config.read_text().replace("[update]\n", '[update]\nmin_version = "1"\n')
    )
    box.start()
    client_of(box).close()
    yield Site(fleet, broker, box)
    box.close()
    broker.close()
