"""`python -m device.runtime.tensorrt ENGINE`: what `tandem-agent prepare` runs."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec

from device.engine.file import open_engine
from device.errors import TandemError
from device.runtime.tensorrt.board import read_board
from device.runtime.tensorrt.plans import default_folder
from device.runtime.tensorrt.prepare import Job, Limits, Prepared, prepare_engine


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="tandem-agent prepare", description=(
        "Finish the DLA segments of an engine with this board's TensorRT. A plan that is there "
        "already is kept; a refused segment runs without the DLA."
    ))  # fmt: skip
    parser.add_argument("engine", type=Path)
    parser.add_argument("--plans", type=Path, default=default_folder(), help="where plans are kept")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for each segment")
    parser.add_argument("--max-memory-mb", type=int, help="of the build of a segment")
    parser.add_argument("--again", action="store_true", help="also try what was refused before")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def main() -> int:
    """Prepare one engine; the exit status is 1 if a segment has no plan."""
    arguments = make_parser().parse_args()
    memory = arguments.max_memory_mb
    limits = Limits(arguments.timeout_s, None if memory is None else memory * 2**20)
    try:
        with open_engine(arguments.engine) as engine:
            job = Job(engine, arguments.plans, read_board(), limits, _progress)
            prepared = prepare_engine(job, again=arguments.again)
    except TandemError as error:
        sys.stderr.write(f"tandem-agent: {error}\n")
        return 1
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    if arguments.json:
        rows = [asdict(row) for row in prepared]
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{_line(row)}\n" for row in prepared) or "no DLA segments\n")
    return int(any(row.problem for row in prepared))


def _progress(segment: str, seconds: float) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{segment}: TensorRT builds, {seconds:.0f} s")
        sys.stderr.flush()


def _line(row: Prepared) -> str:
    if row.problem is not None:
        return f"{row.segment}: no plan: {row.problem}"
    how = "was there" if row.cached else f"built in {row.seconds:.1f} s"
    if not row.refused_layers:
        return f"{row.segment}: {how}"
    return f"{row.segment}: {how}; TensorRT keeps {', '.join(row.refused_layers)} off the DLA"


if __name__ == "__main__":
    sys.exit(main())
