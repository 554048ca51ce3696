"""What a chaos run sees at one time, and what must hold of it: a check for each invariant."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from device.protocol.documents import Reported
from scripts import chaos_parts as parts
from scripts.chaos_schedule import AGENT_BYTES, PIPELINE_BYTES, STATE_BYTES


@dataclass(frozen=True, slots=True)
class Observation:
    """What is seen at one time: the process table, the newest report, the agent's state."""

    processes: Mapping[int, parts.Process]
    agent_pid: int
    report: Reported | None
    online: bool
    camera_up: bool
    state_bytes: int
    slots: int

    @property
    def pipelines(self) -> list[parts.Process]:
        """The processes that run a release."""
        return [row for row in self.processes.values() if row.is_pipeline]


def runs_or_says_why(sight: Observation) -> str:
    """A good release runs, or the report says why not."""
    report = sight.report
    if sight.pipelines or report is None or report.running is None:
        return ""
    if report.pipeline.status == "starting" or report.pipeline.reason:
        return ""
    return f"no pipeline runs, and the report says only {report.pipeline}"


def report_is_true(sight: Observation) -> str:
    """The report names the release that runs, and whether one runs."""
    report = sight.report
    if report is None or not sight.online:
        return ""
    if report.pipeline.status == "stalled":  # it is killed, or waits for its next start
        return ""
    expected = report.pipeline.status in ("starting", "running", "degraded")
    if expected != bool(sight.pipelines):
        return f"reported {report.pipeline}, running {[row.pid for row in sight.pipelines]}"
    names = {row.release for row in sight.pipelines}
    in_trial = report.update.phase == "trial"
    if names and not in_trial and (report.running is None or names != {report.running.name}):
        return f"reported {report.running}, running {names}"
    return ""


def agent_is_online(sight: Observation) -> str:
    """The agent is at the broker."""
    return "" if sight.online and sight.report is not None else "the agent is not at the broker"


def no_orphans(sight: Observation, kind: Callable[[parts.Process], bool]) -> str:
    """Nothing of a kind lives without the agent above it."""
    lost = [
        row
        for row in sight.processes.values()
        if kind(row) and sight.agent_pid not in _above(row, sight.processes)
    ]
    return f"orphans: {[(row.pid, row.command[:6]) for row in lost]}" if lost else ""


def _above(row: parts.Process, rows: Mapping[int, parts.Process]) -> Iterator[int]:
    while row.parent in rows:
        yield row.parent
        row = rows[row.parent]


def one_pipeline(sight: Observation) -> str:
    """No two pipelines run."""
    running = sight.pipelines
    return f"{len(running)} pipelines run: {running}" if len(running) > 1 else ""


def memory_is_flat(sight: Observation) -> str:
    """The agent and the pipeline stay below their bounds."""
    for row in sight.processes.values():
        limit = AGENT_BYTES if row.pid == sight.agent_pid else PIPELINE_BYTES
        if (row.pid == sight.agent_pid or row.is_pipeline) and row.resident_bytes > limit:
            return f"{row.pid} has {row.resident_bytes >> 20} MiB, the bound is {limit >> 20}"
    return ""


def disk_is_bounded(sight: Observation) -> str:
    """The state folder holds two slots and a download at most."""
    return f"the state has {sight.state_bytes} bytes" if sight.state_bytes > STATE_BYTES else ""


def slots_are_never_lost(sight: Observation) -> str:
    """A slot folder is there for what the report says is live."""
    lost = sight.report is not None and sight.report.running is not None and not sight.slots
    return "the report names a release, but no slot is there" if lost else ""


def camera_away_is_said(sight: Observation) -> str:
    """The report calls no pipeline running whose camera is away."""
    report = sight.report
    if sight.camera_up or not sight.online or report is None:
        return ""
    is_reported = report.pipeline.status != "running"
    return "" if is_reported else f"the camera is away, reported {report.pipeline}"


def hung_pipeline_is_killed(sight: Observation) -> str:
    """No pipeline stays frozen while the agent runs. One that loads has start_s, which is long."""
    agent, report = sight.processes.get(sight.agent_pid), sight.report
    if agent is None or agent.is_frozen or report is None or report.pipeline.status == "starting":
        return ""
    frozen = [row.pid for row in sight.pipelines if row.is_frozen]
    return f"frozen and not killed: {frozen}" if frozen else ""


CHECKS: Mapping[str, Callable[[Observation], str]] = {
    "runs-or-says-why": runs_or_says_why,
    "report-is-true": report_is_true,
    "agent-is-online": agent_is_online,
    "no-orphaned-pipeline": lambda sight: no_orphans(sight, lambda row: row.is_pipeline),
    "no-orphaned-camera-reader": lambda sight: no_orphans(sight, lambda row: row.is_camera_reader),
    "one-pipeline": one_pipeline,
    "memory-is-flat": memory_is_flat,
    "disk-is-bounded": disk_is_bounded,
    "slots-are-never-lost": slots_are_never_lost,
    "camera-away-is-said": camera_away_is_said,
    "hung-pipeline-is-killed": hung_pipeline_is_killed,
}
