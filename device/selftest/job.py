"""A job of a farm: `python -m device.selftest.job KIT.zip --steps tactics --items a,b`.

The kit is one file. Prints JSON: the report of the steps over these items, in base64, and the
digest of what was asked.
"""

import argparse
import base64
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from device.errors import TandemError
from device.selftest.__main__ import run_kit
from device.selftest.kit import LIST, open_packed
from device.selftest.report import ReportError
from device.selftest.steps import STEPS


def work_sha256(kit_sha256: str, steps: Sequence[str], items: Sequence[str]) -> str:
    """Return the digest of a job: of the kit's file, the steps, and the items in their order."""
    return hashlib.sha256(msgspec.json.encode((kit_sha256, steps, items))).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Do the job; the last line of stderr says why there is no result."""
    parser = argparse.ArgumentParser(prog="python -m device.selftest.job")
    parser.add_argument("kit", type=Path)
    parser.add_argument("--sha256", required=True, help="of the kit, which was checked")
    parser.add_argument("--steps", required=True)
    parser.add_argument("--items", required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--max-bytes", type=int, default=sys.maxsize)
    arguments = parser.parse_args(argv)
    steps, items = arguments.steps.split(","), arguments.items.split(",")
    try:
        known = {step.name for step in STEPS}
        if unknown := sorted(set(steps) - known):
            raise ReportError(f"a selftest has no step {unknown[0]!r}: update Tandem on this board")
        with tempfile.TemporaryDirectory(prefix="tandem-job-") as name:
            folder, report = Path(name), Path(name, "report")
            kit = open_packed(arguments.kit, folder).only(items)
            (folder / LIST).write_bytes(msgspec.json.encode(kit))
            run_kit(folder, report, arguments.minutes, steps)
            data = report.read_bytes()
        encoded = base64.b64encode(data).decode()
        if len(encoded) > arguments.max_bytes:
            raise ReportError(
                f"the report has {len(encoded)} bytes in base64, {arguments.max_bytes} fit into "
                "one message: give jobs of fewer items"
            )
    except (TandemError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    answer = {"work": work_sha256(arguments.sha256, steps, items), "report": encoded}
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
