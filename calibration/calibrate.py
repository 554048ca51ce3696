"""One pass over the data: run the model, observe its tensors, choose an amax for each."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from numpy.typing import NDArray

from calibration.dataset import Dataset, Sample, Skipped
from calibration.errors import CalibrationError
from calibration.observer import Counts, Histogram, Tally
from calibration.samples import digest_sample
from calibration.state import Part, State, check_same, read_state, write_state
from calibration.table import CalibrationTable
from calibration.threshold import amax_by_method, method_named

Run = Callable[[Sample], Mapping[str, NDArray[Any]]]
"""Feeds of one sample -> the arrays of (at least) the requested tensors.

They are counted in the thread that called it, before that thread calls it again.
"""
Progress = Callable[[int, int], None]
"""Called after each sample with (samples done, samples expected)."""


@dataclass(frozen=True)
class Checkpoint:
    """A file that holds the state of an observation after every `every` samples.

    If it is there, the observation goes on from it. A kill loses `every` samples at most.
    """

    path: Path
    model_sha256: str
    every: int = 8


@dataclass(frozen=True)
class Observation:
    """What one pass saw. `histograms`: one per tensor, in the order requested for.

    `requested` samples were expected and `samples` were run; `skipped` says what could not be read.
    `fed_sha256`: hash of all that the model was fed with.
    """

    histograms: Mapping[str, Histogram]
    requested: int
    samples: int
    skipped: tuple[Skipped, ...]
    fed_sha256: str

    def state(self, model_sha256: str) -> State:
        """What can be written, and merged with the states of other data."""
        return State(model_sha256, (Part(self.fed_sha256, self.samples),), self.histograms)


@dataclass(frozen=True)
class CalibrationResult:
    """The table and what the user should know about how it came about.

    `dead`: tensors that were zero in every sample; their amax is `threshold.DEAD_AMAX`.
    `constant`: other tensors that held one single number in every sample.
    `samples` may be less than `requested`; `skipped` says why.
    """

    table: CalibrationTable
    requested: int
    samples: int
    skipped: tuple[Skipped, ...]
    dead: tuple[str, ...]
    constant: tuple[str, ...]


def calibrate(
    run: Run,
    samples: Dataset,
    tensors: Sequence[str],
    method: str = "entropy",
    on_progress: Progress | None = None,
    *,
    model_sha256: str,
    resume: Path | None = None,
    count: Counts | None = None,
    threads: int = 1,
) -> CalibrationResult:
    """Run every sample once and give each of `tensors` an amax by `method` (a row of METHODS).

    `resume`: a file that keeps the state on the way. If it is there, the pass goes on where it was
    stopped, with the same result to the last bit; CalibrationError if it is of another model, of
    other data or tensors. Memory: `threads` samples with the tensors that `run` returns for them,
    and 0.6 MiB for each tensor.
    """
    method_named(method)  # refused before hours of running
    keep = None if resume is None else Checkpoint(resume, model_sha256)
    seen = observe_tensors(run, samples, tensors, on_progress, keep, count=count, threads=threads)
    histograms = seen.histograms
    table = CalibrationTable(
        method=method,
        samples=seen.samples,
        data_sha256=samples.sha256(),
        model_sha256=model_sha256,
        tensors=amax_by_method(histograms, [method])[method],
    )
    dead = tuple(name for name, histogram in histograms.items() if histogram.dead)
    constant = tuple(
        name for name, histogram in histograms.items() if histogram.constant and not histogram.dead
    )
    return CalibrationResult(table, seen.requested, seen.samples, seen.skipped, dead, constant)


def observe_tensors(
    run: Run,
    samples: Dataset,
    tensors: Sequence[str],
    on_progress: Progress | None = None,
    keep: Checkpoint | None = None,
    *,
    count: Counts | None = None,
    threads: int = 1,
) -> Observation:
    """Run every sample once and merge the histograms of each of `tensors`.

    `count` counts the numbers of bins, None: `observer.numpy_counts`. `threads` samples are run and
    counted at a time, each in a thread of its own where it is more than one: `run` must allow that.
    The result does not depend on it, nor does the error that is raised.

    Samples that `keep` holds already are read, to see that they are the same, but not run.
    """
    if not tensors:
        raise CalibrationError(
            "no tensors to calibrate were named: name at least one floating point tensor"
        )
    histograms, before = _begun(keep, tensors)
    skip = before.samples if before is not None else 0
    tallies = _Tallies(run, histograms, count)
    digest, read, done = hashlib.sha256(), 0, 0

    def report(counted: int) -> None:
        nonlocal done
        for _ in range(counted):
            done += 1
            if on_progress is not None:
                on_progress(done, max(read, len(samples)))

    with _InTurn(threads) as turns:
        for number, sample in enumerate(samples):
            digest_sample(digest, sample)
            read = number + 1
            if read <= skip:
                report(1)
            else:
                report(turns.put(tallies, number, sample))
            if keep is not None and (read == skip or (read > skip and read % keep.every == 0)):
                report(turns.wait())
                before = _kept(keep, tallies.histograms(), before, Part(digest.hexdigest(), read))
        report(turns.wait())
    if done == 0:
        raise CalibrationError("the calibration data held no sample: give at least one")
    fed = Part(digest.hexdigest(), done)
    histograms = tallies.histograms()
    if keep is not None:
        _kept(keep, histograms, before, fed)
    return Observation(histograms, samples.requested, done, samples.skipped, fed.sha256)


class _Tallies:
    """What was seen of all tensors; several threads may add samples at a time, in any order."""

    def __init__(self, run: Run, begun: Mapping[str, Histogram], count: Counts | None) -> None:
        self._run = run
        self._tallies = {name: (Tally(name, count, seen), Lock()) for name, seen in begun.items()}

    def add(self, number: int, sample: Sample) -> None:
        found = self._run(sample)
        for name, (tally, mine) in self._tallies.items():
            values = _tensor(found, name, number)
            with mine:
                tally.add(values, number)

    def histograms(self) -> dict[str, Histogram]:
        return {name: tally.histogram() for name, (tally, _) in self._tallies.items()}


class _InTurn:
    """Adds samples in `threads` threads, or in the caller's; their errors come in their order."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "calibrate") if threads > 1 else None
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> "_InTurn":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def put(self, tallies: _Tallies, number: int, sample: Sample) -> int:
        """Add a sample now or soon; how many were added since the last call."""
        if self._pool is None:
            tallies.add(number, sample)
            return 1
        # A copy: a loader may write the next sample into the same memory.
        own = {name: array.copy() for name, array in sample.items()}
        self._waiting.append(self._pool.submit(tallies.add, number, own))
        return sum(1 for _ in self._finished(self._threads))

    def wait(self) -> int:
        """Wait for all samples; how many were added since the last call."""
        return sum(1 for _ in self._finished(0))

    def _finished(self, left: int) -> Iterator[None]:
        while len(self._waiting) > left:
            yield self._waiting.popleft().result()


