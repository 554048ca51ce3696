"""What an operator does to a fleet: orders in the store, which the server carries out.

Nothing here needs a server to run: an order waits in the store until one does.
"""

import itertools
import re
import secrets
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from device.choices import list_choices
from device.files import replacing
from device.protocol.documents import ReleaseSpec
from device.update.agent_versions import environment_name
from toolkit.errors import RolloutError
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.gates import BundleStatements, check_bundle_gates
from toolkit.fleet.rollout.groups import assign
from toolkit.fleet.rollout.machine import accepts, step
from toolkit.fleet.rollout.targets import (
    Requirement,
    Target,
    is_full,
    need_mb,
    parse_requirements,
    unfit_by_device,
)
from toolkit.fleet.server.control import DECOMMISSION, LABEL
from toolkit.fleet.store import log, rollouts
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.device_queries import EVERY, having_bundle, load_targets, stream
from toolkit.fleet.store.devices import (
    load_device,
    load_ear,
    remove_device,
    set_labels,
)

INSTALLED_AGENT = "installed"  # what a device goes back to that runs its installed agent
MAX_LABELS = 64
MAX_LABELLED = 5000  # devices at once: the server waits for the write
QUERY = "query"  # kind of the log's rows that say that a saved query has changed
_QUERY_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
NEAR = 1000  # devices on both sides of an unknown id that a message chooses from


class PlannedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of a plan and its devices, in the order in which they are sent to."""

    name: str
    devices: tuple[str, ...]


class Unfit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A device that the release does not fit, and why."""

    device: str
    reasons: tuple[str, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout would do, known before anything is sent.

    `ungrouped`: devices that it fits and no group takes. `offline`: those that are away or silent,
    and get it once they are back. `unsigned`: those with dev = true. `before`: the release that
    each goes back to, by its SHA-256, or the version of its agent; of the others it is not known.
    """

    release: ReleaseSpec
    groups: tuple[PlannedGroup, ...]
    unfit: tuple[Unfit, ...] = ()
    ungrouped: tuple[str, ...] = ()
    offline: tuple[str, ...] = ()
    unsigned: tuple[str, ...] = ()
    before: dict[str, str] = {}

    @property
    def members(self) -> int:
        """How many devices it is sent to."""
        return sum(len(group.devices) for group in self.groups)


def new_key() -> str:
    """Return the key of a new rollout."""
    return secrets.token_hex(4)


def make_plan(database: Database, spec: v.RolloutSpec) -> Plan:
    """Return what a rollout would do with the devices that are known now."""
    release = f"{spec.release.name} {spec.release.version}"
    statements = BundleStatements(spec.metrics, spec.texts, spec.models)
    check_bundle_gates(spec.gates, release, statements)
    targets = _targets(database, spec)
    if not targets:
        raise RolloutError(
            "no device of this fleet has reported yet: start `tandem fleet serve` and the agents"
        )
    reasons = unfit_by_device(targets, spec.release, spec.requires, spec.agent)
    fit = [target for target in targets if not reasons[target.device]]
    if not fit:
        example = next(iter(reasons.items()))
        raise RolloutError(
            f"{spec.release.name} {spec.release.version} fits none of {len(targets)} devices; "
            f"{example[0]}: {'; '.join(example[1])}"
        )
    groups = assign(spec.groups, fit, spec.key, spec.queries)
    known = rollouts.load_releases(database)
    members = [target for group in groups for target in group]
    grouped = {target.device for target in members}
    return Plan(
        release=spec.release,
        groups=tuple(
            PlannedGroup(name=name, devices=_names(group))
            for name, group in zip(spec.groups, groups, strict=True)
        ),
        unfit=tuple(
            Unfit(device=device, reasons=texts) for device, texts in reasons.items() if texts
        ),
        ungrouped=_names([target for target in fit if target.device not in grouped]),
        offline=_names([target for target in members if not target.online]),
        unsigned=_names([target for target in members if target.dev]),
        before={row.device: before for row in members if (before := _before(spec, row, known))},
    )


def _before(spec: v.RolloutSpec, target: Target, known: Container[str]) -> str:
    """Return what a device goes back to, empty if the fleet cannot say."""
    if spec.agent is None:
        return target.running if target.running in known else ""
    sha256 = spec.release.blob.sha256
    runs = target.agent == environment_name(spec.release.version, sha256)
    return sha256 if runs else target.agent or INSTALLED_AGENT


def _targets(database: Database, spec: v.RolloutSpec) -> list[Target]:
    """Return all devices as the plan of a release needs them."""
    release, ear = spec.release, load_ear(database)
    if spec.agent is not None:  # what its boards must have is in their documents alone
        rows = (row.target(ear) for row in stream(database, EVERY, ear))
        return [target for target in rows if target is not None]
    requirements = itertools.chain(spec.requires, *spec.queries.values())
    targets = load_targets(database, ear, {row.name for row in requirements}, need_mb(release))
    full = [target.device for target in targets if is_full(target, release)]
    having, bundles = having_bundle(database, full, release.blob.sha256), (release.blob.sha256,)
    replace = msgspec.structs.replace
    return [
        replace(target, facts=replace(target.facts, bundles=bundles))
        if target.device in having
        else target
        for target in targets
    ]


def start_rollout(
    database: Database, spec: v.RolloutSpec, plan: Plan, bundle: Path, who: str
) -> int:
    """Begin a rollout as it was planned; return its number."""
    members = tuple(
        v.Member(device=device, group=number, previous=plan.before.get(device, ""))
        for number, group in enumerate(plan.groups)
        for device in group.devices
    )
    with database.write():
        started = v.Started(at_s=database.now_s(), members=members, by=who)
        return rollouts.create_rollout(database, spec, started, bundle.resolve(), who)


def order(database: Database, number: int, word: v.RolloutAction, who: str) -> None:
    """Give an order to a rollout; RolloutError if it means nothing in its status."""
    spec = get_spec(database, number)
    with database.write():
        before = rollouts.load_summary(database, number)
        if not accepts(before.status, word):
            raise RolloutError(_refusal(number, before.status, word))
        at_s = database.now_s()
        event = v.Ordered(at_s=at_s, order=word, by=who)
        rollouts.note_events(database, number, [event], at_s, who)
        # What becomes of its devices is for the server to say, which sends to them.
        after, _actions = step(spec, before, [event])
        rollouts.keep_state(database, number, before, after)


def _refusal(number: int, status: v.Status, word: str) -> str:
    possible = (
        ", ".join(row for row in get_args(v.RolloutAction) if accepts(status, row)) or "nothing"
    )
    return (
        f"rollout {number} is {STATUS_WORDS[status]}: {word} means nothing to it now; it takes "
        f"{possible}"
    )


# Status -> how it reads in a sentence.
STATUS_WORDS: Mapping[v.Status, str] = {
    "running": "running",
    "scheduled": "scheduled",
    "paused": "paused",
    "approval": "waiting for approval",
    "rolling_back": "rolling back",
    "finished": "finished",
    "aborted": "aborted",
    "rolled_back": "rolled back",
}


def get_spec(database: Database, number: int) -> v.RolloutSpec:
    """Return the spec of a rollout; RolloutError if there is none with this number."""
    spec = rollouts.load_spec(database, number)
    if spec is None:
        last = rollouts.newest_number(database)
        known = f"the last one is {last}" if last else "there is none yet"
        raise RolloutError(f"there is no rollout {number}: {known}")
    return spec


def newest(database: Database) -> int:
    """Return the number of the newest rollout; RolloutError if there is none."""
    number = rollouts.newest_number(database)
    if not number:
        raise RolloutError("there is no rollout yet: begin one with `tandem fleet rollout start`")
    return number


def archive_log(database: Database, archive: Path, *, keep_s: float, who: str) -> int:
    """Write the rows of the log that are older than `keep_s` to a new file, a row of JSON a line,
    and delete them; return how many. What a rollout was after them is kept as a snapshot.

    RolloutError: the file is there, or cannot be written; then nothing is deleted.
    """
    with database.write():
        at_s, applied = database.now_s(), rollouts.applied(database)
        rows = database.rows(
            "SELECT coalesce(max(seq), 0) FROM log WHERE at_s < ? AND seq <= ?",
            at_s - keep_s, applied,
        )  # fmt: skip
        last = int(rows[0][0])
        if not last:
            return 0
        numbers = database.rows(
            "SELECT DISTINCT rollout FROM log WHERE seq <= ? AND kind = ?", last, log.EVENT
        )
        for (number,) in numbers:
            spec = get_spec(database, number)
            state = rollouts.load_state(database, number, spec, applied)
            rollouts.save_snapshot(database, number, applied, state)
        if archive.exists():
            raise RolloutError(f"{archive} is there: name a new file for the archive")
        try:
            with replacing(archive, 0o600) as file:
                return sum(
                    file.write(msgspec.json.encode(row) + b"\n") > 0
                    for row in log.archive_until(database, last, who, at_s)
                )
        except OSError as error:
            raise RolloutError(f"the archive {archive} cannot be written: {error}") from error


def decommission(database: Database, device: str, who: str) -> None:
    """Take a device out of the fleet and of its rollouts; it is in the fleet again once it connects
    or reports anew. RolloutError: it is not known."""
    with database.write():
        if load_device(database, device) is None:
            raise RolloutError(unknown_device(database, device))
        remove_device(database, device)
        body = msgspec.json.encode({"device": device}).decode()
        note = log.Note(who, DECOMMISSION, body, devices=(device,))
        log.append(database, [note], database.now_s())


def save_query(database: Database, name: str, text: str, who: str) -> None:
    """Keep requirements under a name, for lists (`--where @NAME`) and groups of rollouts (@NAME);
    empty ones take the name away. RolloutError: the name or the text is none."""
    requires = parse_requirements(text)
    if not _QUERY_NAME.match(name):
        raise RolloutError(f"{name!r} is no name of a query: letters, digits, - and _, 64 at most")
    with database.write():
        if requires:
            database.run(
                "INSERT INTO queries VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET"
                " requires = excluded.requires",
                name, text,
            )  # fmt: skip
        elif not database.run("DELETE FROM queries WHERE name = ?", name):
            raise RolloutError(_unknown_query(database, name))
        body = msgspec.json.encode({"name": name, "requires": text}).decode()
        log.append(database, [log.Note(who, QUERY, body)], database.now_s())


def load_queries(database: Database) -> dict[str, str]:
    """Return the saved queries by their names."""
    return dict(database.rows("SELECT name, requires FROM queries ORDER BY name"))


def query_of(database: Database, name: str) -> tuple[Requirement, ...]:
    """Return what a saved query asks for; RolloutError: there is none of this name."""
    rows = database.rows("SELECT requires FROM queries WHERE name = ?", name)
    if not rows:
        raise RolloutError(_unknown_query(database, name))
    return parse_requirements(rows[0][0])


def _unknown_query(database: Database, name: str) -> str:
    known = load_queries(database)
    if not known:
        return f"there is no saved query {name!r}: `tandem fleet query set {name} LIST` makes it"
    return f"there is no saved query {name!r}: there are {list_choices(name, known)}"


def requirements_of(database: Database, text: str) -> tuple[Requirement, ...]:
    """Return the requirements in a text, or in @NAME those of a saved query."""
    name = text.strip().removeprefix("@")
    return query_of(database, name) if text.strip() != name else parse_requirements(text)


def label_device(database: Database, device: str, changes: Sequence[str], who: str) -> None:
    """Set labels (KEY=VALUE) of a device, or take them away (KEY=)."""
    label_devices(database, (device,), changes, who)


def label_devices(
    database: Database, devices: Sequence[str], changes: Sequence[str], who: str
) -> None:
    """Set or take away labels of devices, of all of them or of none."""
    parsed = [_parse_label(change) for change in changes]
    if len(devices) > MAX_LABELLED:
        raise RolloutError(f"{len(devices)} devices are too many at once: {MAX_LABELLED} are")
    with database.write():  # of two operators at once, neither loses labels
        notes = [_label(database, device, parsed, who) for device in devices]
        log.append(database, notes, database.now_s())


def _label(
    database: Database, device: str, changes: Sequence[tuple[str, str]], who: str
) -> log.Note:
    row = load_device(database, device)
    if row is None:
        raise RolloutError(unknown_device(database, device))
    labels = {**row.labels, **dict(changes)}
    labels = {key: value for key, value in labels.items() if value}
    if len(labels) > MAX_LABELS:
        raise RolloutError(
            f"{device} would have {len(labels)} labels, {MAX_LABELS} are the most: take some "
            "away with KEY="
        )
    set_labels(database, device, labels)
    body = msgspec.json.encode({"device": device, "labels": labels}).decode()
    return log.Note(who, LABEL, body, devices=(device,))


def _parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    printable = text.isprintable() and "," not in text
    if not (key and equals and printable) or len(key) > 64 or len(value) > 200:
        raise RolloutError(
            f"{text!r} is no label: write KEY=VALUE, for example site=lab (KEY= takes it away)"
        )
    return key, value


def unknown_device(database: Database, device: str) -> str:
    """Return the message for a device that never reported."""
    # Near ones in the order of their ids: of a large fleet not all are read.
    first, rest = (
        database.rows(
            f"SELECT id FROM devices WHERE id {side} ? ORDER BY id {order} LIMIT ?", device, NEAR
        )
        for side, order in (("<", "DESC"), (">", ""))
    )
    choices = list_choices(device, sorted(str(row[0]) for row in (*first, *rest)))
    return f"the fleet has no device {device!r}; it has {_cut(choices)}"


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200].rpartition(',')[0]}, ..."


def _names(targets: Sequence[Target]) -> tuple[str, ...]:
    return tuple(target.device for target in targets)
