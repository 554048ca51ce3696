"""What lists and pages show of a fleet: documents in JSON, made from the store alone.

The command line draws them; `--json` prints them as they are.
"""

from collections.abc import Iterable, Mapping

import msgspec

from device.protocol.documents import DeviceFacts, Measured, PipelineReport, Running, Update
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.liveness import Ear, Outage, outages
from toolkit.fleet.rollout.reports import request_of
from toolkit.fleet.rollout.routing import owners
from toolkit.fleet.server.silence import voice_of
from toolkit.fleet.server.times import utc
from toolkit.fleet.store import lease, rollouts
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.devices import DeviceRow, load_devices, load_ear

MAX_FAILURES = 50  # that a view lists; `tandem fleet devices` has them all
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
    they were then.
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


class DeviceView(_View, frozen=True, kw_only=True):
    """A device. `state`: that of its agent; "silent": it says that it is online, and is not heard;
    "unknown": it says so, and nobody could have heard it, or it has said nothing yet.

    `last_heard`: when something came from it live, on the server's clock; `age_s`: how long ago;
    `silent_since`: the same as `last_heard` while it is silent. `beats`: whether its agent says
    beats, without which silence is not noticed. `clock`: what its clock said at the last beat.
    `dev`: it takes releases that are not signed. `rollout` and `phase`: the rollout that it is in,
    0: none.
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


def rollout_views(database: Database, numbers: Iterable[int] = ()) -> list[RolloutView]:
    """Return rollouts, the newest last; without numbers all of them."""
    chosen = set(numbers)
    specs = rollouts.load_specs(database)
    created = rollouts.created_s(database)
    devices = {row.id: row for row in load_devices(database)}
    row = lease.read_lease(database)
    server = row is not None and row.remaining_s > 0.0
    return [
        _rollout_view(
            number, spec, rollouts.load_state(database, number, spec), devices,
            created=utc(created[number]), server=server,
        )
        for number, spec in specs.items()
        if not chosen or number in chosen
    ]  # fmt: skip


def _rollout_view(
    number: int, spec: v.RolloutSpec, state: v.RolloutState, devices: Mapping[str, DeviceRow], *,
    created: str, server: bool,
) -> RolloutView:  # fmt: skip
    release, sent = spec.release, [d for d, row in state.devices.items() if row.phase == "sent"]
    failures = [
        FailureView(device=device, group=spec.groups[row.group], phase=row.phase, reason=row.reason)
        for device, row in state.devices.items()
        if row.phase in FAILED
    ]
    return RolloutView(
        number=number,
        name=release.name,
        version=release.version,
        profile=release.profile,
        sha256=release.blob.sha256,
        status=state.status,
        reason=state.reason,
        created=created,
        groups=tuple(
            _group_view(group, [devices.get(d) for d, row in state.devices.items()
                if row.group == number_of_group], release.blob.sha256)
            for number_of_group, group in enumerate(state.groups)
        ),
        live=sum(_phases(group).get("live", 0) for group in state.groups),
        devices=sum(group.size + sum(group.taken.values()) for group in state.groups),
        received_bytes=sum(_received(devices.get(d), request_of(spec, number, undo=False))
            for d in sent),
        total_bytes=len(sent) * release.blob.bytes,
        failures=tuple(failures[:MAX_FAILURES]),
        taken_by=dict(state.taken_by),
        server=server,
    )  # fmt: skip


def _group_view(group: v.GroupState, members: Iterable[DeviceRow | None], sha256: str) -> GroupView:
    """Return a group with what its devices measured of the release."""
    measured = [
        row.reported.measured
        for row in members
        if row is not None and row.reported is not None and row.reported.measured is not None
    ]
    shadows = [
        (figures.shadow_agreement, figures.shadow_frames)
        for figures in measured
        if figures.sha256 == sha256 and figures.shadow_agreement is not None
    ]
    return GroupView(
        name=group.name,
        devices=group.size + sum(group.taken.values()),
        phases={str(phase): count for phase, count in sorted(_phases(group).items())},
        shadow_agreement=min((agreement for agreement, _ in shadows), default=None),
        shadow_frames=sum(frames for _, frames in shadows),
    )


def _phases(group: v.GroupState) -> dict[v.DevicePhase, int]:
    """Return a group's devices by phase; those that were taken since the rollout ended as they were
    then."""
    phases = dict(group.counts)
    for phase, count in group.taken.items():
        phases[phase] = phases.get(phase, 0) + count
        phases["superseded"] = phases.get("superseded", 0) - count
    return {phase: count for phase, count in phases.items() if count}


def _received(row: DeviceRow | None, request: str) -> int:
    """Return the bytes that a device has of a request's release."""
    if row is None or row.reported is None or row.reported.update.request != request:
        return 0
    return row.reported.update.received_bytes


def device_views(database: Database) -> list[DeviceView]:
    """Return all devices, by their ids."""
    specs = rollouts.load_specs(database)
    states = {n: rollouts.load_state(database, n, spec) for n, spec in specs.items()}
    owner = owners(states)
    views, ear = [], load_ear(database)
    for row in load_devices(database):
        number = owner.get(row.id, 0)
        phase = states[number].devices[row.id].phase if number else ""
        views.append(_device_view(row, ear, number, phase))
    return views


def read_outages(database: Database) -> tuple[Outage, ...]:
    """Return which devices are silent now, those of one place that fell silent together as one."""
    ear = load_ear(database)
    return outages(
        voice_of(row, silent=_state_of(row, ear) == "silent") for row in load_devices(database)
    )


def _state_of(row: DeviceRow, ear: Ear) -> str:
    if row.state is None:
        return "unknown"
    liveness = row.liveness(ear)
    is_believed = row.state.state != "online" or liveness in ("alive", "no_beat")
    return row.state.state if is_believed else liveness


def _device_view(row: DeviceRow, ear: Ear, rollout: int, phase: str) -> DeviceView:
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
    )
