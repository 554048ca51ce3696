"""The values of a rollout. All are frozen, and what is stored is JSON.

Times are seconds since 1970 (UTC), as the events carry them: the machine looks at no clock.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from device.protocol.documents import InstallPolicy, Measured, ReleaseSpec
from device.update.agent_payload import AgentPayload
from toolkit.fleet.rollout.gates import Gate
from toolkit.fleet.rollout.rates import Rate
from toolkit.fleet.rollout.targets import Requirement

DevicePhase = Literal[
    "pending",  # its turn has not come
    "sent",  # the release is desired
    "live",
    "silent",  # it was live, and is not heard any more
    "failed",  # refused, or rolled back by the device
    "timed_out",
    "skipped",  # the rollout ended before its turn
    "superseded",  # a newer rollout has it
    "undoing",  # the release before is desired
    "undone",
    "undo_failed",
    "decommissioned",  # it left the fleet
]
Status = Literal[
    "running",
    "scheduled",
    "paused",
    "approval",
    "rolling_back",
    "finished",
    "aborted",
    "rolled_back",
]
RolloutAction = Literal["pause", "resume", "approve", "abort", "rollback"]
OnFailure = Literal["pause", "rollback"]
Cause = Literal["", "operator", "failures", "group"]  # why a rollout stands still
STATUSES: tuple[Status, ...] = get_args(Status)
ENDED: frozenset[Status] = frozenset({"finished", "aborted", "rolled_back"})
GONE: frozenset[DevicePhase] = frozenset({"superseded", "skipped", "decommissioned"})  # not its own
OPEN: frozenset[DevicePhase] = frozenset({"pending", "sent", "silent", "undoing"})  # no final phase


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the values."""


class Limit(_Value, frozen=True, kw_only=True):
    """At most so many failures: `percent` of each group's devices, or `count` in the rollout."""

    percent: float | None = None
    count: int | None = None


class RolloutSpec(_Value, frozen=True, kw_only=True):
    """What a rollout shall do; it never changes.

    `key`: random, it makes requests and the order of devices differ from rollout to rollout.
    `success`: the share (0 to 1) of a group that must be live before the next one begins.
    `timeout_s`: so long a device has for a final answer, the wait for its window not counted.
    `late_joiners`: devices that appear later and fit enter the last group.
    `soak_s`: so long a group stays as it passed before the next one begins; `start_s`: nothing is
    sent before. `queries`: what the groups @NAME of saved queries ask for.
    `metrics`, `texts` and `models`: what the bundle says of itself, for gates on it. `agent`: it is
    a release of the agent itself, and which boards it fits.
    """

    key: str
    release: ReleaseSpec
    groups: tuple[str, ...]
    policy: InstallPolicy = InstallPolicy()
    rate: Rate | None = None
    success: float = 0.9
    max_failures: Limit = Limit(percent=10.0)
    on_failure: OnFailure = "pause"
    gates: tuple[Gate, ...] = ()
    requires: tuple[Requirement, ...] = ()
    metrics: dict[str, float] = {}
    texts: dict[str, str] = {}
    models: tuple[str, ...] = ()
    timeout_s: float = 3600.0
    approval: bool = False
    late_joiners: bool = True
    retry: bool = False
    soak_s: float = 0.0
    start_s: float = 0.0
    queries: dict[str, tuple[Requirement, ...]] = {}
    agent: AgentPayload | None = None


class Member(_Value, frozen=True, kw_only=True):
    """A device of a rollout: its group by number, and the SHA-256 of the release that it goes back
    to (empty: none is known); of an agent the version."""

    device: str
    group: int
    previous: str = ""


class _Event(_Value, frozen=True, kw_only=True, tag_field="event"):
    """Base of the events; `at_s` never falls from one to the next."""

    at_s: float


class Started(_Event, frozen=True, kw_only=True, tag="started"):
    """The first event: the devices, in the order in which each group sends; `by`: who begins it."""

    members: tuple[Member, ...]
    by: str = ""


class Begun(_Event, frozen=True, kw_only=True, tag="begun"):
    """The time of a scheduled rollout has come: what devices run now, by its SHA-256, where it is
    not what they ran as the rollout was planned."""

    previous: dict[str, str]


class Joined(_Event, frozen=True, kw_only=True, tag="joined"):
    """A device that fits has appeared."""

    device: str
    previous: str = ""


