"""What somebody with a stolen part can do to a board: nothing, and the board says why.

Each row is an attack: it gets a fleet whose board has taken one document, and returns the document
that the attacker publishes and the repository that he shows. Afterwards the fleet makes new
online keys, and the board takes what it signs.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgspec
import pytest
from fleet_fixtures import Fleet, utc
from mqtt_fixtures import make_bundle
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, Root, TargetFile, Targets, Timestamp

from device.protocol.documents import Signature, Signed, decode, encode
from device.protocol.signed import sign_text
from device.trust.exchange import Refused, Trusted, Unverified
from device.trust.journal import JOURNAL
from toolkit.fleet.trust import repository as fleet_repository
from toolkit.fleet.trust.keys import load_keys, load_root_keys
from toolkit.fleet.trust.repository import make_director

Shown = tuple[bytes, Path]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    assert isinstance(fleet.verify(fleet.signed(fleet.desired(counter=1))), Trusted)
    return fleet


@pytest.fixture
def fleet(first: Fleet, tmp_path: Path) -> Fleet:
    return first.copied(tmp_path / "copy")


def copy_of(fleet: Fleet, name: str = "shown") -> Path:
    """The repository as it is now, for an attacker to change."""
    return Path(shutil.copytree(fleet.served, fleet.folder.parent / name))


def document(fleet: Fleet, counter: int = 2) -> bytes:
    return fleet.signed(fleet.desired(counter))


def key_of(fleet: Fleet, role: str) -> CryptoSigner:
    (signer,) = load_keys(fleet.repository.keys, role).values()
    return signer


def sign_file(path: Path, *signers: CryptoSigner, change: Callable[[object], None]) -> None:
    """Change TUF metadata in place and sign them with these keys alone."""
    metadata = Metadata.from_file(str(path))
    change(metadata.signed)
    metadata.signatures.clear()
    for signer in signers:
        metadata.sign(signer, append=True)
    path.write_bytes(metadata.to_bytes())


def expire(signed: object) -> None:
    signed.expires = datetime.now(timezone.utc) - timedelta(minutes=1)


# -- a stolen broker: it may alter, hold back and repeat what passes


def altered_desired(fleet: Fleet) -> Shown:
    signed = decode(document(fleet), Signed)
    payload = signed.payload.replace('"retry":false', '"retry":true')
    assert payload != signed.payload
    return encode(msgspec.structs.replace(signed, payload=payload)), fleet.served


def garbled_signature(fleet: Fleet) -> Shown:
    signed = decode(document(fleet), Signed)
    keyid = signed.signatures[0].keyid
    junk = tuple(Signature(keyid=keyid, sig=sig) for sig in ("", "zz", "00" * 64))
    return encode(msgspec.structs.replace(signed, signatures=junk)), fleet.served


def own_key(fleet: Fleet) -> Shown:
    return fleet.signed(fleet.desired(2), CryptoSigner.generate_ed25519()), fleet.served


def of_another_device(fleet: Fleet) -> Shown:
    return fleet.signed(fleet.desired(2, device="board-2")), fleet.served


def replayed(fleet: Fleet) -> Shown:
    old = document(fleet, 2)
    assert isinstance(fleet.verify(document(fleet, 3)), Trusted)
    return old, fleet.served


def old_signed_bundle(fleet: Fleet) -> Shown:
    """The document of a release that was current once, after a newer one was taken."""
    old = document(fleet, 2)
    fleet.release = fleet.publish(make_bundle(fleet.folder.parent / "new", version="2"))
    assert isinstance(fleet.verify(document(fleet, 3)), Trusted)
    return old, fleet.served


def expired_desired(fleet: Fleet) -> Shown:
    return fleet.signed(fleet.desired(2, expires=utc(days=-0.001))), fleet.served


def altered_metadata(fleet: Fleet) -> Shown:
    shown = copy_of(fleet)
    path = shown / "metadata/2.targets.json"
    data = path.read_bytes()
    sha256 = fleet.release.blob.sha256.encode()
    assert sha256 in data
    path.write_bytes(data.replace(sha256, b"0" * 64))
    (fleet.state / "metadata/targets.json").unlink()
    return document(fleet), shown


def truncated_metadata(fleet: Fleet) -> Shown:
    shown = copy_of(fleet)
    path = shown / "metadata/timestamp.json"
    path.write_bytes(path.read_bytes()[:-20])
    return document(fleet), shown


def empty_metadata(fleet: Fleet) -> Shown:
    shown = copy_of(fleet)
    (shown / "metadata/timestamp.json").write_bytes(b"")
    return document(fleet), shown


def nested_metadata(fleet: Fleet) -> Shown:
    shown = copy_of(fleet)
    (shown / "metadata/timestamp.json").write_bytes(b"[" * 10_000)
    return document(fleet), shown


def endless_metadata(fleet: Fleet) -> Shown:
    shown = copy_of(fleet)
    with (shown / "metadata/timestamp.json").open("ab") as file:
        file.write(b" " * 20_000)
    return document(fleet), shown


def held_back_metadata(fleet: Fleet) -> Shown:
    fleet.repository.refresh()
    shown = copy_of(fleet)
    (shown / "metadata/timestamp.json").unlink()
    return document(fleet), shown


def old_timestamp(fleet: Fleet) -> Shown:
    """A freeze: the repository of yesterday."""
    old = copy_of(fleet)
    fleet.repository.refresh()
    assert isinstance(fleet.verify(document(fleet, 2)), Trusted)
    return document(fleet, 3), old


def expired_timestamp(fleet: Fleet) -> Shown:
    shown = copy_of(fleet)
    path = shown / "metadata/timestamp.json"
    (fleet.state / "metadata/timestamp.json").unlink()
    sign_file(path, key_of(fleet, "timestamp"), change=expire)
    return document(fleet), shown


# -- with a power cut: the board's own files are empty


def old_timestamp_after_a_power_cut(fleet: Fleet) -> Shown:
    shown = old_timestamp(fleet)
    for path in (fleet.state / "metadata").glob("*.json"):
        if not path.is_symlink():
            path.write_bytes(b"")
    return shown


def old_root_after_a_power_cut(fleet: Fleet) -> Shown:
    """The keys of the old root are known to the attacker; the board has seen their rotation."""
    old = copy_of(fleet)
    fleet.repository.rotate("timestamp")
    assert isinstance(fleet.verify(document(fleet, 2)), Trusted)
    for path in fleet.state.rglob("*.json"):
        if path.name != JOURNAL and not path.is_symlink():
            path.write_bytes(b"")
    return document(fleet, 3), old


# -- a stolen key of the repository (CI): targets, snapshot and timestamp at once


def ci_alone(fleet: Fleet) -> Shown:
    """It publishes a release of its own; nobody but the director can send it to a board."""
    fleet.release = fleet.publish(make_bundle(fleet.folder.parent / "evil", version="666"))
    return fleet.signed(fleet.desired(2), key_of(fleet, "targets")), fleet.served


def resigned_targets(fleet: Fleet, change: Callable[[Targets], None]) -> Path:
    """The repository with other targets, signed by all online keys."""
    shown = copy_of(fleet)
    mine = fleet_repository.FleetRepository(fleet.folder)
    mine.metadata, mine.targets = shown / "metadata", shown / "targets"
    listed = mine._load(Targets).signed
    change(listed)
    mine._commit(listed)
    return shown


def ci_with_its_own_director(fleet: Fleet) -> Shown:
    key = CryptoSigner.generate_ed25519()
    keys = {key.public_key.keyid: key.public_key.to_dict()}
    text = msgspec.json.encode(make_director(keys, 2)).decode()
    data = encode(sign_text(text, [key_of(fleet, "targets"), key]))

    def change(listed: Targets) -> None:
        listed.targets["director.json"] = TargetFile.from_data("director.json", data, ["sha256"])

    shown = resigned_targets(fleet, change)
    name = f"{hashlib.sha256(data).hexdigest()}.director.json"
    (shown / "targets" / name).write_bytes(data)
    return fleet.signed(fleet.desired(2), key), shown


def ci_without_a_director(fleet: Fleet) -> Shown:
    return document(fleet), resigned_targets(
        fleet, lambda listed: listed.targets.pop("director.json")
    )


def ci_with_an_old_director(fleet: Fleet) -> Shown:
    """The stolen key of a director that was rotated away, and a CI that lists its document."""
    old, key = (fleet.folder / "trust/director.json").read_bytes(), key_of(fleet, "director")
    fleet.repository.rotate("director")
    assert isinstance(fleet.verify(document(fleet, 2)), Trusted)

    def change(listed: Targets) -> None:
        listed.targets["director.json"] = TargetFile.from_data("director.json", old, ["sha256"])

    return fleet.signed(fleet.desired(3), key), resigned_targets(fleet, change)


# -- a stolen director's key


def director_alone(fleet: Fleet) -> Shown:
    """Its own bytes under the name of a release that is published."""
    blob = msgspec.structs.replace(fleet.release.blob, sha256="6" * 64)
    release = msgspec.structs.replace(fleet.release, blob=blob)
    return fleet.signed(fleet.desired(2, release=release)), fleet.served


def director_with_an_unpublished_release(fleet: Fleet) -> Shown:
    release = msgspec.structs.replace(fleet.release, target="evil/1/test-board.bundle")
    return fleet.signed(fleet.desired(2, release=release)), fleet.served


def director_with_another_name(fleet: Fleet) -> Shown:
    release = msgspec.structs.replace(fleet.release, version="9")
    return fleet.signed(fleet.desired(2, release=release)), fleet.served


def director_without_an_end(fleet: Fleet) -> Shown:
    return fleet.signed(fleet.desired(2, expires="")), fleet.served


def director_twice_with_one_counter(fleet: Fleet) -> Shown:
    return fleet.signed(fleet.desired(1, retry=True)), fleet.served


# -- too few of root's keys


def published_director(fleet: Fleet, signers: list[CryptoSigner], **changes: object) -> Path:
    key = key_of(fleet, "director")
    document = make_director({key.public_key.keyid: key.public_key.to_dict()}, 2)
    document = msgspec.structs.replace(document, **changes)
    data = encode(sign_text(msgspec.json.encode(document).decode(), signers))

    def change(listed: Targets) -> None:
        listed.targets["director.json"] = TargetFile.from_data("director.json", data, ["sha256"])

    shown = resigned_targets(fleet, change)
    name = f"{hashlib.sha256(data).hexdigest()}.director.json"
    (shown / "targets" / name).write_bytes(data)
    return shown


def director_of_one_root_key(fleet: Fleet) -> Shown:
    one = list(load_root_keys(fleet.repository.keys).values())[:1]
    return document(fleet), published_director(fleet, one)


def director_of_one_root_key_twice(fleet: Fleet) -> Shown:
    one = list(load_root_keys(fleet.repository.keys).values())[:1]
    return document(fleet), published_director(fleet, one * 2)


def expired_director(fleet: Fleet) -> Shown:
    signers = list(load_root_keys(fleet.repository.keys).values())
    past = datetime.now(timezone.utc) - timedelta(minutes=1)
    return document(fleet), published_director(fleet, signers, expires=past)


def root_of_one_key(fleet: Fleet) -> Shown:
    """A new root that names the attacker's timestamp key."""
    shown = copy_of(fleet)
    one = next(iter(load_root_keys(fleet.repository.keys).values()))
    path = shown / "metadata/2.root.json"
    shutil.copy(shown / "metadata/1.root.json", path)

    def change(root: Root) -> None:
        root.version = 2
        root.add_key(CryptoSigner.generate_ed25519().public_key, "timestamp")

    sign_file(path, one, change=change)
    return document(fleet), shown


