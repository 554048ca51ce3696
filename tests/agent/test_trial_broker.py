"""A release that cuts its device off from the broker, and maintenance windows, in the updater."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from crash_fixtures import Clock, Pipeline
from mqtt_fixtures import PROFILE, make_bundle

from device.agent.config import AgentConfig, BrokerTable
from device.agent.updater import Updater
from device.protocol.documents import (
    DOCUMENT_FORMAT,
    Desired,
    InstallPolicy,
    ReleaseSpec,
)
from device.trust.exchange import Trusted
from device.update.liveness import Liveness
from device.update.slot_store import SlotStore
from device.update.trial import (
    Environment,
    Trial,
    judge,
    trial_limits,
)
from device.update.update_table import UpdateTable
from toolkit.fleet.bundles.blob import Blob


class TrialBoard:
    """An updater without processes; the test is its clock and its network."""

    def __init__(self, root: Path) -> None:
        self.online = True
        self.cut_off_by = "none"  # SHA-256 of the release that breaks the network
        self.hour = 12
        self.pipeline = Pipeline()
        self.store = SlotStore(root)
        update = UpdateTable(confirm_after_s=5.0, trial_timeout_s=50.0, broker_timeout_s=60.0)
        config = AgentConfig(
            device="dev1",
            profile=PROFILE,
            state_dir=str(root),
            dev=True,
            broker=BrokerTable(host="127.0.0.1"),
            update=update,
        )
        self.updater = Updater(
            config,
            self.store,
            self.pipeline,  # type: ignore[arg-type]
            lambda: None,
            environment=lambda _now_s: Environment(online=self.reachable),
            local_time=lambda: time.struct_time((2026, 1, 1, self.hour, 0, 0, 3, 1, 0)),
        )
        self.updater.boot()

    @property
    def reachable(self) -> bool:
        state = self.updater.state
        running = state.record(state.trial or state.active)
        return self.online and (running is None or running.sha256 != self.cut_off_by)

    def deploy(
        self,
        bundle: Path,
        *,
        policy: InstallPolicy | None = None,
        floor: str = "",
        request: str = "",
    ) -> str:
        """Give the whole of a bundle to the updater; return its hash."""
        blob = Blob(bundle)
        spec, chunks = blob.spec, range(blob.table.count)
        parts = {"index": blob.index, **{str(n): blob.read(n) for n in chunks}}
        blob.close()
        version = bundle.stem.rpartition("-")[2]
        release = ReleaseSpec(name="good", version=version, profile=PROFILE, blob=spec)
        desired = Desired(
            format=DOCUMENT_FORMAT,
            request=request or bundle.name,
            release=release,
            policy=policy or InstallPolicy(),
        )
        custom = {"min_version_floor": floor} if floor else {}
        self.updater.on_desired(desired, Trusted(custom=custom))
        for part, payload in parts.items():
            self.updater.downloads.take(spec.sha256, part, payload, Clock.now_s)
        self.updater.advance(Clock.now_s)
        return spec.sha256

    def run(self, for_s: int) -> None:
        """Let the pipeline run with frames for so long."""
        for _ in range(for_s):
            Clock.now_s += 1.0
            self.pipeline.state = "running"
            self.pipeline.frames += 30
            self.updater.advance(Clock.now_s)

    @property
    def active(self) -> str:
        record = self.updater.state.record(self.updater.state.active)
        return "" if record is None else record.sha256

    @property
    def phase(self) -> str:
        return self.updater.update.phase


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrialBoard]:
    monkeypatch.setattr(time, "monotonic", Clock.read)
    board = TrialBoard(tmp_path / "state")
    yield board
    board.updater.shut_down()
    board.store.close()


@pytest.fixture
def live(board: TrialBoard, tmp_path: Path) -> str:
    """The hash of a release that is live."""
    sha256 = board.deploy(make_bundle(tmp_path / "1", version="1"))
    board.run(6)
    assert (board.phase, board.active) == ("live", sha256)
    return sha256


def test_a_release_that_cuts_the_device_off_is_rolled_back(
    board: TrialBoard, live: str, tmp_path: Path
) -> None:
    bad = board.deploy(make_bundle(tmp_path / "2", version="2"))
    board.cut_off_by = bad
    board.run(50)
    assert board.phase == "trial"
    assert board.updater.update.reason.startswith("it works, and is live once the broker")
    board.run(12)
    # The one before is back, and can reach the broker: the accident is ruled out by a second try.
    assert board.active == live
    assert board.updater.state.trial is not None
    board.run(62)
    assert (board.phase, board.active) == ("rolled_back", live)
    assert "it is with the release before" in board.updater.update.reason
    board.run(200)
    assert board.updater.state.trial is None


def test_an_accident_of_the_network_does_not_condemn_a_release(
    board: TrialBoard, live: str, tmp_path: Path
) -> None:
    good = board.deploy(make_bundle(tmp_path / "2", version="2"))
    board.online = False
    board.run(62)
    assert (board.phase, board.active) == ("postponed", live)
    board.run(500)  # for as long as the broker is away
    assert board.phase == "postponed"
    board.online = True
    board.run(10)
    assert (board.phase, board.active) == ("live", good)


def test_an_outage_before_the_trial_keeps_the_release_running_and_uncommitted(
    board: TrialBoard, live: str, tmp_path: Path
) -> None:
    board.online = False
    good = board.deploy(make_bundle(tmp_path / "2", version="2"))
    board.run(1000)
    assert (board.phase, board.active) == ("trial", live)
    assert board.updater.state.attempts == 0  # a power cut meanwhile blames nobody
    board.online = True
    board.run(1)
    assert (board.phase, board.active) == ("live", good)


def test_a_trial_waits_for_its_maintenance_window(
    board: TrialBoard, live: str, tmp_path: Path
) -> None:
    policy = InstallPolicy(not_before="22:00", not_after="05:00")
    good = board.deploy(make_bundle(tmp_path / "2", version="2"), policy=policy)
    board.run(30)
    assert (board.phase, board.active) == ("postponed", live)
    assert "it waits for its maintenance window, 22:00 to 05:00" in board.updater.update.reason
    board.hour = 23
    board.run(7)
    assert (board.phase, board.active) == ("live", good)


def test_a_policy_is_kept_for_a_trial_that_goes_on_after_a_restart(
    board: TrialBoard, live: str, tmp_path: Path
) -> None:
    policy = InstallPolicy(confirm_after_s=100.0)
    board.deploy(make_bundle(tmp_path / "2", version="2"), policy=policy)
    board.run(10)
    board.updater.shut_down()
    board.updater.boot()
    board.run(20)
    assert (board.phase, board.active) == ("trial", live)
    board.run(90)
    assert board.phase == "live"


def test_a_floor_keeps_older_versions_out_after_it_was_live(
    board: TrialBoard, live: str, tmp_path: Path
) -> None:
    newer = board.deploy(make_bundle(tmp_path / "3", version="3"), floor="2")
    board.run(6)
    assert board.active == newer
    board.deploy(make_bundle(tmp_path / "1b", version="1"), request="back")
    assert board.phase == "refused"
    assert "good 1 is older than 2, the version floor" in board.updater.update.reason
    between = board.deploy(make_bundle(tmp_path / "2", version="2"), request="back to 2")
    board.run(6)
    assert board.active == between  # down to the floor is the operator's to decide


def test_what_was_brought_to_a_board_without_a_broker_waits_for_none() -> None:
    brought = Trial(
        frame_s=0.0,
        frames=5,
        healthy_s=0.0,
        was_online=False,
        offline_s=0.0,
        sideloaded=True,
        signs=Liveness(2.0, 2.0),
    )
    limits = trial_limits(UpdateTable(confirm_after_s=1.0))
    assert judge(brought, limits, 2.0).word == "confirm"
    # One that cuts off a board which had a broker gives way all the same.
    cut_off = replace(brought, was_online=True)
    assert judge(cut_off, limits, 2.0).word == "wait"
    assert judge(cut_off, limits, 1e4).word == "postpone"
