"""`python -m device.selftest.facts`: what the selftest reads of the board, as one JSON object."""

from device.start.isolation import drop_working_directory

drop_working_directory()

# ruff: noqa: E402
import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from device.selftest.machine import read_machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the facts, beside what the caller knows."""
    parser = argparse.ArgumentParser(prog="python -m device.selftest.facts")
    parser.add_argument("--disk", type=Path, required=True, help="where free space counts")
    parser.add_argument("--more", default="{}", metavar="JSON", help="what else is printed")
    options = parser.parse_args(arguments)
    more = msgspec.json.decode(options.more, type=dict[str, msgspec.Raw])
    document = {**more, "machine": read_machine(options.disk)}
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