def _begun(
    keep: Checkpoint | None, tensors: Sequence[str]
) -> tuple[dict[str, Histogram], Part | None]:
    """The histograms to begin with, and the samples that are in them."""
    if keep is None or not keep.path.exists():
        return dict.fromkeys(tensors, Histogram()), None
    state = read_state(keep.path)
    check_same(str(keep.path), state, keep.model_sha256, dict.fromkeys(tensors))
    if len(state.parts) != 1:
        raise CalibrationError(
            f"{keep.path} is merged from {len(state.parts)} shards, so it has no place to go on "
            "from: observe the other data into a file of their own and merge"
        )
    return {name: state.histograms[name] for name in tensors}, state.parts[0]


def _kept(
    keep: Checkpoint, histograms: Mapping[str, Histogram], before: Part | None, fed: Part
) -> Part:
    """Write the state if it is of more samples than `before`; else it must be of the same."""
    if before is None or fed.samples > before.samples:
        write_state(keep.path, State(keep.model_sha256, (fed,), histograms))
    elif fed != before:
        raise CalibrationError(
            f"{keep.path} is of other data: {before.samples} samples with hash "
            f"{before.sha256[:12]}, but now the first {fed.samples} have {fed.sha256[:12]}: give "
            "the same data, limit and preprocessing, or remove the file"
        )
    return fed


def _tensor(found: Mapping[str, NDArray[Any]], name: str, sample: int) -> NDArray[Any]:
    if name not in found:
        raise CalibrationError(
            f"the model gave no tensor '{name}' in sample {sample}, only {len(found)} others: "
            "name tensors of this model"
        )
    return found[name]
