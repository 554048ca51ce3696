"""What an operator may have a device do: a table of operations, each with its arguments.

An operation says at once how it ended, or starts a child whose output is the result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from device.protocol.documents import BlobSpec, Sha256
from device.start.command import module_command

MAX_RESULT_BYTES = 768 * 1024  # of a message that every broker takes
MAX_LOG_BYTES = 256 * 1024
SNAPSHOT_S = 20.0
REPORT_S = 120.0
MAX_KIT_BYTES = 256 * 1024**2
START_S = 60.0  # of the child of a job, beside its minutes

Names = Annotated[str, Meta(min_length=1, max_length=4000, pattern=r"^[A-Za-z0-9_.,-]+\Z")]


@dataclass(frozen=True, slots=True)
class Done:
    """The operation was done, with this result."""

    result: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Denied:
    """It was not done, and why. `refused`: because of the board, not of what was asked."""

    reason: str
    refused: bool = True


@dataclass(frozen=True, slots=True)
class Child:
    """A command prints the result as one JSON object, within a time."""

    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Reboot:
    """The board is to reboot; the next agent tells how that ended."""


@dataclass(frozen=True, slots=True)
class Job:
    """A child works through a kit that is fetched first; `command` is without the kit's path."""

    kit: BlobSpec
    command: tuple[str, ...]
    limit_s: float


Outcome = Done | Denied | Child | Reboot | Job


@dataclass(frozen=True, slots=True)
class Board:
    """What operations do on a board. Functions that return text say why it was not done, "" if it
    was.

    `log`: lines of a source, so many, of so many bytes; `follow`: send lines for so many seconds.
    `report`: what the agent knows. `no_job`: why it does no job of a farm now. `tap`:
    the socket on which the pipeline gives frames.
    """

    restart: Callable[[], str]
    set_pipeline: Callable[[str], str]
    log: Callable[[int, str, int], list[dict[str, str]]]
    follow: Callable[[float], None]
    report: Callable[[], Mapping[str, Any]]
    no_job: Callable[[], str]
    tap: str
    state_dir: str


class _Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the arguments: unknown ones are refused."""


class NoArguments(_Arguments, frozen=True, kw_only=True):
    """An operation without arguments."""


class PipelineArguments(_Arguments, frozen=True, kw_only=True):
    """`state`: what the pipeline shall be until the agent starts again or a release is tried."""

    state: Literal["running", "stopped"]


class SnapshotArguments(_Arguments, frozen=True, kw_only=True):
    """`camera`: the id of one of several; `width`: of the picture at most, in pixels."""

    camera: str = ""
    width: Annotated[int, Meta(ge=16, le=3840)] = 1280
    quality: Annotated[int, Meta(ge=1, le=100)] = 80


class LogArguments(_Arguments, frozen=True, kw_only=True):
    """The last `lines` of a `source`."""

    lines: Annotated[int, Meta(ge=1, le=2000)] = 200
    source: Literal["all", "agent", "pipeline"] = "all"


class FollowArguments(_Arguments, frozen=True, kw_only=True):
    """`seconds`: so long lines are published; 0: no more."""

    seconds: Annotated[float, Meta(ge=0.0, le=86400.0)] = 600.0


class JobArguments(_Arguments, frozen=True, kw_only=True):
    """A job of a farm: these items of a kit by these steps of a selftest, within `minutes`.

    `kit`, `bytes`, `chunk_bytes`, `index`, `chunk_format`: the kit as a blob (`BlobSpec`).
    """

    kit: Sha256
    bytes: Annotated[int, Meta(ge=1, le=MAX_KIT_BYTES)]
    chunk_bytes: Annotated[int, Meta(ge=4096, le=256 * 1024)]
    index: Sha256
    chunk_format: Annotated[int, Meta(ge=1, le=2)]
    steps: Names
    items: Names
    minutes: Annotated[float, Meta(ge=0.1, le=60.0)]


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of the table."""

    name: str
    arguments: type[msgspec.Struct]
    run: Callable[[Board, Any], Outcome]


def _restart(board: Board, _: NoArguments) -> Outcome:
    problem = board.restart()
    return Denied(problem) if problem else Done()


def _pipeline(board: Board, arguments: PipelineArguments) -> Outcome:
    problem = board.set_pipeline(arguments.state)
    return Denied(problem) if problem else Done()


def _snapshot(board: Board, arguments: SnapshotArguments) -> Outcome:
    words = (
        "--tap", board.tap, f"--camera={arguments.camera}", "--width", str(arguments.width),
        "--quality", str(arguments.quality), "--timeout", f"{SNAPSHOT_S / 2:g}",
        "--max-bytes", str(MAX_RESULT_BYTES * 3 // 4 - 4096),
    )  # fmt: skip
    return Child(module_command("pipelines.shadow.snapshot", *words), SNAPSHOT_S)


def _log(board: Board, arguments: LogArguments) -> Outcome:
    return Done({"lines": board.log(arguments.lines, arguments.source, MAX_LOG_BYTES)})


def _logs(board: Board, arguments: FollowArguments) -> Outcome:
    board.follow(arguments.seconds)
    return Done({"seconds": arguments.seconds})


def _report(board: Board, _: NoArguments) -> Outcome:
    words = ("--disk", board.state_dir, "--more", msgspec.json.encode(board.report()).decode())
    return Child(module_command("device.selftest.facts", *words), REPORT_S)


def _job(board: Board, arguments: JobArguments) -> Outcome:
    if problem := board.no_job():
        return Denied(problem)
    blob = BlobSpec(
        sha256=arguments.kit, bytes=arguments.bytes, chunk_bytes=arguments.chunk_bytes,
        index_sha256=arguments.index, chunk_format=arguments.chunk_format,
    )  # fmt: skip
    words = (
        "--sha256", arguments.kit, "--steps", arguments.steps, "--items", arguments.items,
        "--minutes", f"{arguments.minutes:g}", "--max-bytes", str(MAX_RESULT_BYTES - 4096),
    )  # fmt: skip
    limit_s = 60.0 * arguments.minutes + START_S
    return Job(blob, module_command("device.selftest.job", *words), limit_s)


OPERATIONS: tuple[Operation, ...] = (
    Operation("restart", NoArguments, _restart),
    Operation("pipeline", PipelineArguments, _pipeline),
    Operation("snapshot", SnapshotArguments, _snapshot),
    Operation("log", LogArguments, _log),
    Operation("logs", FollowArguments, _logs),
    Operation("report", NoArguments, _report),
    Operation("job", JobArguments, _job),
    Operation("reboot", NoArguments, lambda _board, _arguments: Reboot()),
)


def run_operation(
    name: str, arguments: Mapping[str, Any], board: Board, allowed: tuple[str, ...]
) -> Outcome:
    """Run an operation, or say why not."""
    row = next((row for row in OPERATIONS if row.name == name), None)
    if row is None:
        names = ", ".join(row.name for row in OPERATIONS)
        return Denied(f"this agent has no operation {name!r}: use one of {names}")
    if name not in allowed:
        return Denied(
            f"the operation {name!r} is not allowed on this board: name it in `allow` of "
            "[commands] in agent.toml"
        )
    try:
        values = msgspec.convert(dict(arguments), row.arguments, strict=False)
    except msgspec.ValidationError as error:
        return Denied(f"the arguments of {name} are not understood: {error}", refused=False)
    return row.run(board, values)
