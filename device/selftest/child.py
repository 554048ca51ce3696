"""The child process of a step: `python -m device.selftest.child KIT WORK STEP FIRST LINES`.

It works through the items of the step from number FIRST on and appends a line to LINES for each.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from device.errors import TandemError
from device.selftest import demo, dla, kernels, machine, networks, rules, tactics
from device.selftest.kit import Kit, load_kit
from device.selftest.runner import Line
from device.selftest.steps import STEPS

Run = Callable[[Kit, Path, Path, str], Any]
"""Works on one item: the kit, its folder, the folder for what is written, the item's name."""

RUNS: Mapping[str, Run] = {
    "machine": machine.run,
    "kernels": kernels.run,
    "rules": rules.run,
    "dla": dla.run,
    "networks": networks.run,
    "tactics": tactics.run,
    "demo": demo.run,
}


def main(argv: list[str]) -> int:
    """Work through the items of a step."""
    kit_folder, folder, name = Path(argv[1]), Path(argv[2]), argv[3]
    first, lines = int(argv[4]), Path(argv[5])
    kit = load_kit(kit_folder)
    step = next(step for step in STEPS if step.name == name)
    with lines.open("ab") as file:
        for item in step.items(kit)[first:]:
            try:
                line = Line(item=item, row=RUNS[name](kit, kit_folder, folder, item))
            except TandemError as error:
                line = Line(item=item, problem=str(error))
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
