"""A plan of several models as a pipeline: pipeline.toml, and the commands that build its engines.

Each build is told where every node goes, so that the engines are those of the plan: a build alone
would plan its model as if the board were its own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.config import load_model
from pipelines.model_config import STAGES
from toolkit.engine.plan_models import PlanRequest, PlanResult
from toolkit.errors import GuessError, PlanError
from toolkit.guess.rules import guess
from toolkit.guess.toml_text import (
    model_settings_text,
    relative_path,
    settings_text,
    string_text,
)
from toolkit.partition.planning.objectives import BUILD_GOALS
from toolkit.partition.planning.placement import Candidate
from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.workload import WorkloadModel
from toolkit.partition.prepared import Prepared

CALIBRATION = "CALIBRATION_IMAGES"  # stands for a folder that the workload does not name
PREFIX = "models."


@dataclass(frozen=True, slots=True)
class PlannedPipeline:
    """`text`: pipeline.toml; `commands`: those that build its engines, a tuple of arguments each;
    `labels`: class names by the file to be written beside it; `missing`: what the user must add."""

    text: str
    commands: tuple[tuple[str, ...], ...]
    labels: Mapping[str, Sequence[str]]
    missing: tuple[str, ...]


@dataclass(slots=True)
class _Settings:
    """How one model is fed and read, as text, and its labels."""

    text: str
    labels: str
    class_names: tuple[str, ...] = ()
    data: Path | None = None
    missing: list[str] = field(default_factory=list)


def plan_pipeline(
    rows: Sequence[WorkloadModel], request: PlanRequest, result: PlanResult, path: Path
) -> PlannedPipeline:
    """Return the pipeline of a plan, for a file at `path`; the rows are those of the workload.

    The model with the highest rate comes first: every frame is for it. Raises GuessError or
    PlanError: it is not known how a model is fed and read, or two names are alike in a pipeline.
    """
    folder = path.parent
    members = list(zip(rows, result.shared.plans, _placers(result), strict=True))
    members.sort(key=lambda member: -(member[0].rate_hz or 0.0))
    names = [_name(row) for row, *_ in members]
    if len(set(names)) < len(names):
        raise PlanError(
            f"the models {', '.join(row.title for row, *_ in members)} would be"
            f" {', '.join(names)} in a pipeline: give each a `name` of letters, digits, _ and -"
        )
    parts, commands, labels, missing = [_head(request, members[0][0])], [], {}, []
    fastest_hz = members[0][0].rate_hz
    for name, (row, plan, forced) in zip(names, members, strict=True):
        settings = _settings(row, name, folder)
        parts.append(_table(name, row, plan, settings, fastest_hz))
        engine = folder / f"{name}.engine"
        commands.append(build_command(row, request, plan, forced, engine, settings.data))
        missing += settings.missing
        if settings.class_names:
            labels[settings.labels] = settings.class_names
    parts.append('[[sinks]]\nkind = "mqtt"\n')
    return PlannedPipeline("\n".join(parts), tuple(commands), labels, tuple(missing))


def build_command(  # noqa: PLR0917
    row: WorkloadModel,
    request: PlanRequest,
    plan: Plan,
    forced: Sequence[str],
    engine: Path,
    data: Path | None = None,
) -> tuple[str, ...]:
    """Return the command that builds the engine of a plan. `forced`: options that say where its
    nodes run; `data`: what INT8 is calibrated with."""
    options = request.options
    command = ["tandem", "build", str(row.path), "--profile", plan.profile]
    command += ["--precision", plan.arithmetic]
    if request.jetpack is not None:
        command += ["--jetpack", request.jetpack]
    if options.power_mode is not None:
        command += ["--power-mode", options.power_mode]
    if options.objective in BUILD_GOALS:
        command += ["--objective", options.objective]
    if plan.precision == "int8":
        source = ("--data", data or CALIBRATION) if row.table is None else ("--table", row.table)
        command += map(str, source)
    for name, shape in row.shapes.items():
        command += ["--shape", f"{name}={'x'.join(map(str, shape))}"]
    if row.inputs_as_nchw:
        command.append("--inputs-as-nchw")
    return (*command, *forced, "-o", str(engine))


def _placers(result: PlanResult) -> list[list[str]]:
    """Return for each model the options that say where its nodes run."""
    rows = zip(result.shared.plans, result.shared.candidates, result.fronts, strict=True)
    return [_forced(plan, candidate, front.prepared) for plan, candidate, front in rows]


def _forced(plan: Plan, candidate: Candidate, prepared: Prepared) -> list[str]:
    """Return the options that put the nodes where the plan has them.

    A node that stands for one of the model's own, after a rewrite, is named by that: so the build
    makes the rewrite, too.
    """
    on_dla = [
        placement.node for placement in plan.placements if placement.processor.startswith("dla")
    ]
    allowed = [view.name for view in candidate.views if view.name not in candidate.refused]
    if not allowed:
        return []
    if set(allowed) == set(on_dla) and not prepared.unused:
        return ["--force-dla", "all"]
    model_nodes = {
        new: row.node for row in prepared.applied for new in row.nodes if new not in row.borders
    }
    names = dict.fromkeys(model_nodes.get(name, name) for name in on_dla)
    return [*(word for name in names for word in ("--force-dla", name)), "--force-gpu", "all"]


def _name(row: WorkloadModel) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]", "_", row.title)[:64]
    return f"{name}_model" if name in STAGES else name


def _head(request: PlanRequest, first: WorkloadModel) -> str:
    rate = "" if first.rate_hz is None else f"?fps={max(1, round(first.rate_hz))}"
    return (
        f"# Planned together for {request.profile}, by {request.options.objective}.\n"
        f'name = "workload"\n\n[source]\nuri = "test://{rate}"   # put your camera here\n'
    )


def _table(
    name: str, row: WorkloadModel, plan: Plan, settings: _Settings, fastest_hz: float | None
) -> str:
    processors = sorted({placement.processor for placement in plan.placements})
    cores = [
        processor.removeprefix("dla") for processor in processors if processor.startswith("dla")
    ]
    lines = [
        f"# on {', '.join(processors)}",
        "[[models]]",
        f"name = {string_text(name)}",
        f"engine = {string_text(f'{name}.engine')}",
        f"labels = {string_text(settings.labels)}",
    ]
    if row.rate_hz is not None and row.rate_hz != fastest_hz:
        lines.append(f"max_hz = {row.rate_hz:g}")
    if len(cores) == 1:
        lines.append(f"dla_core = {cores[0]}")
    return "\n".join(lines) + "\n" + settings.text


def _settings(row: WorkloadModel, name: str, folder: Path) -> _Settings:
    """Return how a model is fed and read: as its model.toml says, or as it is guessed."""
    if row.settings is not None:
        model = load_model(row.settings)
        place = row.settings.parent
        labels = relative_path(place / model.labels, folder)
        data = place / model.calibration if model.calibration else None
        return _Settings(model_settings_text(model, PREFIX), labels, data=data)
    try:
        facts, proposal = guess(row.path)
    except GuessError as error:
        raise GuessError(
            f"{error} Or name its model.toml as `settings` in the workload."
        ) from error
    if proposal.sureness == "ask":
        kinds = ", ".join(candidate.kind for candidate in proposal.candidates)
        raise GuessError(
            f"{row.path} does not show how it is read ({kinds}): write a model.toml with `tandem"
            " model guess`, and name it as `settings` in the workload."
        )
    text = settings_text(facts, proposal.best, PREFIX)
    settings = _Settings(text, f"{name}.labels.txt", proposal.labels)
    if not proposal.labels:
        settings.missing.append(
            f"{folder / settings.labels}: the class names of {row.title}, one a line"
        )
    return settings
