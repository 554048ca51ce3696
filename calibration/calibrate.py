"""One pass over the data: run the model, observe its tensors, choose an amax for each."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from numpy.typing import NDArray

from calibration.dataset import Dataset, Sample, Skipped
from calibration.errors import CalibrationError, NoSampleError
from calibration.observer import Counts, Histogram, Tally, observe
from calibration.progress import Progress
from calibration.runs import Arrays, Block, BlockRun, Run, block_of
from calibration.samples import digest_sample
from calibration.state import Part, State, check_same, read_state, write_state
from calibration.table import CalibrationTable
from calibration.threshold import amax_by_method, method_named

_BLOCKS = 2
"""Blocks for each thread at least, so that all have work."""


@dataclass(frozen=True)
class Checkpoint:
    """A file with the state of an observation, written after every `every` samples.

    If it exists, the observation resumes from it. A kill loses at most `every` samples.
    """

    path: Path
    model_sha256: str
    every: int = 8


@dataclass(frozen=True)
class Observation:
    """The result of one pass. `histograms`: one per tensor, in the requested order.

    `requested`: samples expected; `samples`: samples run; `skipped`: unreadable ones.
    `fed_sha256`: hash of all model inputs, "" if it was not asked for.
    """

    histograms: Mapping[str, Histogram]
    requested: int
    samples: int
    skipped: tuple[Skipped, ...]
    fed_sha256: str

    def state(self, model_sha256: str) -> State:
        """The state, which can be written and merged with those of other data."""
        return State(model_sha256, (Part(self.fed_sha256, self.samples),), self.histograms)


@dataclass(frozen=True)
class CalibrationResult:
    """The calibration table and notes for the user.

    `dead`: tensors that were zero in every sample; their amax is `threshold.DEAD_AMAX`.
    `constant`: other tensors that held one value in every sample.
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
    method: str = "minmax",
    on_progress: Progress | None = None,
    *,
    model_sha256: str,
    resume: Path | None = None,
    count: Counts | None = None,
    threads: int = 1,
) -> CalibrationResult:
    """Run every sample once and give each of `tensors` an amax by `method` (a row of METHODS).

    `resume`: a checkpoint file. If it exists, the pass resumes, with the same result to the last
    bit; CalibrationError if it is of another model, other data or tensors. Memory: `threads`
    samples with the tensors that `run` returns for them, and 0.6 MiB for each tensor.
    """
    method_named(method)  # fails before hours of running
    checkpoint = None if resume is None else Checkpoint(resume, model_sha256)
    observation = observe_tensors(
        run, samples, tensors, on_progress, checkpoint, count=count, threads=threads
    )
    histograms = observation.histograms
    table = CalibrationTable(
        method=method,
        samples=observation.samples,
        data_sha256=samples.sha256(),
        model_sha256=model_sha256,
        tensors=amax_by_method(histograms, [method])[method],
    )
    dead = tuple(name for name, histogram in histograms.items() if histogram.dead)
    constant = tuple(
        name for name, histogram in histograms.items() if histogram.constant and not histogram.dead
    )
    return CalibrationResult(
        table, observation.requested, observation.samples, observation.skipped, dead, constant
    )


