"""What becomes of a release of the agent that a fleet asks for, as a pure function.

It stands beside `device.update.decisions`; the transitions of the versions are in
`device.update.agent_versions`. A trial has no stages in one process as `device.update.machine` has
them: the launcher begins and ends it, the new version confirms itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from device.protocol.documents import READABLE_FORMATS, Desired
from device.trust.exchange import Refused, Unverified, Verdict
from device.update.agent_payload import version_problem
from device.update.agent_versions import AgentVersions, environment_name
from device.update.chunk_table import CHUNK_FORMATS


@dataclass(frozen=True, slots=True)
class AgentDecision:
    """`word`: what the report says of the release; or that it is fetched, tried as it is installed
    beside the version that runs, or left for the version before it."""

    word: Literal["live", "trial", "rolled_back", "refused", "verifying", "postponed", "fetch",
        "try", "leave"]  # fmt: skip
    reason: str = ""


def decide_agent(
    desired: Desired,
    verdict: Verdict,
    versions: AgentVersions,
    running: str,
    usable: Callable[[str], bool],
) -> AgentDecision:
    """Compare a desired release with the versions on the board.

    `running`: of this process; `usable`: whether an environment is whole.
    """
    name = environment_name(desired.release.version, desired.release.blob.sha256)
    decision = _standing(desired, versions, name, running) or _obstacle(desired, verdict)
    if decision is not None:
        return decision
    if desired.leave:
        return AgentDecision("leave")
    if failed := _failed(desired, versions, name):
        return failed
    return AgentDecision("try" if versions.staged == name and usable(name) else "fetch")


def _standing(
    desired: Desired, versions: AgentVersions, name: str, running: str
) -> AgentDecision | None:
    """Return what is said while nothing is to be done: a trial, or what is asked for is so."""
    if versions.trial == name:
        return AgentDecision("trial")
    if versions.trial:
        return AgentDecision("postponed", f"version {versions.trial} of the agent is on trial")
    is_current, runs = versions.current == name, running == name
    if desired.leave == is_current or (is_current and desired.retry and not runs):
        return None
    if desired.leave and runs:
        return AgentDecision("trial", "the agent starts again, as the version before")
    if desired.leave or runs:
        return AgentDecision("live")
    version = running or "installed"
    return AgentDecision("rolled_back", f"it does not start on this board; version {version} runs")


def _obstacle(desired: Desired, verdict: Verdict) -> AgentDecision | None:
    """Return why the document is not followed, None if it is."""
    if isinstance(verdict, Refused):
        return AgentDecision("refused", verdict.reason)
    if isinstance(verdict, Unverified):
        return AgentDecision("verifying", verdict.reason)
    if problem := version_problem(desired.release.version):
        return AgentDecision("refused", problem)
    chunk_format = desired.release.blob.chunk_format
    if desired.format in READABLE_FORMATS and chunk_format in CHUNK_FORMATS:
        return None
    return AgentDecision(
        "refused",
        f"the document has format {desired.format} and chunks of format {chunk_format}, this agent "
        f"reads {READABLE_FORMATS[-1]} and {CHUNK_FORMATS[-1]} at most: take a version in between "
        "first",
    )


def _failed(desired: Desired, versions: AgentVersions, name: str) -> AgentDecision | None:
    """Return the failure that keeps a version from being tried, None if nothing does."""
    if versions.failed != name:
        return None
    if versions.request == desired.request:
        return AgentDecision("refused" if versions.refused else "rolled_back", versions.reason)
    if versions.refused or desired.retry:
        return None
    return AgentDecision(
        "rolled_back",
        f"this version was given up before: {versions.reason}; `tandem fleet rollout start "
        "--retry` tries it again",
    )
