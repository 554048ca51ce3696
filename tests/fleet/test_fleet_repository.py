"""The fleet's folder: keys, published releases, `tandem fleet`, and what power cuts leave of it."""

import contextlib
import errno
import json
import os
import random
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from crash_states import record, states, write_tree
from fleet_fixtures import Fleet
from mqtt_fixtures import PROFILE, make_bundle
from tuf.api.metadata import Metadata, Targets

from device.errors import TrustError
from device.trust.exchange import Refused, Trusted
from device.trust.fetchers import FolderFetcher
from device.trust.journal import Counter, Journal, SeenVersion
from device.trust.verify import verify
from toolkit.cli.main import tandem
from toolkit.fleet.bundles.release import target_path
from toolkit.fleet.trust import repository as module
from toolkit.fleet.trust.keys import PASSPHRASE, load_keys, make_key
from toolkit.fleet.trust.publish import publish_bundle
from toolkit.fleet.trust.repository import FleetRepository, make_repository

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("fleet"), root_keys=1, threshold=1)


@pytest.fixture
def fleet(first: Fleet, tmp_path: Path) -> Fleet:
    return first.copied(tmp_path / "copy")


def targets_of(fleet: Fleet) -> set[str]:
    return set(fleet.repository._load(Targets).signed.targets)


# -- keys


def test_keys_are_for_their_owner_alone(fleet: Fleet) -> None:
    modes = {path.stat().st_mode & 0o777 for path in fleet.repository.keys.iterdir()}
    assert modes == {0o600}
    assert fleet.repository.keys.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in fleet.repository.keys.iterdir()} == {
        "root-1.pem", "targets.pem", "snapshot.pem", "timestamp.pem", "director.pem",
    }  # fmt: skip
    public = [path.read_bytes() for path in fleet.folder.rglob("*") if path.is_file()
              and path.suffix != ".pem"]  # fmt: skip
    assert not any(b"PRIVATE" in data for data in public)


def test_a_passphrase_encrypts_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_key(tmp_path, "plain")
    monkeypatch.setenv(PASSPHRASE, "correct horse")
    key = make_key(tmp_path, "targets")
    assert b"ENCRYPTED" in (tmp_path / "targets.pem").read_bytes()
    assert set(load_keys(tmp_path, "targets")) == {key.public_key.keyid}
    assert set(load_keys(tmp_path, "plain")) == {plain.public_key.keyid}
    monkeypatch.setenv(PASSPHRASE, "wrong")
    with pytest.raises(TrustError, match=f"or {PASSPHRASE} is wrong"):
        load_keys(tmp_path, "targets")
    monkeypatch.delenv(PASSPHRASE)
    with pytest.raises(TrustError, match=f"give its passphrase as {PASSPHRASE}"):
        load_keys(tmp_path, "targets")


@pytest.mark.parametrize(("keys", "threshold"), [(0, 1), (1, 2), (17, 1), (1, 0)])
def test_a_threshold_that_cannot_be_met_is_refused(
    tmp_path: Path, keys: int, threshold: int
) -> None:
    with pytest.raises(TrustError, match="root keys cannot sign"):
        make_repository(tmp_path / "fleet", root_keys=keys, threshold=threshold)


def test_a_fleet_is_made_once(fleet: Fleet) -> None:
    with pytest.raises(TrustError, match="holds a fleet already"):
        make_repository(fleet.folder)


@pytest.mark.parametrize("role", ["root", "targets", "director"])
def test_what_root_must_sign_needs_its_keys(fleet: Fleet, role: str) -> None:
    key = fleet.repository.keys / "root-1.pem"
    away = key.rename(fleet.folder / "safe.pem")
    before = sorted(fleet.repository.keys.iterdir())
    with pytest.raises(TrustError, match="0 of root's 1 keys are in"):
        fleet.repository.rotate(role)
    assert sorted(fleet.repository.keys.iterdir()) == before
    away.rename(key)
    fleet.repository.rotate(role)


