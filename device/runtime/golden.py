"""Golden inputs: an engine gives here what it gave on the host, or it is not the same any more.

    golden.npz   in_<sample>_<input>, out_<sample>_<output>: arrays, in the order of the engine

`python -m device.runtime.golden ENGINE GOLDEN [ENGINE GOLDEN ...] --tolerance T` prints a
`GoldenResult` as one line, of several engines that of the worst.
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from device.array_files import MAX_HEADER_BYTES, read_npz
from device.errors import ArrayFileError, BundleError, TandemError
from device.runtime.session import Session, open_session

Array = NDArray[Any]

MAX_GOLDEN_SAMPLES = 64  # of one model
MAX_GOLDEN_BYTES = 1 << 30  # of its arrays, unpacked


class GoldenResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a check has measured.

    `agreement`: the share of values within the tolerance, of the output where it is smallest:
    `worst`, of several engines after the name of its own. `latency_p95_ms`: of one inference,
    without the first, of the slowest engine. `samples`: of all engines. `garbage`: what shows that
    an engine gives no results at all, see `garbage_in`.
    """

    samples: int
    agreement: float
    worst: str
    latency_p95_ms: float
    garbage: str = ""


@dataclass(frozen=True, slots=True)
class GoldenRun:
    """What a file has recorded, and what the engine gave here: the outputs of each sample by name.
    `times_s`: of each inference, without the first."""

    recorded: tuple[dict[str, Array], ...]
    actual: tuple[dict[str, Array], ...]
    times_s: tuple[float, ...]

    @property
    def latency_p95_ms(self) -> float:
        """So long take 95 % of the inferences at most."""
        return round(1e3 * float(np.percentile(self.times_s, 95)), 3)


def record_golden(session: Session, samples: Sequence[Mapping[str, Array]], path: Path) -> None:
    """Run samples (arrays by the engine's inputs) and write them with their outputs.

    The same arrays give the same bytes. Raises OSError, and BundleError: the outputs show nothing,
    so that every board would refuse them.
    """
    arrays: dict[str, Array] = {}
    recorded: list[dict[str, Array]] = []
    for number, feeds in enumerate(samples):
        outputs = session.infer(dict(feeds))
        recorded.append(outputs)
        for index, info in enumerate(session.inputs):
            arrays[f"in_{number}_{index}"] = np.array(feeds[info.name])
        for index, info in enumerate(session.outputs):
            arrays[f"out_{number}_{index}"] = np.array(outputs[info.name])
    garbage = garbage_in(recorded, recorded)
    if garbage:
        raise BundleError(
            f"{garbage} for all golden inputs on this host, which shows nothing of a board: give "
            "`tandem bundle --golden` pictures of what the model knows, or repair the model"
        )
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # its options are no arrays


def run_golden(session: Session, path: Path) -> GoldenRun:
    """Run the golden inputs of a file. Raises BundleError."""
    limit_bytes = _limit_bytes(session)
    inputs, expected = _read(path, len(session.inputs), len(session.outputs), limit_bytes)
    names = [info.name for info in session.inputs]
    outputs_of = [info.name for info in session.outputs]
    actual: list[dict[str, Array]] = []
    times_s: list[float] = []
    for number, arrays in enumerate([inputs[0], *inputs]):  # the first one warms up
        feeds = dict(zip(names, arrays, strict=True))
        begin_s = time.perf_counter()
        outputs = session.infer(feeds)
        times_s.append(time.perf_counter() - begin_s)
        if number:
            actual.append({name: np.array(outputs[name]) for name in outputs_of})
    recorded = tuple(dict(zip(outputs_of, row, strict=True)) for row in expected)
    return GoldenRun(recorded, tuple(actual), tuple(times_s[1:]))


def garbage_in(
    recorded: Sequence[Mapping[str, Array]], actual: Sequence[Mapping[str, Array]]
) -> str:
    """Return what shows that outputs are no results, "" if nothing does: a processor that gives
    zeros or NaN without an error.

    That is a NaN, an infinity that was not recorded, an output that is 0 in every sample and was
    not recorded so, outputs that are all 0 in every sample, and outputs that are the same in every
    sample and were not recorded so, as behind a part of the network that gives zeros.
    """
    zeros = []
    for name in recorded[0]:
        rows = [(known[name], value[name]) for known, value in zip(recorded, actual, strict=True)]
        if any(_has_unknown_infinity(known, value) for known, value in rows):
            return f"its output {name!r} is not finite"
        if not any(value.any() for _, value in rows):
            zeros.append(name)
            if any(known.any() for known, _ in rows):
                return f"its output {name!r} is 0 everywhere"
    if len(zeros) == len(recorded[0]):
        return "every output of it is 0 everywhere"
    stuck = _are_equal(actual) and not _are_equal(recorded)
    return "every output of it is the same, whatever its input," if stuck else ""


def _are_equal(samples: Sequence[Mapping[str, Array]]) -> bool:
    """Return whether every sample has the outputs of the first."""
    first, *rest = samples
    return all(np.array_equal(first[name], sample[name]) for sample in rest for name in first)