def observe_tensors(
    run: Run,
    samples: Dataset,
    tensors: Sequence[str],
    on_progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
    *,
    count: Counts | None = None,
    threads: int = 1,
    hash_inputs: bool = True,
) -> Observation:
    """Run every sample once and merge the histograms of each of `tensors`.

    `count` counts bin numbers, None: `observer.numpy_counts`. `threads` samples, or blocks of them
    if `run` is a `BlockRun`, are run and counted at a time; with more than one, `run` must be
    thread-safe. Neither the result nor the error depends on it.

    Samples that `checkpoint` already contains are read and hashed, but not run. `hash_inputs`:
    for `Observation.fed_sha256`; a checkpoint needs it.
    """
    if not tensors:
        raise CalibrationError(
            "no tensors to calibrate were named: name at least one floating point tensor"
        )
    histograms, saved = _resumed(checkpoint, tensors)
    skip = saved.samples if saved is not None else 0
    tallies = _Tallies(run, histograms, count)
    digest, read, done = hashlib.sha256(), 0, 0

    def report(counted: int) -> None:
        nonlocal done
        for _ in range(counted):
            done += 1
            if on_progress is not None:
                on_progress(done, max(read, len(samples)))

    block = min(block_of(run), max(1, len(samples) // (_BLOCKS * threads)))
    with _OrderedWorkers(tallies, threads, block) as workers:
        for number, sample in enumerate(_read(samples, workers, digest if hash_inputs else None)):
            read = number + 1
            if read <= skip:
                report(1)
            else:
                report(workers.put(number, sample))
            if checkpoint is not None and (
                read == skip or (read > skip and read % checkpoint.every == 0)
            ):
                report(workers.wait())
                saved = _save(
                    checkpoint, tallies.histograms(), saved, Part(digest.hexdigest(), read)
                )
        report(workers.wait())
    if done == 0:
        raise NoSampleError("the calibration data held no sample: give at least one")
    fed = Part(digest.hexdigest(), done)
    histograms = tallies.histograms()
    if checkpoint is not None:
        _save(checkpoint, histograms, saved, fed)
    fed_sha256 = fed.sha256 if hash_inputs else ""
    return Observation(histograms, samples.requested, done, samples.skipped, fed_sha256)


def _read(
    samples: Dataset, workers: "_OrderedWorkers", digest: "hashlib._Hash | None"
) -> Iterator[Sample]:
    """Yield the samples of a pass, hashed. An error of one that was read before comes first."""
    try:
        for sample in samples:
            if digest is not None:
                digest_sample(digest, sample)
            yield sample
    except Exception:
        workers.wait()
        raise


class _Tallies:
    """The histograms of all tensors while they grow; threads may add samples in any order."""

    def __init__(self, run: Run, histograms: Mapping[str, Histogram], count: Counts | None) -> None:
        self._run = run
        self._tallies = {
            name: (Tally(name, count, histogram), Lock()) for name, histogram in histograms.items()
        }

    def add(self, number: int, sample: Sample) -> None:
        self._count(self._run(sample), number)

    def add_block(self, block: Block) -> None:
        arrays = self._run.run_block(block.feeds) if isinstance(self._run, BlockRun) else None
        if arrays is None:
            for number, sample in block.samples():
                self.add(number, sample)
            return
        try:
            self._count(arrays, block.first)
        except CalibrationError:
            for at in range(block.count):  # the error of the first sample is to be raised
                for name in self._tallies:
                    number = block.first + at
                    observe(name, _tensor(arrays, name, number)[at], number)
            raise

    def histograms(self) -> dict[str, Histogram]:
        return {name: tally.histogram() for name, (tally, _) in self._tallies.items()}

    def _count(self, arrays: Arrays, number: int) -> None:
        for name, (tally, lock) in self._tallies.items():
            values = _tensor(arrays, name, number)
            with lock:
                tally.add(values, number)


class _OrderedWorkers(AbstractContextManager["_OrderedWorkers"]):
    """Adds samples in blocks, in `threads` threads or in the caller's; errors are raised in sample
    order."""

    def __init__(self, tallies: _Tallies, threads: int, most: int) -> None:
        """`most`: samples of a block."""
        self._tallies = tallies
        self._threads = threads
        self._most = most
        self._block: Block | None = None
        self._pool = ThreadPoolExecutor(threads, "calibrate") if threads > 1 else None
        self._waiting: deque[tuple[Future[None], int]] = deque()

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def put(self, number: int, sample: Sample) -> int:
        """Add a sample now or later; return the number added since the last call."""
        if self._pool is None and self._most == 1:
            self._tallies.add(number, sample)
            return 1
        added = 0
        if self._block is not None and not self._block.is_like(sample):
            added += self._start()
        if self._block is None:
            self._block = Block(number, sample, self._most)
        else:
            self._block.append(sample)
        return added + (self._start() if self._block.full else 0)

    def wait(self) -> int:
        """Wait for all samples; return the number added since the last call."""
        return self._start() + self._finish(0)

    def _start(self) -> int:
        """Add the block that has been filled."""
        block, self._block = self._block, None
        if block is None:
            return 0
        if self._pool is None:
            self._add(block)
            return block.count
        self._waiting.append((self._pool.submit(self._add, block), block.count))
        return self._finish(self._threads)

    def _add(self, block: Block) -> None:
        if self._most > 1:
            self._tallies.add_block(block)
            return
        for number, sample in block.samples():
            self._tallies.add(number, sample)

    def _finish(self, remaining: int) -> int:
        """Wait until so many blocks are not yet added; return the number of samples added."""
        added = 0
        while len(self._waiting) > remaining:
            future, count = self._waiting.popleft()
            future.result()
            added += count
        return added


def _resumed(
    checkpoint: Checkpoint | None, tensors: Sequence[str]
) -> tuple[dict[str, Histogram], Part | None]:
    """The histograms of the checkpoint, or empty ones, and the samples in them."""
    if checkpoint is None or not checkpoint.path.exists():
        return dict.fromkeys(tensors, Histogram()), None
    state = read_state(checkpoint.path)
    check_same(str(checkpoint.path), state, checkpoint.model_sha256, dict.fromkeys(tensors))
    if len(state.parts) != 1:
        raise CalibrationError(
            f"{checkpoint.path} is merged from {len(state.parts)} shards, so it has no place to go "
            "on "
            "from: observe the other data into a file of their own and merge"
        )
    return {name: state.histograms[name] for name in tensors}, state.parts[0]


def _save(
    checkpoint: Checkpoint, histograms: Mapping[str, Histogram], saved: Part | None, fed: Part
) -> Part:
    """Write the state if it has more samples than `before`; else check that it is the same."""
    if saved is None or fed.samples > saved.samples:
        write_state(checkpoint.path, State(checkpoint.model_sha256, (fed,), histograms))
    elif fed != saved:
        raise CalibrationError(
            f"{checkpoint.path} is of other data: {saved.samples} samples with hash "
            f"{saved.sha256[:12]}, but now the first {fed.samples} have {fed.sha256[:12]}: give "
            "the same data, limit and preprocessing, or remove the file"
        )
    return fed


def _tensor(arrays: Mapping[str, NDArray[Any]], name: str, sample: int) -> NDArray[Any]:
    if name not in arrays:
        raise CalibrationError(
            f"the model gave no tensor '{name}' in sample {sample}, only {len(arrays)} others: "
            "name tensors of this model"
        )
    return arrays[name]