def test_a_full_disk_during_a_rotation_leaves_a_fleet_that_signs(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TrustError, match="No space left"):
            FleetRepository(fleet.folder).rotate("timestamp")
    repository = FleetRepository(fleet.folder)
    assert len(load_keys(repository.keys, "timestamp")) == 1
    assert repository.refresh()
    repository.rotate("timestamp")


@pytest.mark.parametrize("name", ["timestamp.json", "1.root.json", "targets.json"])
@pytest.mark.parametrize("content", [None, b"", b'{"signed": 1}'])
def test_metadata_that_the_fleet_itself_has_lost_are_named(
    fleet: Fleet, name: str, content: bytes | None
) -> None:
    repository = FleetRepository(fleet.folder)
    for path in repository.metadata.glob(f"*{name}"):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    with pytest.raises(TrustError, match=rf"{re.escape(name)} is missing or damaged"):
        repository.expiries()


def test_a_key_that_is_away_is_named(fleet: Fleet) -> None:
    (fleet.repository.keys / "targets.pem").unlink()
    with pytest.raises(TrustError, match=r"put the file of the key .* back as keys/targets.pem"):
        fleet.publish(make_bundle(fleet.folder.parent / "new", version="2"))


# -- releases


def test_the_same_bundle_again_changes_nothing(fleet: Fleet) -> None:
    before = (fleet.served / "metadata/timestamp.json").read_bytes()
    fleet.publish(fleet.bundle)
    assert (fleet.served / "metadata/timestamp.json").read_bytes() == before


def test_other_bytes_need_another_version(fleet: Fleet, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "again", engine_bytes=1000)
    with pytest.raises(TrustError, match="is published with other bytes"):
        publish_bundle(fleet.repository, bundle)


@pytest.mark.parametrize("part", ["", ".", "..", "a/b", "../keys", ".hidden", "a\nb", "ä", "a b"])
def test_names_that_are_no_file_names_are_refused(part: str) -> None:
    assert target_path("a", "1.0+x", PROFILE) == f"a/1.0+x/{PROFILE}.bundle"
    for words in ((part, "1", "p"), ("a", part, "p"), ("a", "1", part)):
        with pytest.raises(TrustError, match="cannot be part of a path"):
            target_path(*words)


def test_two_who_publish_at_once_both_do(fleet: Fleet, tmp_path: Path) -> None:
    bundles = [make_bundle(tmp_path / "new", version=f"v{n}", engine_bytes=999) for n in range(4)]
    with ThreadPoolExecutor(len(bundles)) as pool:
        jobs = [
            pool.submit(publish_bundle, FleetRepository(fleet.folder), bundle) for bundle in bundles
        ]
    assert all(job.result() for job in jobs)
    assert {f"good/v{n}/{PROFILE}.bundle" for n in range(4)} <= targets_of(fleet)