NOT_DIRECTED = "the desired document is signed by 0 of the director's keys, it needs 1"
ATTACKS: dict[Callable[[Fleet], Shown], str] = {
    altered_desired: NOT_DIRECTED,
    garbled_signature: NOT_DIRECTED,
    own_key: NOT_DIRECTED,
    of_another_device: "is for the device board-2, this one is board-1",
    replayed: "has the counter 2, this board has taken 3",
    old_signed_bundle: "has the counter 2, this board has taken 3",
    expired_desired: "the desired document has expired at",
    altered_metadata: "metadata/2.targets.json is not signed by enough",
    truncated_metadata: "metadata/timestamp.json is not TUF metadata: it is cut off",
    empty_metadata: "metadata/timestamp.json is not TUF metadata: it is cut off",
    nested_metadata: "metadata/timestamp.json is not TUF metadata: it is cut off",
    endless_metadata: "metadata/timestamp.json is longer than",
    held_back_metadata: "the repository has no metadata/timestamp.json",
    old_timestamp: "metadata/timestamp.json contradicts what is signed: New timestamp version 2",
    expired_timestamp: "too old (timestamp.json is expired): sign them again",
    old_timestamp_after_a_power_cut: "shows version 2 of timestamp, this board has seen 3",
    old_root_after_a_power_cut: "shows version 1 of root, this board has seen 2",
    ci_alone: NOT_DIRECTED,
    ci_with_its_own_director: "director.json is not signed by enough of root's keys",
    ci_without_a_director: "the repository lists no director.json",
    ci_with_an_old_director: "shows version 1 of director, this board has seen 2",
    director_alone: "it is another file",
    director_with_an_unpublished_release: "has no release evil/1/test-board.bundle",
    director_with_another_name: "it is another release",
    director_without_an_end: "expires at '', which is no time",
    director_twice_with_one_counter: "has the counter 1, this board has taken 1",
    director_of_one_root_key: "director.json is not signed by enough of root's keys",
    director_of_one_root_key_twice: "director.json is not signed by enough of root's keys",
    expired_director: "director.json has expired at",
    root_of_one_key: "metadata/2.root.json is not signed by enough",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_is_refused_with_its_reason(
    fleet: Fleet, attack: Callable[[Fleet], Shown]
) -> None:
    published, shown = attack(fleet)
    verdict = fleet.verify(published, shown)
    assert isinstance(verdict, Refused), verdict
    assert ATTACKS[attack] in verdict.reason
    for role in (
        "snapshot",
        "timestamp",
    ):  # stolen ones may have signed any version
        fleet.repository.rotate(role)
    assert isinstance(fleet.verify(document(fleet, 1000)), Trusted)


def test_the_same_document_again_is_the_same_document(fleet: Fleet) -> None:
    taken = document(fleet, 2)
    assert isinstance(fleet.verify(taken), Trusted)
    assert isinstance(fleet.verify(taken), Trusted)


def test_what_metadata_say_of_a_release_reaches_the_agent(fleet: Fleet) -> None:
    verdict = fleet.verify(document(fleet))
    assert isinstance(verdict, Trusted)
    assert verdict.custom["version"] == fleet.release.version
    assert verdict.custom["index_sha256"] == fleet.release.blob.index_sha256


def test_a_counter_that_a_stolen_key_raised_ends_with_that_key(fleet: Fleet) -> None:
    assert isinstance(fleet.verify(document(fleet, 2**62)), Trusted)
    assert isinstance(fleet.verify(document(fleet, 3)), Refused)
    fleet.repository.rotate("director")
    assert isinstance(fleet.verify(document(fleet, 3)), Trusted)


@pytest.mark.parametrize("role", ["root", "targets", "snapshot", "timestamp", "director"])
def test_boards_follow_a_rotation_and_leave_the_old_key_behind(fleet: Fleet, role: str) -> None:
    old = fleet.repository.director_signer()
    for counter in (2, 3):
        fleet.repository.rotate(role)
        assert isinstance(fleet.verify(document(fleet, counter)), Trusted)
    by_old = fleet.verify(fleet.signed(fleet.desired(4), old))
    assert isinstance(by_old, Refused) == (role == "director")


def test_a_repository_that_is_away_says_nothing_of_the_release(fleet: Fleet) -> None:
    verdict = fleet.verify(document(fleet), fleet.folder / "unplugged")
    assert isinstance(verdict, Unverified)
    assert "unplugged is not there" in verdict.reason


def test_a_board_without_a_root_says_what_to_copy(fleet: Fleet) -> None:
    shutil.rmtree(fleet.trust)
    verdict = fleet.verify(document(fleet))
    assert isinstance(verdict, Refused)
    assert "copy the folder `trust` of the fleet there" in verdict.reason


def test_a_damaged_root_of_the_board_is_no_reason_to_trust(fleet: Fleet) -> None:
    root = json.loads((fleet.trust / "root.json").read_text())
    root["signatures"] = []
    (fleet.trust / "root.json").write_text(json.dumps(root))
    verdict = fleet.verify(document(fleet))
    assert isinstance(verdict, Refused)
    assert "the root.json that this board was provisioned with is not signed" in verdict.reason


def test_a_damaged_journal_stops_everything(fleet: Fleet) -> None:
    (fleet.state / JOURNAL).write_bytes(b"")
    verdict = fleet.verify(document(fleet))
    assert isinstance(verdict, Refused)
    assert "old releases could not be told from new ones" in verdict.reason


def test_a_timestamp_that_is_not_due_is_not_signed_again(fleet: Fleet) -> None:
    before = Metadata[Timestamp].from_file(str(fleet.served / "metadata/timestamp.json"))
    assert not fleet.repository.refresh(due_only=True)
    assert fleet.repository.refresh()
    after = Metadata[Timestamp].from_file(str(fleet.served / "metadata/timestamp.json"))
    assert after.signed.version == before.signed.version + 1
