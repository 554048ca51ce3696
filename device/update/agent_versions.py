"""Which version of the agent runs on a board: the installed one, or an environment beside it.

`versions.json` is replaced as a whole, so that a power cut leaves the old or the new one. The
launcher of the installed agent counts the start of a trial before it begins: a version that is
started again without having confirmed itself is given up. Later versions may add fields, and read
those of earlier ones.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from device.files import make_folder, read_regular, replace_file

LOG = logging.getLogger("tandem.agent")
FOLDER, FILE = "agent", "versions.json"  # in the state folder
INSTALLED = ""  # name of the version that the unit starts, which no update changes
TRIAL_S = 600.0
MAX_FAILED_STARTS = 3  # of a version that was kept; then the one before runs
MAX_BYTES = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.+-]{0,99}\Z")


class AgentVersions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names of environments below `agent/`; INSTALLED for the installed version.

    `trial` is being tried, if it is not empty, and was started `starts` times. It has `limit_s` to
    show what worked before: MQTT, and the pipeline. `failed`, `reason`: the last one given up;
    `refused`: without a trial. `request`: of the fleet, for which one was tried or refused last.
    `failed_starts`: of `current`, since it last ran. `staged`: starts, and waits for its trial.
    """

    current: str = INSTALLED
    previous: str = INSTALLED
    trial: str = ""
    starts: int = 0
    needs_mqtt: bool = False
    needs_pipeline: bool = False
    limit_s: float = TRIAL_S
    failed: str = ""
    reason: str = ""
    refused: bool = False
    request: str = ""
    failed_starts: int = 0
    staged: str = ""


@dataclass(frozen=True, slots=True)
class TrialTerms:
    """What a trial has to show: what works now. `request`: of the fleet, empty for none."""

    mqtt: bool
    pipeline: bool
    limit_s: float = TRIAL_S
    request: str = ""


def environment_name(version: str, sha256: str) -> str:
    """Return the name of the environment of a release."""
    return f"{version}-{sha256[:12]}"


def begin_trial(versions: AgentVersions, name: str, terms: TrialTerms) -> AgentVersions:
    """Let a version be tried at the next start; one that is current and does not run is left."""
    if versions.current == name:
        versions = go_back(versions)
    return replace(
        versions, trial=name, starts=0, needs_mqtt=terms.mqtt, needs_pipeline=terms.pipeline,
        limit_s=terms.limit_s, request=terms.request, refused=False, staged="",
    )  # fmt: skip


def refuse(versions: AgentVersions, name: str, request: str, reason: str) -> AgentVersions:
    """Note that a version cannot be tried for this request."""
    return replace(versions, failed=name, reason=reason, refused=True, request=request)


def go_back(versions: AgentVersions) -> AgentVersions:
    """Leave the current version for the one before it, which has shown that it works."""
    return replace(versions, current=versions.previous, previous=INSTALLED, failed_starts=0)


def at_start(versions: AgentVersions, usable: Callable[[str], bool]) -> tuple[AgentVersions, str]:
    """Return the versions as they must be on the disk before the start, and which one to start."""
    if versions.trial and versions.starts == 0 and usable(versions.trial):
        return replace(versions, starts=1), versions.trial
    started, name = _start_kept(versions, usable)
    if versions.trial and versions.starts:
        reason = f"it ended, or did not bring back what ran before within {versions.limit_s:g} s"
        started = give_up(started, reason)
    elif versions.trial:
        started = give_up(started, "its environment is not whole")
    return started, name


def _start_kept(
    versions: AgentVersions, usable: Callable[[str], bool]
) -> tuple[AgentVersions, str]:
    """Count a start of the current version as failed until it runs; too many take it back, and so
    does an environment that is gone. The first that is given up is the one that is told."""
    first = versions.current
    while (name := versions.current) != INSTALLED:
        if not usable(name):
            reason = "its environment is gone, or the Python that it was made for"
        elif versions.failed_starts < MAX_FAILED_STARTS:
            return replace(versions, failed_starts=versions.failed_starts + 1), name
        else:
            reason = f"it was kept, and then ended {MAX_FAILED_STARTS} times before it ran"
        versions = go_back(versions)
        if name == first:
            versions = replace(versions, failed=name, reason=reason, refused=False)
    return versions, INSTALLED


def excuse_start(versions: AgentVersions) -> AgentVersions:
    """Take back the count of a start that ended by what is no fault of the current version."""
    return replace(versions, failed_starts=max(0, versions.failed_starts - 1))


def give_up(versions: AgentVersions, reason: str) -> AgentVersions:
    """End a trial; what ran before is started from now on."""
    return replace(versions, trial="", starts=0, failed=versions.trial, reason=reason)


def while_running(
    versions: AgentVersions, running: str, *, mqtt: bool, pipeline: bool
) -> AgentVersions:
    """Return the versions while one runs: its failed starts count no more, and one on trial is kept
    once it has brought back what worked before. `mqtt`, `pipeline`: what works now."""
    if running == INSTALLED:
        return versions
    works = (mqtt or not versions.needs_mqtt) and (pipeline or not versions.needs_pipeline)
    if running == versions.trial and works:
        return confirm(versions)
    return replace(versions, failed_starts=0) if running == versions.current else versions


def confirm(versions: AgentVersions) -> AgentVersions:
    """Keep the version on trial; the one before it stays as the previous one."""
    return AgentVersions(
        current=versions.trial, previous=versions.current, request=versions.request
    )


def obsolete(versions: AgentVersions, names: Iterable[str]) -> tuple[str, ...]:
    """Return the environments that nothing goes back to, an interrupted one among them."""
    needed = (versions.current, versions.previous, versions.trial)
    return tuple(name for name in names if name not in needed and name != FILE)


def read_versions(state_dir: Path) -> AgentVersions:
    """Return what the file says; where there is none, or no whole one, the installed agent runs."""
    try:
        data = read_regular(state_dir / FOLDER / FILE, MAX_BYTES)
        return msgspec.json.decode(data, type=AgentVersions)
    except FileNotFoundError:
        return AgentVersions()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        LOG.error("%s of the agent cannot be read, the installed one runs: %s", FILE, error)
        return AgentVersions()


def write_versions(state_dir: Path, versions: AgentVersions) -> None:
    """Replace the file. Raises OSError."""
    folder = state_dir / FOLDER
    make_folder(folder, 0o700)
    replace_file(folder / FILE, msgspec.json.encode(versions), 0o600)


def python_of(state_dir: Path, name: str) -> Path:
    """Return the interpreter of an environment."""
    return state_dir / FOLDER / name / "bin" / "python"


def is_usable(state_dir: Path, name: str) -> bool:
    """Whether an environment of this name is there, and the Python that it was made for."""
    return bool(_NAME.match(name)) and os.access(python_of(state_dir, name), os.X_OK)
