"""Run a kit on the boards of a farm (`tandem fleet farm`)."""

import math
import tempfile
from pathlib import Path

from device.selftest.kit import load_kit, pack
from toolkit.board_kit.farm import kit_works
from toolkit.cli.actions.fleet.views import open_store, operator
from toolkit.cli.actions.outputs import print_result, write_bytes
from toolkit.cli.commands.fleet_devices import RunKit
from toolkit.cli.progress import progress_bar
from toolkit.errors import FleetError
from toolkit.fleet.farm.run import FETCH_S, Run, boards_for
from toolkit.fleet.farm.values import Rules
from toolkit.fleet.fleet_folder import load_fleet


def run_kit(options: RunKit) -> None:
    """Have boards run the kit, and write their reports. Raises TandemError."""
    kit = load_kit(options.kit)
    fleet = load_fleet(options.folder)
    works, reports = kit_works(kit)
    if not works:
        raise FleetError(f"{options.kit} has nothing for a farm: make one with engines or cases")
    requires = ",".join(filter(None, (options.where, f"profile={kit.profile}")))
    with (
        tempfile.TemporaryDirectory(prefix="tandem-farm-") as name,
        open_store(fleet.folder) as database,
    ):
        boards = [board.device for board in boards_for(database, requires)]
        file = Path(name, "kit.zip")
        pack(options.kit, file)
        rules = Rules(repeats=1, tolerance=math.inf, lease_s=60.0 * options.minutes + FETCH_S)
        run = Run(
            fleet, database, file, works, minutes=options.minutes, who=operator(), rules=rules
        )
        with progress_bar(options.kit.name) as report:
            table = run.measure(boards, lambda done, of: report("run kit", done / of))
    options.output.mkdir(parents=True, exist_ok=True)
    rows = {}
    for task, row in table.rows.items():
        path = options.output / f"{task}.tandem-report"
        write_bytes(path, reports[task, row.boards[0]])
        rows[str(path)] = row.boards[0]
    lines = [f"{path}: {board}" for path, board in rows.items()]
    lines += [f"board {board} dropped out: {reason}" for board, reason in table.out.items()]
    lines += [f"{task} was not run: {reason}" for task, reason in table.reasons.items()]
    value = {"reports": rows, "dropped_out": table.out, "not_run": table.reasons}
    print_result(value, "\n".join(lines), as_json=options.as_json)
    if table.reasons:
        raise SystemExit(1)
