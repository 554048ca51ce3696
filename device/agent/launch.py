"""What the installed `tandem-agent` does first: it becomes the version of the agent that is due.

It is the code of the installed version, which no update changes. While another version is on trial,
a second process of it watches the time: a trial that is not confirmed by then is killed, whatever
the new code does, and the next start goes back.
"""

import contextlib
import fcntl
import logging
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from device.errors import ConfigError, StateError
from device.files import open_regular
from device.toml_file import parse_toml, user_path
from device.update import agent_versions as av
from device.update.state_folder import LOCK

LOG = logging.getLogger("tandem.agent")
ENVIRONMENT = "TANDEM_AGENT_ENVIRONMENT"  # name of the environment that a process runs in
LOOK_S = 0.5
_RUN = "import sys; from tandem import agent; sys.exit(agent())"


def launch(config: Path, words: Sequence[str]) -> None:
    """Become the version of the agent that is due, with the same arguments.

    Returns where that is this one, or the disk takes no count. Raises StateError: the system cannot
    execute a kept version, which may pass (no memory), so that the start counts as failed.
    """
    if ENVIRONMENT in os.environ:
        return
    state_dir = _state_dir(config)
    if _is_running(state_dir):  # a second agent ends by itself, and is no start of a trial
        return
    while True:
        before = av.read_versions(state_dir)
        versions, name = _due(state_dir, before)
        if name == av.INSTALLED:
            return
        if name == versions.trial:
            _watch(os.getpid(), state_dir, versions)
        try:
            os.execve(*command_of(state_dir, name, words))
        except OSError as error:
            LOG.error("version %s of the agent cannot be executed: %s", name, error)
            if name == versions.trial or not av.is_usable(state_dir, name):
                continue  # it is given up
            if versions == before:
                return
            raise StateError(
                f"version {name} of the agent cannot be executed ({error.strerror}): start"
                f" tandem-agent again; after {av.MAX_FAILED_STARTS} such starts the version before"
                " it runs"
            ) from error


def _due(state_dir: Path, before: av.AgentVersions) -> tuple[av.AgentVersions, str]:
    """Count a start on the disk; return the versions that are there, and which one is started."""
    usable = partial(av.is_usable, state_dir)
    versions, name = av.at_start(before, usable)
    try:
        if versions != before:
            av.write_versions(state_dir, versions)
    except OSError as error:
        LOG.error("no other version is tried, and no start is counted: %s", error)
        return before, versions.current if usable(versions.current) else av.INSTALLED
    given_up = {before.trial, before.current} - {versions.trial, versions.current}
    if versions.failed in given_up:
        LOG.error("version %s of the agent is given up: %s", versions.failed, versions.reason)
    return versions, name


def excuse_start(config: Path) -> None:
    """Let the start of a kept version not count, which ended as agent.toml is wrong: the version
    before would read the same file."""
    with contextlib.suppress(ConfigError, OSError):  # then it counts
        state_dir = _state_dir(config)
        versions = av.read_versions(state_dir)
        if versions.current == os.environ.get(ENVIRONMENT) and versions.failed_starts:
            av.write_versions(state_dir, av.excuse_start(versions))


def command_of(
    state_dir: Path, name: str, words: Sequence[str]
) -> tuple[str, list[str], dict[str, str]]:
    """Return the program, arguments and environment by which a version of the agent runs."""
    python = str(av.python_of(state_dir, name))
    return python, [python, "-I", "-c", _RUN, *words], {**os.environ, ENVIRONMENT: name}


def _state_dir(config: Path) -> Path:
    """Return state_dir of agent.toml; newer versions may have keys that this one does not know."""
    try:
        tables = parse_toml(config.read_bytes())
        text = tables["state_dir"] if isinstance(tables, dict) else None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{config}: state_dir cannot be read: {error}") from error
    if not isinstance(text, str):
        raise ConfigError(f"{config}: state_dir is no path")
    return config.resolve().parent / user_path(text)


def _is_running(state_dir: Path) -> bool:
    """Whether another process holds the lock of the state folder."""
    try:
        handle = open_regular(state_dir / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False


def _watch(agent: int, state_dir: Path, trial: av.AgentVersions) -> None:
    """Let a new process kill the agent if its trial takes longer than its limit."""
    if os.fork():
        return
    try:
        end_s = time.monotonic() + trial.limit_s
        while os.getppid() == agent and av.read_versions(state_dir).trial == trial.trial:
            if time.monotonic() > end_s:
                os.kill(agent, signal.SIGKILL)
                break
            time.sleep(LOOK_S)
    finally:
        os._exit(0)
