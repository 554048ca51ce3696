"""The values of the board's machine: its state, what happens to it, and what is then to be done."""

from dataclasses import dataclass
from typing import Literal

from device.protocol.documents import Desired, Update
from device.trust.exchange import TRUSTED, Trusted, Verdict
from device.update.admission import BoardState
from device.update.liveness import PipelineHealth
from device.update.slots import Slot, SlotState
from device.update.trial import Crashes, Environment, Trial
from device.update.update_table import UpdateTable

# unread: the disk does not give the idle slot. An attempt is written to the disk before it begins.
# unstarted: on trial, and the system starts no process. resuming: a trial that was interrupted
# waits for its preparation.
Stage = Literal[
    "idle", "failed", "verifying", "live", "downloading", "unpacking", "checking", "unread",
    "postponed", "window", "preparing", "golden", "shadow_attempt", "shadow", "trial_attempt",
    "trial", "unstarted", "resuming",
]  # fmt: skip
NoticeWord = Literal[
    "boot", "shut_down", "cancel", "accept", "restart", "stop", "go_back", "fall_back",
    "failure", "exited", "crashed", "restart_due", "active_changed", "recorded", "not_recorded",
    "not_started", "no_fetch", "fetch_failed", "complete", "unpacked", "whole", "damaged",
    "unread", "preparing", "preparation_runs", "shadowing",
]  # fmt: skip
DoWord = Literal[
    "compare", "fetch", "pause_fetch", "unpack", "verify", "fall_back", "prepare", "golden",
    "shadow", "stop_shadow", "trial", "trial_again", "active", "active_again",
    "check_active", "stop", "report", "answer", "info", "warning", "error",
]  # fmt: skip
NO_SLOTS = SlotState()
NOWHERE = Environment()
IDLE = Update(phase="idle")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a board is: its profile and [update] of agent.toml."""

    profile: str
    update: UpdateTable


@dataclass(frozen=True, slots=True)
class Moment:
    """What the board is like as an event comes.

    `now_s`: of a steady clock; `utc`: for the records; `hour`, `minute`: of its local time.
    `unread`: slots that the disk did not give. `stopped`: no pipeline runs, nor will by itself.
    """

    now_s: float = 0.0
    utc: str = ""
    hour: int = 0
    minute: int = 0
    environment: Environment = NOWHERE
    unread: frozenset[Slot] = frozenset()
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Where an update is. Times are of a steady clock.

    `desired`: what the device shall run, None: not known; `verdict`: what its signatures say;
    `sideloaded`: somebody brought it to the board. `update`: the report on it. `preparing`,
    `prepared`, `golden_of`: SHA-256 of the release whose segments are finished, and were, and whose
    golden inputs ran; `golden_agreement` None: not to their end; `golden_skipped`: it can have
    none. `shadow`: the request of the release that runs beside the live one. `trial` was last
    looked at at `looked_s`; `endless`: it has not harmed the agent. `commit_at_s`: when a commit
    that found no room is tried again.
    `source_worked`: the release before had frames when a postponed one was tried.
    """

    slots: SlotState = NO_SLOTS
    stage: Stage = "idle"
    update: Update = IDLE
    desired: Desired | None = None
    verdict: Verdict = TRUSTED
    sideloaded: bool = False
    preparing: str = ""
    prepared: str = ""
    golden_of: str = ""
    golden_runs: bool = False
    golden_agreement: float | None = None
    golden_skipped: bool = False
    shadow: str = ""
    trial: Trial | None = None
    looked_s: float = 0.0
    endless: bool = False
    judge_at_s: float | None = None
    commit_at_s: float = 0.0
    read_again_s: float = 0.0
    source_worked: bool = False
    crashes: Crashes | None = None

    @property
    def trusted(self) -> Desired | None:
        """The desired state whose signatures are known to fit, None if there is none."""
        return self.desired if isinstance(self.verdict, Trusted) else None

    @property
    def on_trial(self) -> bool:
        """Whether the pipeline that runs is that of a trial."""
        return self.stage in ("trial", "unstarted")


# -- events


@dataclass(frozen=True, slots=True)
class Notice:
    """What a word says. `text`: the reason, what a child says, or the number of a request."""

    word: NoticeWord
    text: str = ""


@dataclass(frozen=True, slots=True)
class DesiredSet:
    """The desired state came, None: it was cleared, or more is known of its signatures."""

    desired: Desired | None
    verdict: Verdict
    sideloaded: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """What the desired release is compared with before it is fetched."""

    board: BoardState


@dataclass(frozen=True, slots=True)
class Observed:
    """What the heartbeats and frames of the pipeline say by now; it comes often."""

    health: PipelineHealth


@dataclass(frozen=True, slots=True)
class Fetched:
    """So much of the release is there. `complaint`: what is wrong with its sources."""

    received_bytes: int
    complaint: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """A check of a release before its trial has ended.

    `problem`: why the release must not be tried; `passing`: the system is to blame, and another try
    may go well. `skipped`: the release can have no golden inputs. `built`: segments that were not
    there before. `frames` were compared in shadow.
    """

    check: Literal["preparation", "golden", "shadow"]
    problem: str | None = None
    passing: bool = False
    agreement: float | None = None
    frames: int = 0
    built: bool = False
    skipped: bool = False


Event = Notice | DesiredSet | Compared | Observed | Fetched | Checked

# -- effects


@dataclass(frozen=True, slots=True)
class Do:
    """What is to be done with the desired release, or with a slot. `text`: a reason, or what is
    said.

    compare: tell what the desired release is compared with. fall_back: see whether the idle slot
    is whole, to go back to it. trial, trial_again, active, active_again: run it, and forget its
    earlier deaths or not. check_active: run another one where it is damaged. answer: tell whoever
    asked why it cannot be. info, warning, error: log it.
    """

    word: DoWord
    text: str = ""
    slot: Slot | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Write the state of the slots. `first`: nothing goes on before the disk has it, and the
    machine is told; otherwise it is in force already. `reserve`: with room for what follows."""

    slots: SlotState
    first: bool = False
    reserve: bool = False


Effect = Do | Save