def _has_unknown_infinity(known: Array, value: Array) -> bool:
    """Return whether a value is NaN, or infinite where the known one is not equal."""
    if not np.issubdtype(value.dtype, np.floating):
        return False
    if np.isnan(value).any():
        return True
    infinite = np.isinf(value)
    return bool(infinite.any()) and (
        known.shape != value.shape or bool((known[infinite] != value[infinite]).any())
    )


def check_golden(session: Session, path: Path, tolerance: float) -> GoldenResult:
    """Run the golden inputs of a file and compare the outputs. Raises BundleError.

    A value of a float output agrees if it differs by at most `tolerance` times the range that the
    output has over all samples; one of another type if it is equal.
    """
    run = run_golden(session, path)
    shares = {
        name: share_within(
            [row[name] for row in run.actual], [row[name] for row in run.recorded], tolerance
        )
        for name in run.recorded[0]
    }
    worst = min(shares, key=lambda name: shares[name])
    return GoldenResult(
        samples=len(run.recorded),
        agreement=shares[worst],
        worst=worst,
        latency_p95_ms=run.latency_p95_ms,
        garbage=garbage_in(run.recorded, run.actual),
    )


def share_within(actual: Sequence[Array], expected: Sequence[Array], tolerance: float) -> float:
    """Return the share of values of one output that agree, over all samples."""
    if any(value.shape != known.shape for value, known in zip(actual, expected, strict=True)):
        return 0.0
    value, known = (np.concatenate([row.ravel() for row in rows]) for rows in (actual, expected))
    if known.size == 0:
        return 1.0
    if known.dtype.kind != "f":
        return float(np.mean(value == known))
    value, known = value.astype(np.float64), known.astype(np.float64)
    finite = known[np.isfinite(known)]
    span = float(np.ptp(finite)) if finite.size else 0.0
    limit = tolerance * (span or float(np.max(np.abs(finite), initial=0.0)))
    same = (value == known) | (np.isnan(value) & np.isnan(known))
    with np.errstate(invalid="ignore"):  # infinities
        return float(np.mean(same | (np.abs(value - known) <= limit)))


def _limit_bytes(session: Session) -> int:
    """Return what the arrays of a file take at most, by the engine's inputs and outputs."""
    largest = {dim.name: dim.max for dim in session.dims}
    per_sample = 0
    for tensor in (*session.inputs, *session.outputs):
        sizes = [dim if isinstance(dim, int) else largest.get(dim or "") for dim in tensor.shape]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return MAX_GOLDEN_BYTES
        per_sample += math.prod(known) * np.dtype(tensor.dtype).itemsize + MAX_HEADER_BYTES
    return min(MAX_GOLDEN_BYTES, MAX_GOLDEN_SAMPLES * per_sample)


def _read(
    path: Path, inputs: int, outputs: int, limit_bytes: int
) -> tuple[list[list[Array]], list[list[Array]]]:
    """Return the inputs and outputs of each sample."""
    try:
        with path.open("rb") as file:
            arrays = read_npz(file, limit_bytes)
        count = len(arrays) // (inputs + outputs)
        kinds = (("in", inputs), ("out", outputs))
        first, second = (
            [[arrays[f"{kind}_{n}_{i}"] for i in range(each)] for n in range(count)]
            for kind, each in kinds
        )
    except (OSError, ArrayFileError, KeyError) as error:
        raise BundleError(f"{path} has no golden inputs that fit the engine: {error}") from error
    if not first:
        raise BundleError(f"{path} has no golden inputs for an engine of {inputs} inputs")
    return first, second


def worst_of(results: Sequence[tuple[str, GoldenResult]]) -> GoldenResult:
    """Return what several checks have measured together, each with the name of its model."""
    name, worst = min(results, key=lambda row: row[1].agreement)
    garbage = next(((name, row.garbage) for name, row in results if row.garbage), None)
    prefix = "" if garbage is None or len(results) == 1 else f"{garbage[0]}: "
    return GoldenResult(
        samples=sum(result.samples for _, result in results),
        agreement=worst.agreement,
        worst=worst.worst if len(results) == 1 else f"{name}: {worst.worst}",
        latency_p95_ms=max(result.latency_p95_ms for _, result in results),
        garbage="" if garbage is None else f"{prefix}{garbage[1]}",
    )


def main() -> int:
    """Check engines; the exit status is 1 if that is not possible."""
    parser = argparse.ArgumentParser(prog="python -m device.runtime.golden")
    parser.add_argument("files", type=Path, nargs="+", metavar="ENGINE GOLDEN")
    parser.add_argument("--tolerance", type=float, required=True)
    parser.add_argument("--plans", type=Path)
    arguments = parser.parse_args()
    files: list[Path] = arguments.files
    if len(files) % 2:
        parser.error("name a file of golden inputs behind each engine")
    results: list[tuple[str, GoldenResult]] = []
    for engine, golden in zip(files[::2], files[1::2], strict=True):
        try:
            with open_session(engine, plans=arguments.plans) as session:
                result = check_golden(session, golden, arguments.tolerance)
        except TandemError as error:
            name = "" if len(files) == 2 else f"{engine.stem}: "
            sys.stderr.write(f"{name}{error}\n")
            return 1
        results.append((golden.name.partition(".")[0], result))  # models may share an engine
    sys.stdout.write(msgspec.json.encode(worst_of(results)).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
