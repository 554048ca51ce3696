"""The folder of a chunk server while an operator publishes, replaces and removes bundles in it."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bundle_models import detector, write_model_bundle
from mqtt_fixtures import make_bundle

from device.protocol.documents import BlobGet, encode
from device.protocol.mqtt import Message
from device.protocol.topics import Topics
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.library import Library
from toolkit.fleet.server.chunks import ChunkServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "targets"


@pytest.fixture
def library(folder: Path) -> Iterator[Library]:
    library = Library(folder)
    yield library
    library.close()


def put(folder: Path, version: str) -> Path:
    """Write a bundle under a name of its own."""
    bundle = make_bundle(folder / version, version=version, engine_bytes=300_000)
    return bundle.rename(folder / f"{version}.bundle")


def sha256_of(path: Path) -> str:
    blob = Blob(path)
    blob.close()
    return blob.spec.sha256


def answers(library: Library, request: BlobGet) -> list[str]:
    """Return the last levels of the topics of what a server sends for a request."""
    sent: list[str] = []

    def send(topic: str, _payload: bytes) -> bool:
        sent.append(topic.split("/")[-2])
        return True

    server = ChunkServer(library, send)
    server.on_message(Message(Topics("a").blob_get, encode(request)))
    while server.pending:
        server.send_next()
    return sent


def test_more_bundles_than_are_kept_open_leave_those_in_use_open(
    folder: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.fleet.bundles.library.MAX_OPEN", 2)
    paths = [put(folder, str(number)) for number in range(6)]
    first, last = sha256_of(paths[0]), sha256_of(paths[-1])
    request = BlobGet(sha256=first, chunks=(0, 1, 2, 3), bases=(last,))
    assert len(answers(library, request)) == 4
    assert len(answers(library, request)) == 4


def test_a_copy_of_a_bundle_leaves_the_one_in_use_open(folder: Path, library: Library) -> None:
    new, base = put(folder, "2"), put(folder, "1")
    sha256, bases = sha256_of(new), (sha256_of(base),)
    assert len(answers(library, BlobGet(sha256=sha256, chunks=(0, 1, 2), bases=bases))) == 3
    (folder / "0-copy.bundle").write_bytes(new.read_bytes())
    (folder / "0-base.bundle").write_bytes(base.read_bytes())
    assert library.blob("0" * 64) is None  # all files were looked at
    assert len(answers(library, BlobGet(sha256=sha256, chunks=(3, 4), bases=bases))) == 2


def test_what_is_no_bundle_stops_no_server(folder: Path, library: Library) -> None:
    bundle = put(folder, "1")
    (folder / "0.bundle").symlink_to(folder / "gone")
    (folder / "00.bundle").mkdir()
    (folder / f"{'2' * 64}.x.bundle").symlink_to(folder / "gone")
    before = len(os.listdir("/proc/self/fd"))
    assert library.blob("2" * 64) is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert answers(library, BlobGet(sha256=sha256_of(bundle), chunks=(0,))) == ["0"]


def test_a_bundle_that_was_overwritten_is_said_to_be_gone(folder: Path, library: Library) -> None:
    bundle = put(folder, "1")
    request = BlobGet(sha256=sha256_of(bundle), chunks=(0, 1, 2, 3))
    assert library.blob(request.sha256) is not None
    bundle.write_bytes(bytes(bundle.stat().st_size))
    assert "none" in answers(library, request)


def test_a_base_that_was_cut_off_costs_only_bytes(folder: Path, library: Library) -> None:
    tensors = detector(np.random.default_rng())
    base = write_model_bundle(folder / "1.bundle", tensors)
    moved = {name: weights * 1.01 for name, weights in tensors.items()}
    new = write_model_bundle(folder / "2.bundle", moved, version="2")
    sha256, bases = sha256_of(new), (sha256_of(base),)
    assert "d4" in answers(library, BlobGet(sha256=sha256, chunks=(3, 4), bases=bases))
    os.truncate(base, 10_000)
    names = answers(library, BlobGet(sha256=sha256, chunks=(5, 6, 7), bases=bases))
    assert names == ["5", "6", "7"]
