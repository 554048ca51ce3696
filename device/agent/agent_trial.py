"""A version of the agent that is on trial confirms itself; one that runs makes way for the next."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from device.agent.launch import ENVIRONMENT
from device.files import remove
from device.update import agent_versions as av

LOG = logging.getLogger("tandem.agent")
RETRY_S = 1.0  # between two tries to write to a disk that took nothing


class AgentTrial:
    """The version that this process runs."""

    def __init__(self, state_dir: Path, environment: Mapping[str, str] = os.environ) -> None:
        self._state_dir = state_dir
        name = environment.get(ENVIRONMENT, av.INSTALLED)
        versions = av.read_versions(state_dir)
        self._trial = versions if name != av.INSTALLED and versions.trial == name else None
        self._retry_s = 0.0

    def advance(self, now_s: float, *, mqtt: bool, pipeline: bool) -> None:
        """Confirm this version once what worked before works again. `now_s`: monotonic."""
        trial = self._trial
        if trial is None or now_s < self._retry_s:
            return
        if not av.is_shown(trial, mqtt=mqtt, pipeline=pipeline):
            return
        versions = av.confirm(trial)
        try:
            av.write_versions(self._state_dir, versions)
        except OSError as error:
            LOG.error("version %s of the agent works, and is not kept: %s", trial.trial, error)
            self._retry_s = now_s + RETRY_S
            return
        self._trial = None
        LOG.info("version %s of the agent works and stays", versions.current)
        folder = self._state_dir / av.FOLDER
        for name in av.obsolete(versions, os.listdir(folder)):
            try:
                remove(folder / name)
            except OSError as error:
                LOG.warning("cannot remove %s: %s", folder / name, error)

    def begin(self, name: str, limit_s: float, *, mqtt: bool, pipeline: bool) -> str:
        """Note that a version is to be tried at the next start; return why it is not."""
        versions = av.read_versions(self._state_dir)
        if versions.trial:
            return f"version {versions.trial} of the agent is on trial: wait for its end"
        if not av.is_usable(self._state_dir, name):
            return f"there is no whole environment {name} in {self._state_dir / av.FOLDER}"
        try:
            av.write_versions(
                self._state_dir,
                av.begin_trial(versions, name, mqtt=mqtt, pipeline=pipeline, limit_s=limit_s),
            )
        except OSError as error:
            return f"the trial cannot be noted: {error}"
        LOG.info("version %s of the agent is tried: this one ends", name)
        return ""
