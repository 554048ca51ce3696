"""A flipped byte in an engine: everyone who loads, packs, checks or installs it says so."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_fixtures import invoke
from engine_fixtures import split_network, without_checksums, write_network
from mqtt_fixtures import PROFILE
from updater_fixtures import UpdaterBoard

from device.engine.file import Engine, open_engine
from device.errors import BundleError, EngineError
from device.runtime.prepare.__main__ import main as prepare
from device.runtime.session import open_session
from device.update.bundle import write_bundle
from device.update.slot_store import SlotStore
from toolkit.fleet.bundles.unpacked import unpacked

PIPELINE = """
name = "x"
[source]
uri = "a.mp4"
[preprocess]
width = 16
height = 16
[decode]
kind = "classification"
scores = "y"
"""


def place(engine: Engine, name: str) -> int:
    """Where the bytes of a section begin in the file."""
    data = engine.path.read_bytes()
    return len(data) - max(e.stop for e in engine.entries.values()) + engine.entries[name].start


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_network(tmp_path / "whole.engine", split_network())


@pytest.fixture
def damaged(tmp_path: Path, whole: Path) -> Path:
    """The engine with a bit of the weights `w3` flipped, which changes an output a little."""
    data = bytearray(whole.read_bytes())
    with open_engine(whole) as engine:
        data[place(engine, "w3") + 9] ^= 1
    path = tmp_path / "damaged.engine"
    path.write_bytes(data)
    return path


def named(path: Path) -> str:
    with open_engine(path) as engine:
        return f"section 'w3' at byte {place(engine, 'w3')} (640 bytes) has the checksum"


def test_a_session_does_not_run_it(whole: Path, damaged: Path) -> None:
    feeds = {"x": np.ones((1, 3, 16, 16), np.float32)}
    with open_session(whole) as session:
        assert np.isfinite(session.infer(feeds)["y"]).all()
    with pytest.raises(EngineError, match="section 'w3' at byte"):
        open_session(damaged)


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "--iterations", "1"),
        ("infer", "--random", "1"),
        ("inspect", "--verify"),
        ("inspect", "--verify", "--json"),
    ],
)
def test_a_command_fails_and_names_section_and_offset(
    damaged: Path, words: tuple[str, ...]
) -> None:
    done = invoke(words[0], damaged, *words[1:])
    assert done.exit_code == 1, done.output
    assert named(damaged) in str(done.exception)


def test_inspect_says_what_was_verified(whole: Path, tmp_path: Path) -> None:
    done = invoke("inspect", whole, "--verify")
    assert "sections and the header by xxh3_64" in done.output
    answer = json.loads(invoke("inspect", whole, "--verify", "--json").output)
    assert (answer["checksums"], answer["verified"]) == ("xxh3_64", True)
    assert json.loads(invoke("inspect", whole, "--json").output)["verified"] is False
    np.save(tmp_path / "a.npy", np.ones(3))
    assert invoke("inspect", tmp_path / "a.npy", "--verify").exit_code == 2


def test_an_engine_of_an_earlier_tandem_opens_and_says_so(tmp_path: Path, whole: Path) -> None:
    old = tmp_path / "old.engine"
    old.write_bytes(without_checksums(whole.read_bytes()))
    with open_session(old) as session:
        assert session.outputs
    done = invoke("inspect", old)
    assert done.exit_code == 0
    assert f"{old} has no checksums: an earlier Tandem wrote it" in done.output
    assert json.loads(invoke("inspect", old, "--json").output)["checksums"] is None
    done = invoke("inspect", old, "--verify")
    assert done.exit_code == 1
    assert "has no checksums" in str(done.exception)


def test_prepare_checks_every_engine_first(
    damaged: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare", str(damaged)])
    assert prepare() == 1
    assert named(damaged) in capsys.readouterr().err
    damaged.write_bytes(without_checksums(whole.read_bytes()))
    assert prepare() == 0
    assert f"{damaged} has no checksums" in capsys.readouterr().err


def packed(path: Path, engine: Path, folder: Path, profile: str = "") -> Path:
    """A bundle whose hashes fit, with whatever engine."""
    (folder / "labels.txt").write_text("".join(f"class {n}\n" for n in range(10)))
    (folder / "pipeline.toml").write_text(PIPELINE)
    with open_engine(engine) as opened:
        profile = profile or opened.manifest.profile
    write_bundle(
        path, engine=engine, pipeline=folder / "pipeline.toml", labels=folder / "labels.txt",
        name="x", version="1", profile=profile,
    )  # fmt: skip
    return path


def test_a_bundle_with_it_is_neither_packed_nor_verified(
    damaged: Path, whole: Path, tmp_path: Path
) -> None:
    bad = packed(tmp_path / "bad.bundle", damaged, tmp_path)
    done = invoke("bundle", "verify", bad, "--json")
    assert done.exit_code == 1
    checks = {check["name"]: check for check in json.loads(done.output)}
    assert checks["hashes"]["passed"]
    assert "section 'w3' at byte" in checks["model.engine"]["detail"]
    with pytest.raises(EngineError, match="section 'w3'"), unpacked(bad):
        pass
    words = ("--pipeline", tmp_path / "pipeline.toml", "--labels", tmp_path / "labels.txt")
    done = invoke("bundle", "create", damaged, *words, "-o", tmp_path / "new.bundle")
    assert done.exit_code == 1
    assert named(damaged) in str(done.exception)
    assert not (tmp_path / "new.bundle").exists()
    good = packed(tmp_path / "good.bundle", whole, tmp_path)
    checks = {c["name"]: c for c in json.loads(invoke("bundle", "verify", good, "--json").output)}
    assert "sections checked" in checks["model.engine"]["detail"]


def test_the_agent_takes_no_release_with_it(damaged: Path, whole: Path, tmp_path: Path) -> None:
    store = SlotStore(tmp_path / "state")
    bad = packed(tmp_path / "bad.bundle", damaged, tmp_path)
    with pytest.raises(BundleError, match=r"packed with a damaged engine: model.engine is damaged: "
                       "section 'w3' at byte"):  # fmt: skip
        store.populate("a", bad)
    assert not store.slot_folder("a").exists()
    store.populate("a", packed(tmp_path / "good.bundle", whole, tmp_path))
    assert store.slot_folder("a").exists()
    store.close()


def test_the_agent_says_why_it_does_not_try_it(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = packed(tmp_path / "bad.bundle", damaged, tmp_path, PROFILE)
    monkeypatch.setattr("updater_fixtures.make_bundle", lambda _: bad)
    board = UpdaterBoard(tmp_path / "board")
    try:
        board.deliver_all()
        board.updater.advance(0.0)
        assert board.updater.state.trial is None
        assert "packed with a damaged engine: model.engine" in board.updater.update.reason
    finally:
        board.close()
