"""`python -m device.runtime.prepare ENGINE...`: what `tandem-agent prepare` runs."""

import argparse
import sys
import time
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path

import msgspec

from device.engine.checksums import NO_CHECKSUMS
from device.engine.file import Engine, open_engine
from device.errors import TandemError
from device.runtime.executors.protocol import LoadOptions, SegmentContext
from device.runtime.executors.table import other_ways
from device.runtime.prepare.children import Limits
from device.runtime.prepare.prepare_engine import Job, Prepared, prepare_engine
from device.runtime.tensorrt.board import read_board
from device.runtime.tensorrt.plans import default_folder


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="tandem-agent prepare", description=(
        "Finish the segments of engines for this board's TensorRT: those on the DLA, and those "
        "on the GPU if `tandem build --gpu-backend` asked for it, which are timed against their "
        "kernels. A plan that is there already is kept; a refused segment runs without TensorRT."
    ))  # fmt: skip
    parser.add_argument("engines", type=Path, nargs="+", metavar="engine")
    parser.add_argument("--plans", type=Path, default=default_folder(), help="where plans are kept")
    parser.add_argument("--timeout-s", type=_seconds, default=1800.0, help="for each segment")
    parser.add_argument(
        "--total-timeout-s", type=_seconds, help="for all engines together (default: no limit)"
    )
    parser.add_argument("--max-memory-mb", type=_megabytes, help="of the build of a segment")
    parser.add_argument("--again", action="store_true", help="also try what was refused before")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--events", action="store_true", help=argparse.SUPPRESS)  # for the agent
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text} is no time: give seconds above 0, such as 1800")
    return seconds


def _megabytes(text: str) -> int:
    megabytes = int(text)
    if megabytes < 1:
        raise argparse.ArgumentTypeError(f"{text} is no amount of memory: give MiB above 0")
    return megabytes


def main() -> int:
    """Prepare engines; the exit status is 1 if a segment has no plan."""
    arguments = make_parser().parse_args()
    engines: list[Path] = arguments.engines
    begin_s = time.monotonic()
    prepared: list[Prepared] = []
    ways: dict[str, tuple[str, ...]] = {}
    try:
        for path in engines:
            prefix = f"{path.stem}: " if len(engines) > 1 else ""
            with open_engine(path) as engine:
                engine.verify()
                if engine.checksums is None:
                    sys.stderr.write(f"tandem-agent: {path} {NO_CHECKSUMS}\n")
                job = _job(engine, arguments, begin_s, prefix)
                rows_of_engine = prepare_engine(job, again=arguments.again)
                prepared += [replace(row, segment=prefix + row.segment) for row in rows_of_engine]
                ways |= {prefix + name: others for name, others in _other_ways(engine).items()}
    except TandemError as error:
        sys.stderr.write(f"tandem-agent: {error}\n")
        return 1
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    rows = [{**asdict(row), "others": ways[row.segment]} for row in prepared]
    if arguments.events:
        sys.stdout.write(msgspec.json.encode({"rows": rows}).decode() + "\n")
    elif arguments.json:
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
    else:
        sys.stdout.write(
            "".join(f"{_line(row)}\n" for row in prepared) or "no segments for TensorRT\n"
        )
    return int(any(row.problem for row in prepared))


def _job(engine: Engine, arguments: argparse.Namespace, begin_s: float, prefix: str) -> Job:
    """Return what is to be done for one of several engines; `begin_s`: when the first began."""
    memory = arguments.max_memory_mb
    limits = Limits(
        arguments.timeout_s,
        None if memory is None else memory * 2**20,
        arguments.total_timeout_s,
    )
    report = _Events() if arguments.events else _progress

    def progress(segment: str, seconds: float) -> None:
        report(prefix + segment, seconds)

    return Job(engine, arguments.plans, read_board(), limits, progress, begin_s)


def _progress(segment: str, seconds: float) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{segment}: TensorRT builds, {seconds:.0f} s")
        sys.stderr.flush()


class _Events:
    """Progress as JSON lines for the agent, one a second."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, segment: str, seconds: float) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + 1.0
        event = {"segment": segment, "seconds": round(seconds, 1)}
        sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
        sys.stdout.flush()


def _other_ways(engine: Engine) -> dict[str, tuple[str, ...]]:
    """Return how each segment can run on this board without TensorRT, best first."""
    tensors = {tensor.name: tensor for tensor in engine.manifest.tensors}
    return {
        segment.name: other_ways(SegmentContext(engine, segment, tensors, LoadOptions()))
        for segment in engine.manifest.segments
    }


def _line(row: Prepared) -> str:
    if row.problem is not None:
        return f"{row.segment}: no plan: {row.problem}"
    how = "was there" if row.cached else f"built in {row.seconds:.1f} s"
    if row.fallback:
        how += " with GPU fallback, to fold constants; all its layers are on the DLA"
    times = ""
    if row.tensorrt_us is not None and row.cuda_us is not None:
        runs = "the kernels run" if row.kernels_run else "TensorRT runs"
        times = f"; TensorRT {row.tensorrt_us:.0f} us, kernels {row.cuda_us:.0f} us: {runs}"
    if not row.refused_layers:
        return f"{row.segment}: {how}{times}"
    return f"{row.segment}: {how}; TensorRT keeps {', '.join(row.refused_layers)} off the DLA"


if __name__ == "__main__":
    sys.exit(main())
