"""What lists and pages show of a fleet: documents in JSON, made from the store alone.

The command line draws them; `--json` prints them as they are.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from device.protocol.documents import (
    AgentReport,
    DeviceFacts,
    Measured,
    PipelineReport,
    Running,
    Update,
)
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.liveness import ListeningPeriod, Outage, outages
from toolkit.fleet.rollout.reports import request_of
from toolkit.fleet.rollout.waits import window_text
from toolkit.fleet.server.times import utc
from toolkit.fleet.store import lease
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.device_queries import (
    EVERY,
    PAGE,
    DeviceFilter,
    phases_of,
    read_page,
    silent_voices,
)
from toolkit.fleet.store.devices import DeviceRow, load_ear

MAX_FAILURES = 50  # that a view lists; `tandem fleet devices` has them all
MOST_OPEN = 20  # rollouts that the overview and the metrics show
STREAMED = 500  # devices that are read at a time
FAILED: frozenset[v.DevicePhase] = frozenset({"failed", "timed_out", "undo_failed"})


class _View(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the views."""


class GroupView(_View, frozen=True, kw_only=True):
    """A group: its devices by phase.

    `shadow_agreement`: the least that one of them measured of this release on live frames, None:
    none has; `shadow_frames`: how many all of them compared.
    """

    name: str
    devices: int
    phases: dict[str, int]
    shadow_agreement: float | None = None
    shadow_frames: int = 0


class FailureView(_View, frozen=True, kw_only=True):
    """A device on which a release is not live, and why."""

    device: str
    group: str
    phase: str
    reason: str


class RolloutView(_View, frozen=True, kw_only=True):
    """A rollout. `waiting_s`: since when orders wait for a server, None: they do not.

    `received_bytes` of `total_bytes`: what the devices that download have. `taken_by`: how many
    devices newer rollouts have taken since it ended, by their numbers; they are in its figures as
    they were then. `start`: nothing is sent before, empty: it begins at once; `window`: when
    devices install, HH:MM-HH:MM in their local time, empty: at any time.
    """

    number: int
    name: str
    version: str
    profile: str
    sha256: str
    status: v.Status
    reason: str
    created: str
    groups: tuple[GroupView, ...]
    live: int
    devices: int
    received_bytes: int
    total_bytes: int
    failures: tuple[FailureView, ...]
    taken_by: dict[int, int]
    server: bool
    start: str = ""
    window: str = ""


class DeviceView(_View, frozen=True, kw_only=True):
    """A device. `state`: that of its agent; "silent": it says that it is online, and is not heard;
    "unknown": it says so, and nobody could have heard it, or it has said nothing yet.

    `last_heard`: when something came from it live, on the server's clock; `age_s`: how long ago;
    `silent_since`: the same as `last_heard` while it is silent. `beats`: whether its agent says
    beats, without which silence is not noticed. `clock`: what its clock said at the last beat.
    `dev`: it takes releases that are not signed. `rollout` and `phase`: the rollout that it is in,
    0: none. `agent`: the version that its agent says; `versions`: its releases of the agent.
    """

    id: str
    state: str
    last_heard: str
    age_s: float | None
    silent_since: str
    beats: bool
    clock: str
    profile: str
    dev: bool
    labels: dict[str, str]
    running: Running | None
    pipeline: PipelineReport | None
    update: Update | None
    facts: DeviceFacts | None
    measured: Measured | None
    problems: tuple[str, ...]
    warning: str
    rollout: int
    phase: str
    agent: str = ""
    versions: AgentReport | None = None


def rollout_views(database: Database, numbers: Iterable[int] = ()) -> list[RolloutView]:
    """Return rollouts, the newest last; without numbers all of them."""
    chosen = tuple(numbers)
    condition = f" WHERE number IN ({', '.join('?' * len(chosen))})" if chosen else ""
    rows = database.rows(
        f"SELECT number, spec, summary, created_s FROM rollouts{condition} ORDER BY number", *chosen
    )
    server = lease.is_served(database)
    return [
        _rollout_view(
            database, number, msgspec.json.decode(spec, type=v.RolloutSpec),
            msgspec.json.decode(summary, type=v.RolloutState), created=utc(created_s),
            server=server,
        )
        for number, spec, summary, created_s in rows
    ]  # fmt: skip