@pytest.mark.parametrize("role", ["root", "targets", "snapshot", "timestamp", "director"])
def test_a_rotation_that_is_cut_off_anywhere_is_done_by_the_next(
    fleet: Fleet, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, counter = module._replace, 0

    def fail_after(writes: int) -> None:
        def write(path: Path, data: bytes) -> None:
            nonlocal writes
            if not writes:
                raise TrustError("the power is cut")
            writes -= 1
            replace(path, data)

        monkeypatch.setattr(module, "_replace", write)

    for writes in range(1, 20):
        fail_after(writes)
        with contextlib.suppress(TrustError):
            fleet.repository.rotate(role)
            break
        counter += 1
        # Boards go on, and so does the fleet.
        monkeypatch.setattr(module, "_replace", replace)
        verdict = fleet.verify(fleet.signed(fleet.desired(counter)))
        assert isinstance(verdict, Trusted), (writes, verdict)
    assert counter >= 1
    monkeypatch.setattr(module, "_replace", replace)
    fleet.repository.refresh()
    assert isinstance(fleet.verify(fleet.signed(fleet.desired(100))), Trusted)


# -- power cuts


def test_a_power_cut_while_a_release_is_published_leaves_the_old_or_the_new_repository(
    fleet: Fleet, tmp_path: Path
) -> None:
    document = fleet.signed(fleet.desired(1))
    bundle = make_bundle(tmp_path / "new", version="2", engine_bytes=3000)
    with record(fleet.served) as recording:
        fleet.publish(bundle)
    cuts = list({state.key: state for state in states(recording, random.Random(1), 16)}.values())
    assert len(cuts) > 20
    request = fleet.request(document)
    for number, state in enumerate(cuts):
        shown = tmp_path / f"disk{number}"
        write_tree(state.tree, shown)
        board = fleet.request(document, tmp_path / f"board{number}")
        verdict = verify(board, FolderFetcher(shown))
        assert isinstance(verdict, Trusted), (state, verdict)
    assert isinstance(verify(request, FolderFetcher(fleet.served)), Trusted)


def test_a_power_cut_never_takes_a_version_from_the_journal(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with record(folder) as recording:
        journal = Journal(folder)
        for version in range(1, 5):
            journal.note({"timestamp": SeenVersion(version, "k")}, Counter(version, "p", "d"))
            recording.mark(version)
    count = 0
    for number, state in enumerate(states(recording, random.Random(1))):
        disk = tmp_path / f"disk{number}"
        write_tree(state.tree, disk)
        after, claim = Journal(disk).record, state.claim or 0
        known = after.versions.get("timestamp", SeenVersion()).version
        assert known in (claim, claim + 1), state
        assert after.counter.value == known
        if claim:
            with pytest.raises(TrustError, match="this board has seen"):
                Journal(disk).check_version("timestamp", claim - 1, "k")
        count += 1
    assert count > 50


def test_a_journal_that_cannot_be_written_lets_nothing_through(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path, _mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("device.trust.journal.replacing", full)
    verdict = fleet.verify(fleet.signed(fleet.desired(1)))
    assert isinstance(verdict, Refused)
    assert "cannot be written (No space left on device): nothing is installed" in verdict.reason
    assert verdict.again


# -- the command


def run(*words: str | Path) -> object:
    done = CliRunner().invoke(tandem, ["fleet", *map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_command_makes_publishes_refreshes_and_rotates(tmp_path: Path) -> None:
    folder = tmp_path / "robots"
    keys = ("--root-keys", "2", "--threshold", "2")
    settings = run("init", folder, *keys, "--broker", "mqtt.local:8883")
    assert settings["name"] == "robots"
    assert (settings["broker"]["host"], settings["broker"]["port"]) == ("mqtt.local", 8883)
    published = run("publish", make_bundle(tmp_path / "in"), "--fleet", folder)
    assert published["target"] == f"good/1/{PROFILE}.bundle"
    before = {row["role"]: row["version"] for row in run("refresh", "--fleet", folder)}
    assert before == {"root": 1, "targets": 2, "snapshot": 2, "timestamp": 3, "director": 1}
    assert run("keys", "rotate", "director", "--fleet", folder)["version"] == 2
    after = {row["role"]: row["version"] for row in run("refresh", "--fleet", folder)}
    assert after == {"root": 1, "targets": 3, "snapshot": 3, "timestamp": 5, "director": 2}


def test_errors_of_the_command_name_the_folder(tmp_path: Path) -> None:
    for words in (("refresh",), ("keys", "rotate", "root")):
        done = CliRunner().invoke(tandem, ["fleet", *words, "--fleet", str(tmp_path)])
        assert isinstance(done.exception, TrustError)
        assert f"{tmp_path} is not the folder of a fleet" in str(done.exception)


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bundle(tmp_path / "in").rename(tmp_path / "robot.bundle")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/signed.md").read_text()
    lines = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).splitlines()
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "tandem"
        done = CliRunner().invoke(tandem, words)
        assert done.exit_code == 0, done.output
    assert len(lines) == 5
    root = Metadata.from_file("fleet/trust/root.json").signed
    assert (root.version, len(root.roles["root"].keyids), root.roles["root"].threshold) == (2, 3, 2)
