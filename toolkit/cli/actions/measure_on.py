"""Measure a model on the boards of a farm before it is built (`tandem build --measure-on`)."""

import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from device.engine.manifest import Precision
from device.profile import load_profile
from device.selftest.kit import pack
from toolkit.board_kit.farm import FarmKit, farm_kit
from toolkit.board_kit.make import KitRequest, make_kit
from toolkit.board_kit.own_model import own_model
from toolkit.cli.actions.fleet.views import open_store, operator
from toolkit.cli.commands.build import Build
from toolkit.engine.options import BuildOptions
from toolkit.errors import FleetError
from toolkit.fleet.farm.run import Run, boards_for
from toolkit.fleet.farm.values import Table
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.rollout.targets import Target

FLEET = "fleet:"
MINUTES = 10.0  # that one job may take
CHOICES_A_PART = 8  # operations whose tactics one job times: some seconds


def measure_on(
    options: Build, build: BuildOptions, report: Callable[[str, float], None]
) -> BuildOptions:
    """Return the options of the build with the times of a farm. Raises TandemError."""
    scheme, colon, requires = (options.measure_on or "").partition(":")
    if f"{scheme}{colon}" != FLEET:
        raise FleetError(
            f"{options.measure_on!r} names no boards: write fleet: and what they must be, for "
            f"example --measure-on {FLEET}profile=orin-nx-16gb"
        )
    fleet = load_fleet(Path(os.environ.get("TANDEM_FLEET", ".")))
    precision = _precision(options, build)
    with (
        tempfile.TemporaryDirectory(prefix="tandem-farm-") as name,
        open_store(fleet.folder) as database,
    ):
        requirements = ",".join(
            filter(None, (requires, f"profile={load_profile(options.profile).name}"))
        )
        boards = boards_for(database, requirements)
        report("kit for boards", 0.0)
        folder, file = Path(name, "kit"), Path(name, "kit.zip")
        kit, left_out = make_kit(
            folder,
            KitRequest(
                profile=options.profile, jetpack=options.jetpack,
                networks=[own_model(options.model)], precisions=(precision,), demo=False,
                choices_a_part=CHOICES_A_PART, tactics=build.tactics, shapes=build.shapes,
            ),
            lambda _text: None,
        )  # fmt: skip
        farm = farm_kit(kit, folder)
        if not farm.works:
            raise FleetError(f"nothing of {options.model} can be measured: {'; '.join(left_out)}")
        pack(folder, file)
        run = Run(fleet, database, file, farm.works, minutes=MINUTES, who=operator())
        table = run.measure(
            [board.device for board in boards],
            lambda done, of: report("measure on boards", done / of),
        )
    timings = farm.timings(table)
    return replace(
        build,
        tactics=replace(build.tactics, timings=timings) if timings.devices else build.tactics,
        node_times=(farm.measured(table, precision, _power_mode(boards, table)),),
        notes=tuple(notes_of(farm, table)),
    )


def _precision(options: Build, build: BuildOptions) -> Precision:
    """Return the precision of what is timed: that of most nodes of the build."""
    if options.precision in ("bf16", "fp8"):
        return "fp16"
    if options.precision not in (None, "best"):
        return cast(Precision, options.precision)
    if options.precision == "best" or build.data or build.table or build.dummy_ranges:
        return "int8"
    return "fp16" if load_profile(options.profile).sm else "fp32"


def _power_mode(boards: Sequence[Target], table: Table) -> str | None:
    """Return the power mode in which all boards of a table run, None if it is not one."""
    modes = {board.facts.power_mode for board in boards if board.device in table.boards}
    return modes.pop() or None if len(modes) == 1 else None


def notes_of(farm: FarmKit, table: Table) -> Iterator[str]:
    """Yield what was measured where, for the report of a build."""
    tactics = {key for work in farm.works if work.steps == ("tactics",) for key in work.task.keys}
    timed = len(tactics & table.rows.keys())
    spread = (
        f"they agree within {table.error:.1%}"
        if table.error < math.inf
        else "no second board has checked them"
    )
    counts = Counter(len(row.boards) for row in table.rows.values())
    each = " or ".join(str(count) for count in sorted(counts))
    yield (
        f"times of {timed} tactics and {len(table.rows) - timed} of nodes and networks were "
        f"measured on {', '.join(table.boards)} of the farm, each by {each} of them; {spread}"
    )
    for name in farm.networks:
        if name in table.rows:
            row = table.rows[name]
            yield f"{name}: {row.time_us / 1e3:.3f} ms a frame on {', '.join(row.boards)}"
    for board, factor in sorted(table.liars.items()):
        yield (
            f"board {board} was {factor:.2g} times as slow as the others: its times are not used; "
            "compare its power mode and its clocks"
        )
    for board, reason in sorted(table.out.items()):
        yield f"board {board} dropped out: {reason}"
    for name, reason in sorted(table.reasons.items()):
        missing = table.verdicts[name] == "missing"
        yield f"{name} was {'not' if missing else 'partly'} measured: {reason}"