def open_rollouts(database: Database) -> list[RolloutView]:
    """Return the rollouts that have not ended, the newest ones, the newest last."""
    marks = ", ".join("?" * len(v.ENDED))
    rows = database.rows(
        f"SELECT number FROM rollouts WHERE status NOT IN ({marks}) ORDER BY number DESC LIMIT ?",
        *sorted(v.ENDED), MOST_OPEN,
    )  # fmt: skip
    return rollout_views(database, [int(row[0]) for row in rows]) if rows else []


def rollout_page(database: Database, *, before: int, limit: int) -> list[RolloutView]:
    """Return the newest rollouts with a number below one (0: of all), the newest first."""
    rows = database.rows(
        "SELECT number FROM rollouts WHERE number < ? ORDER BY number DESC LIMIT ?",
        before or 2**62, limit,
    )  # fmt: skip
    return rollout_views(database, [int(row[0]) for row in rows])[::-1] if rows else []


def _rollout_view(
    database: Database, number: int, spec: v.RolloutSpec, state: v.RolloutState, *, created: str,
    server: bool,
) -> RolloutView:  # fmt: skip
    release, sent = spec.release, sum(group.counts.get("sent", 0) for group in state.groups)
    return RolloutView(
        number=number,
        name=release.name,
        version=release.version,
        profile=release.profile,
        sha256=release.blob.sha256,
        status=state.status,
        reason=state.reason,
        created=created,
        groups=_group_views(database, number, spec, state.groups),
        live=sum(_phases(group).get("live", 0) for group in state.groups),
        devices=sum(group.size + sum(group.taken.values()) for group in state.groups),
        received_bytes=_received(database, spec, number) if sent else 0,
        total_bytes=sent * release.blob.bytes,
        failures=_failures(database, spec, number, state.groups),
        taken_by=dict(state.taken_by),
        server=server,
        start=utc(spec.start_s),
        window=window_text(spec.policy),
    )


def _failures(
    database: Database, spec: v.RolloutSpec, number: int, groups: Iterable[v.GroupState]
) -> tuple[FailureView, ...]:
    """Return the first devices on which a release is not live."""
    if not any(group.counts.get(phase) for group in groups for phase in FAILED):
        return ()
    phases = ", ".join("?" * len(FAILED))
    rows = database.rows(
        f"SELECT id, grp, phase, reason FROM devices WHERE rollout = ? AND phase IN ({phases})"
        " ORDER BY grp, id LIMIT ?",
        number, *sorted(FAILED), MAX_FAILURES,
    )  # fmt: skip
    return tuple(
        FailureView(device=device, group=spec.groups[group], phase=phase, reason=reason)
        for device, group, phase, reason in rows
    )


def _received(database: Database, spec: v.RolloutSpec, number: int) -> int:
    """Return the bytes that the devices have to which a release was sent."""
    rows = database.rows(
        "SELECT coalesce(sum(received_bytes), 0) FROM devices WHERE rollout = ? AND phase = 'sent'"
        " AND request = ?",
        number, request_of(spec, number, undo=False),
    )  # fmt: skip
    return int(rows[0][0])


def _group_views(
    database: Database, number: int, spec: v.RolloutSpec, groups: Sequence[v.GroupState]
) -> tuple[GroupView, ...]:
    """Return groups with what their devices measured of the release; of several groups those
    devices that no newer rollout has taken."""
    of_group = "0" if len(groups) == 1 else "grp"
    members, values = ("1 = 1", ()) if len(groups) == 1 else ("rollout = ?", (number,))
    shadows = [] if spec.policy.shadow_s == 0.0 else database.rows(
        f"SELECT {of_group}, min(shadow_agreement), sum(shadow_frames) FROM devices WHERE {members}"
        " AND measured = ? AND shadow_agreement IS NOT NULL GROUP BY 1",
        *values, spec.release.blob.sha256,
    )  # fmt: skip
    measured = {int(group): (agreement, int(frames)) for group, agreement, frames in shadows}
    return tuple(
        GroupView(
            name=group.name,
            devices=group.size + sum(group.taken.values()),
            phases={str(phase): count for phase, count in sorted(_phases(group).items())},
            shadow_agreement=measured.get(place, (None, 0))[0],
            shadow_frames=measured.get(place, (None, 0))[1],
        )
        for place, group in enumerate(groups)
    )


