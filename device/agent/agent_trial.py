"""A version of the agent that is on trial confirms itself; one that runs makes way for the next."""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from device.agent.launch import ENVIRONMENT
from device.files import remove
from device.protocol.documents import Desired
from device.trust.exchange import Verdict
from device.update import agent_versions as av
from device.update.agent_decisions import AgentDecision, decide_agent

LOG = logging.getLogger("tandem.agent")
RETRY_S = 1.0  # between two tries to write to a disk that took nothing


class AgentTrial:
    """The versions of the agent on this board, and `running`, that of this process."""

    def __init__(self, state_dir: Path, environment: Mapping[str, str] = os.environ) -> None:
        self._state_dir = state_dir
        self.running = environment.get(ENVIRONMENT, av.INSTALLED)
        self.versions = av.read_versions(state_dir)
        self._retry_s = 0.0

    def advance(self, now_s: float, *, mqtt: bool, pipeline: bool) -> None:
        """Note that this version runs, and confirm it once what worked before works again. `now_s`:
        monotonic."""
        before = self.versions
        after = av.while_running(before, self.running, mqtt=mqtt, pipeline=pipeline)
        if after == before or now_s < self._retry_s:
            return
        try:
            self._write(after)
        except OSError as error:
            LOG.error("version %s of the agent works, which is not noted: %s", self.running, error)
            self._retry_s = now_s + RETRY_S
            return
        if after.trial != before.trial:
            LOG.info("version %s of the agent works and stays", self.running)
            self._remove(lambda _name: True)

    def begin(self, name: str, terms: av.TrialTerms) -> str:
        """Note that a version is to be tried at the next start; return why it is not."""
        if self.versions.trial:
            return f"version {self.versions.trial} of the agent is on trial: wait for its end"
        if not av.is_usable(self._state_dir, name):
            return f"there is no whole environment {name} in {self._state_dir / av.FOLDER}"
        try:
            self._write(av.begin_trial(self.versions, name, terms))
        except OSError as error:
            return f"the trial cannot be noted: {error}"
        LOG.info("version %s of the agent is tried: this one ends", name)
        return ""

    def go_back(self) -> str:
        """Note that the version before is started next; return why it is not."""
        try:
            self._write(av.go_back(self.versions))
        except OSError as error:
            return f"the way back cannot be noted: {error}"
        LOG.info("version %s of the agent is left: this one ends", self.running or "installed")
        return ""

    def refuse(self, name: str, request: str, reason: str) -> None:
        """Note that a version cannot be tried for this request."""
        self._note(av.refuse(self.versions, name, request, reason))

    def stage(self, name: str) -> None:
        """Note that a version may be tried: it is not fetched again after a restart."""
        self._note(replace(self.versions, staged=name))

    def decide(self, desired: Desired, verdict: Verdict) -> AgentDecision:
        """Return what becomes of a release that is asked for."""
        usable = partial(av.is_usable, self._state_dir)
        return decide_agent(desired, verdict, self.versions, self.running, usable)

    def discard(self, sha256: str) -> None:
        """Remove the environment of a bundle that is asked for no more, an unfinished one, too."""
        end = av.environment_name("", sha256)
        self._remove(lambda name: name.removesuffix(".tmp").endswith(end))

    def remove_failed(self) -> None:
        """Remove the environment that was given up: a disk would fill with them."""
        self._remove(lambda name: name == self.versions.failed)

    def _remove(self, chosen: Callable[[str], bool]) -> None:
        """Remove the environments that are chosen, and that nothing goes back to."""
        folder = self._state_dir / av.FOLDER
        try:
            names = os.listdir(folder) if folder.exists() else []
        except OSError as error:
            LOG.warning("cannot read %s: %s", folder, error)
            return
        for name in filter(chosen, av.obsolete(self.versions, names)):
            try:
                remove(folder / name)
            except OSError as error:
                LOG.warning("cannot remove %s: %s", folder / name, error)

    def _note(self, versions: av.AgentVersions) -> None:
        """Change the versions, also where the disk takes it not, for as long as the agent runs."""
        try:
            self._write(versions)
        except OSError as error:
            LOG.error("the agent's versions are forgotten at the next start: %s", error)
            self.versions = versions

    def _write(self, versions: av.AgentVersions) -> None:
        av.write_versions(self._state_dir, versions)
        self.versions = versions