class Answered(_Event, frozen=True, kw_only=True, tag="answered"):
    """A device's final answer to the release, or with `undo` to the release before."""

    device: str
    live: bool
    reason: str = ""
    undo: bool = False
    measured: Measured | None = None


class Figures(_Event, frozen=True, kw_only=True, tag="figures"):
    """What a device has measured of the release since it answered."""

    device: str
    measured: Measured


class Silent(_Event, frozen=True, kw_only=True, tag="silent"):
    """Devices are not heard any more; `heard_s`: when the first of them last was."""

    devices: tuple[str, ...]
    heard_s: float


class Superseded(_Event, frozen=True, kw_only=True, tag="superseded"):
    """Devices were taken over by a newer rollout."""

    devices: tuple[str, ...]
    by: int


class Decommissioned(_Event, frozen=True, kw_only=True, tag="decommissioned"):
    """Devices have left the fleet; one that enrols anew under the same id may join again."""

    devices: tuple[str, ...]


class Ordered(_Event, frozen=True, kw_only=True, tag="ordered"):
    """An order of the operator. One that does not fit the status changes nothing."""

    order: RolloutAction
    by: str = ""


class Reconnected(_Event, frozen=True, kw_only=True, tag="reconnected"):
    """The server heard nobody for a while and does now: timeouts restart from zero."""


class Tick(_Event, frozen=True, kw_only=True, tag="tick"):
    """Time has passed. The machine decides and sends at ticks alone."""


Event = (
    Started | Begun | Joined | Answered | Figures | Silent | Superseded | Decommissioned | Ordered
    | Reconnected | Tick
)  # fmt: skip


class Send(_Value, frozen=True, kw_only=True):
    """Make the release the desired one of a device."""

    device: str


class Revert(_Value, frozen=True, kw_only=True):
    """Make the release before the desired one of a device."""

    device: str
    sha256: str


Action = Send | Revert


class DeviceState(_Value, frozen=True, kw_only=True):
    """A device in a rollout, since when it is in its phase, and why."""

    group: int
    phase: DevicePhase = "pending"
    previous: str = ""
    since_s: float = 0.0
    reason: str = ""
    measured: Measured | None = None


class GroupState(_Value, frozen=True, kw_only=True):
    """A group: the number of its devices by phase, and which of them were not sent to yet.

    `accepted`: the operator lets it pass as it is. `approved`: the next one may begin.
    `tolerated`: failures that were there when the operator said to go on.
    `full_s`: when enough devices were live, while figures are missing.
    `passed_s`: since when it has passed without a break, and soaks; `soaked_s`: how long it did
    before the rollout was paused.
    `taken`: the phases that devices had which newer rollouts have taken, of `counts["superseded"]`.
    """

    name: str
    counts: Mapping[DevicePhase, int] = {}
    queue: tuple[str, ...] = ()
    accepted: bool = False
    approved: bool = False
    tolerated: int = 0
    full_s: float | None = None
    passed_s: float | None = None
    soaked_s: float = 0.0
    taken: Mapping[DevicePhase, int] = {}

    @property
    def size(self) -> int:
        """The devices that count: those that it has (`GONE`)."""
        return sum(count for phase, count in self.counts.items() if phase not in GONE)

    @property
    def failures(self) -> int:
        """The devices that failed or gave no answer."""
        return self.counts.get("failed", 0) + self.counts.get("timed_out", 0)

    @property
    def open(self) -> int:
        """The devices that have no final phase."""
        return sum(self.counts.get(phase, 0) for phase in OPEN)


class RolloutState(_Value, frozen=True, kw_only=True):
    """A rollout now. `reason`: a sentence on why it stands still, or what it waits for.

    `group`: the number of the newest group that has begun. `credit`: devices that may be sent to
    by the rate, as of `credit_s`. `taken_by`: how many devices each newer rollout has taken since
    this one ended, by its number. `started_by`: who began it. `waits`: its devices are not its own
    yet, as it begins later.
    """

    status: Status = "running"
    reason: str = ""
    cause: Cause = ""
    group: int = 0
    groups: tuple[GroupState, ...] = ()
    devices: Mapping[str, DeviceState] = {}
    credit: float = 0.0
    credit_s: float | None = None
    taken_by: Mapping[int, int] = {}
    started_by: str = ""
    waits: bool = False


EVENTS: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
