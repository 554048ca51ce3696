"""A version of the agent that is on trial confirms itself; one that runs makes way for the next."""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from device.agent.launch import ENVIRONMENT
from device.files import remove
from device.update import agent_versions as av

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
        trial = self.versions
        if not self.running or now_s < self._retry_s:
            return
        if trial.current == self.running and trial.failed_starts:
            self._note_running(now_s)
        if trial.trial != self.running:
            return
        if not av.is_shown(trial, mqtt=mqtt, pipeline=pipeline):
            return
        try:
            self._write(av.confirm(trial))
        except OSError as error:
            LOG.error("version %s of the agent works, and is not kept: %s", trial.trial, error)
            self._retry_s = now_s + RETRY_S
            return
        LOG.info("version %s of the agent works and stays", self.running)
        folder = self._state_dir / av.FOLDER
        self._remove(av.obsolete(self.versions, os.listdir(folder)))

    def _note_running(self, now_s: float) -> None:
        try:
            self._write(av.ran(self.versions))
        except OSError as error:
            LOG.error("this start counts as failed until the disk takes it: %s", error)
            self._retry_s = now_s + RETRY_S

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
        """Note that a version cannot be tried for this request. Raises OSError."""
        self._write(av.refuse(self.versions, name, request, reason))

    def remove_failed(self) -> None:
        """Remove the environment that was given up: a disk would fill with them."""
        versions = self.versions
        if versions.failed and versions.failed not in (versions.current, versions.previous):
            self._remove((versions.failed,))

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._state_dir / av.FOLDER / name
            try:
                remove(path)
            except OSError as error:
                LOG.warning("cannot remove %s: %s", path, error)

    def _write(self, versions: av.AgentVersions) -> None:
        av.write_versions(self._state_dir, versions)
        self.versions = versions