def _phases(group: v.GroupState) -> dict[v.DevicePhase, int]:
    """Return a group's devices by phase; those that were taken since the rollout ended as they were
    then."""
    phases = dict(group.counts)
    for phase, count in group.taken.items():
        phases[phase] = phases.get(phase, 0) + count
        phases["superseded"] = phases.get("superseded", 0) - count
    return {phase: count for phase, count in phases.items() if count}


def device_views(database: Database, where: DeviceFilter = EVERY) -> Iterator[DeviceView]:
    """Yield the devices of a filter, by their ids, reading some at a time."""
    ear, after = load_ear(database), ""
    while True:
        page = device_page(database, where, ear=ear, after=after, limit=STREAMED)
        yield from page.devices
        if not (after := page.after):
            return


class DeviceViewPage(_View, frozen=True, kw_only=True):
    """A page of devices. `after`: what asks for the next page, empty after the last."""

    devices: tuple[DeviceView, ...]
    after: str


def device_page(
    database: Database, where: DeviceFilter = EVERY, *, sort: str = "id", down: bool = False,
    after: str = "", limit: int = PAGE, ear: ListeningPeriod | None = None,
) -> DeviceViewPage:  # fmt: skip
    """Return a page of the devices of a filter; see `device_queries.read_page`."""
    ear = load_ear(database) if ear is None else ear
    page = read_page(database, where, ear, sort=sort, down=down, after=after, limit=limit)
    phases = phases_of(database, [row.id for row in page.rows])
    views = (_device_view(row, ear, *phases.get(row.id, (0, ""))) for row in page.rows)
    return DeviceViewPage(devices=tuple(views), after=page.after)


def device_view(database: Database, device: str) -> DeviceView | None:
    """Return one device, None if it is not known."""
    return next(iter(device_page(database, DeviceFilter(ids=(device,))).devices), None)


def read_outages(database: Database) -> tuple[Outage, ...]:
    """Return which devices are silent now, those of one place that fell silent together as one."""
    return outages(*silent_voices(database, load_ear(database)))


def _state_of(row: DeviceRow, ear: ListeningPeriod) -> str:
    if row.state is None:
        return "unknown"
    liveness = row.liveness(ear)
    is_believed = row.state.state != "online" or liveness in ("alive", "no_beat")
    return row.state.state if is_believed else liveness


def _device_view(row: DeviceRow, ear: ListeningPeriod, rollout: int, phase: str) -> DeviceView:
    reported, state = row.reported, _state_of(row, ear)
    heard = utc(row.heard_s)
    return DeviceView(
        id=row.id,
        state=state,
        last_heard=heard,
        age_s=round(max(0.0, ear.until_s - row.heard_s), 1) if heard else None,
        silent_since=heard if state == "silent" else "",
        beats=row.beat_s > 0.0,
        clock=row.beat_at,
        profile="" if reported is None else reported.profile,
        dev=reported is not None and reported.dev,
        labels=dict(row.all_labels),
        running=None if reported is None else reported.running,
        pipeline=None if reported is None else reported.pipeline,
        update=None if reported is None else reported.update,
        facts=None if reported is None else reported.facts,
        measured=None if reported is None else reported.measured,
        problems=() if reported is None else reported.problems,
        warning="" if reported is None else reported.warning,
        rollout=rollout,
        phase=phase,
        agent="" if reported is None else reported.agent,
        versions=None if reported is None else reported.versions,
    )
