"""A release of the agent that the fleet asks for: fetched, made an environment by a child, tried.

What becomes of it is decided by `device.update.agent_decisions`; `agent_trial` keeps the versions.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device.agent.agent_trial import AgentTrial
from device.agent.config import AgentConfig
from device.agent.downloads import Download, download_problem, fetch_options
from device.agent.task_process import TaskEnded, start_task
from device.errors import TandemError
from device.files import make_folder, remove
from device.protocol.documents import AgentReport, BlobGet, Desired, Phase, Update
from device.start.command import module_command
from device.trust.exchange import TRUSTED, Trusted, Verdict
from device.update.admission import waits_for_window
from device.update.agent_decisions import AgentDecision
from device.update.agent_payload import PROFILE
from device.update.agent_versions import TrialTerms, environment_name
from device.update.decisions import update_of
from device.update.events import IDLE
from device.update.sources.reader import SourceEvent

LOG = logging.getLogger("tandem.agent")
DOWNLOAD = "agent-download"  # in the state folder
INSTALL_S = 1800.0  # a child that unpacks wheels for longer is ended
MAX_RESULT_BYTES = 64 * 1024
_INSTALL = "device.agent.version_install"


def is_agent_release(desired: Desired | None) -> bool:
    """Whether a desired document is about the agent itself."""
    return desired is not None and desired.release.profile == PROFILE


def _environment(desired: Desired) -> str:
    return environment_name(desired.release.version, desired.release.blob.sha256)


@dataclass(frozen=True, slots=True)
class VersionInstalled:
    """The child of a run has made the environment of a bundle, or has a `problem`."""

    run: int
    sha256: str
    problem: str


class AgentUpdate:
    """No release of the agent that is asked for, or one and how far it is."""

    def __init__(
        self,
        config: AgentConfig,
        trial: AgentTrial,
        put: Callable[[VersionInstalled | SourceEvent], None],
        local_time: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        """`put` takes events, from other threads; `local_time`: of the device."""
        self._config = config
        self._trial = trial
        self._put = put
        self._local_time = local_time
        self._folder = Path(config.state_dir) / DOWNLOAD
        self._download = Download(self._folder, config.update.window_chunks, put)
        self._desired: Desired | None = None
        self._verdict: Verdict = TRUSTED
        self._versions = trial.versions  # of the last decision
        self._decision = AgentDecision("verifying")
        self._update = IDLE
        self._run = 0
        self._end_child: Callable[[], None] | None = None

    @property
    def update(self) -> Update | None:
        """The report on the desired release, None: it is none of the agent."""
        return None if self._desired is None else self._update

    @property
    def report(self) -> AgentReport:
        """The versions on this board."""
        versions = self._trial.versions
        return AgentReport(
            running=self._trial.running, previous=versions.previous, trial=versions.trial,
            failed=versions.failed, reason=versions.reason,
        )  # fmt: skip

    def due_s(self, *, online: bool) -> float | None:
        """When `next_request` is due without an event."""
        return self._download.wake_at_s if online else self._download.wake_offline_at_s

    def on_desired(self, desired: Desired | None, verdict: Verdict) -> None:
        """Take the desired release, None: it is none of the agent, and what its signatures say."""
        before, self._desired, self._verdict = self._desired, desired, verdict
        if before is None or desired is None or (before.request, before.release) != (
            desired.request, desired.release
        ):  # fmt: skip
            self.stop()
        if isinstance(verdict, Trusted):
            self._discard_superseded()
        if desired is not None:
            self._decide(desired)

    @property
    def _bundle(self) -> str:
        """Return the beginning of the SHA-256 of the bundle to install; "" for none."""
        desired = self._desired
        return "" if desired is None or desired.leave else desired.release.blob.sha256[:12]

    def _discard_superseded(self) -> None:
        """Remove what another bundle than the desired one has left on the disk without a trial."""
        parts = os.listdir(self._folder) if self._folder.exists() else [""]
        part = "".join(parts[:1]).lstrip(".")[:12]  # all are of one download
        staged = self._trial.versions.staged.rpartition("-")[2]
        for unused in {part, staged} - {"", self._bundle}:
            self._trial.discard(unused)
        if part not in ("", self._bundle):
            self._remove_download()

    def _remove_download(self) -> None:
        self._download.pause()
        with contextlib.suppress(OSError):  # the next download tries again
            remove(self._folder)

    def stop(self) -> None:
        """End what is under way; a download can be resumed."""
        if self._end_child is not None:
            self._end_child()
        self._run += 1
        self._end_child = None
        self._download.pause()

    def take(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part of a blob that arrived; those of other blobs are dropped."""
        self._download.take(sha256, part, payload, now_s)

    def on_source(self, event: SourceEvent, now_s: float) -> bool:
        """Take what a source gave; False: it is not of this release."""
        desired = self._desired
        if desired is None or event.sha256 != desired.release.blob.sha256:
            return False
        self._download.on_source(event, now_s)
        return True

    def on_installed(self, event: VersionInstalled) -> None:
        """Take the end of the child."""
        desired = self._desired
        if event.run == self._run and desired is not None:
            self._end_child = None
            if event.problem:
                self._refuse(desired, event.problem)
            else:
                self._trial.stage(_environment(desired))
                self._remove_download()
        elif event.sha256[:12] != self._bundle:
            self._trial.discard(event.sha256)

    def forget_requests(self) -> None:
        """Count nothing as in flight: the connection to the broker was lost."""
        self._download.forget_requests()

    def next_request(self, now_s: float, *, online: bool) -> BlobGet | None:
        """Return the request for chunks to send now."""
        return self._download.next_request(now_s, online=online)

    def advance(self, now_s: float, *, busy: bool, mqtt: bool, pipeline: bool) -> bool:
        """Go on; return whether the agent has to end now, as another version is started next.

        `busy`: a release of a pipeline is on trial. `mqtt`, `pipeline`: what works now.
        """
        desired = self._desired
        if desired is None:
            return False
        if self._trial.versions is not self._versions:
            self._decide(desired)
        word = self._decision.word
        if word in ("leave", "try"):
            return self._switch(desired, TrialTerms(mqtt, pipeline, request=desired.request), busy)
        if word == "fetch" and self._end_child is None:
            self._fetch(desired, now_s)
        return False

    def _decide(self, desired: Desired) -> None:
        """Begin or end what the decision asks for, and report it."""
        self._versions, before = self._trial.versions, self._decision
        self._decision = self._trial.decide(desired, self._verdict)
        word, reason = self._decision.word, self._decision.reason
        if word == "fetch":
            if self._end_child is not None:
                self._tell(desired, "staging")
            elif not self._download.running:
                self._begin(desired)
            return
        if word != "verifying":
            self.stop()
        elif self._end_child is None:  # else the child goes on with a bundle that was verified
            self._download.pause()
        if word == "try":
            self._remove_download()
        elif word != "leave":
            self._tell(desired, word, reason)
        if word in ("rolled_back", "refused") and self._decision != before:
            LOG.error("%s %s is %s: %s", desired.release.name, desired.release.version,
                word.replace("_", " "), reason)  # fmt: skip
            self._trial.remove_failed()

    def _tell(self, desired: Desired, phase: Phase, reason: str = "") -> None:
        received = self._download.received_bytes
        if phase not in ("downloading", "verifying"):
            received = desired.release.blob.bytes
        self._update = update_of(desired, phase, received, reason)

    def _begin(self, desired: Desired) -> None:
        with self._download.failing():
            make_folder(self._folder, 0o700)
            options = fetch_options(desired, self._config.update, {})
            self._download.begin(desired.release.blob, options)
        self._tell(desired, "downloading")

    def _fetch(self, desired: Desired, now_s: float) -> None:
        problem = self._download.advance(now_s)
        if problem:
            self._refuse(desired, problem)
        elif self._download.complete:
            self._install(desired)
        else:
            self._tell(desired, "downloading", self._download.complaint)

    def _install(self, desired: Desired) -> None:
        """Let a child make the environment: unpacking takes long, and is no work of the agent."""
        release, run = desired.release, self._run

        def put(ended: TaskEnded) -> None:
            result = ended.result or {"problem": ended.problem}
            problem = str(result.get("problem", ""))
            self._put(VersionInstalled(run, release.blob.sha256, problem))

        try:
            bundle = self._download.finish()
        except (TandemError, OSError) as error:
            self._refuse(desired, download_problem(error))
            return
        takes = "any" if self._config.dev else "signed"
        words = (self._config.state_dir, str(bundle), release.blob.sha256, release.version, takes)
        self._end_child = start_task(
            "agent", module_command(_INSTALL, *words), put, limit_s=INSTALL_S,
            max_bytes=MAX_RESULT_BYTES,
        )  # fmt: skip
        self._tell(desired, "staging")

    def _refuse(self, desired: Desired, reason: str) -> None:
        """Refuse the release for this request, whatever happens."""
        self._remove_download()
        self._trial.refuse(_environment(desired), desired.request, reason)
        self._decide(desired)

    def _switch(self, desired: Desired, terms: TrialTerms, busy: bool) -> bool:
        """Make way for the version, or for the one before; False: not now, as the report says."""
        now = self._local_time()
        problem = "a release is on trial: the agent waits for its end" if busy else (
            waits_for_window(desired.policy, now.tm_hour, now.tm_min)
        )  # fmt: skip
        if not problem:
            leaves, name = self._decision.word == "leave", _environment(desired)
            problem = self._trial.go_back() if leaves else self._trial.begin(name, terms)
        self._tell(desired, "postponed" if problem else "trial", problem or "")
        return not problem
