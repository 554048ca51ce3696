"""A pass over calibration data in shards, on workers or in files, exactly as one process makes it.

The samples that judge, and those between them (`Split.read_head`), are run here; the rest is cut
into ranges of samples. Histograms, channels and skipped files of a `Shard` merge to what one pass
gives, bit for bit. Its key is the hash of all that it depends on: code, graph, preprocessing and
the bytes of its files. So a shard is the same in the cache, from a worker and in a file, and counts
once however often it comes.

Workers open graph and data once, by path and hash, and prove that they compute the same bits: their
activations of the first sample are compared with those of this process.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
from msgspec import Meta
from numpy.typing import NDArray

from calibration.calibrate import Observation
from calibration.channels import ChannelWatch
from calibration.dataset import Divisible, InputSpec, Sample, Skipped, memory_dataset
from calibration.errors import CalibrationError, NoSampleError
from calibration.observer import merge
from calibration.runs import Run
from calibration.samples import Stamp, digest_sample
from calibration.state import Part, State, decode_state, encode_state
from calibration.table import Sha256
from device.errors import TandemError
from pipelines.config import PreprocessConfig
from toolkit.cache import CALIBRATING, cache_folder, code_version, key_of, read_entry, write_entry
from toolkit.errors import WorkersError, about
from toolkit.quantize.observe import (
    ActivationRunner,
    SharedRunner,
    observe_run,
    sample_threads,
    usable_cores,
)
from toolkit.quantize.ranges.data import input_specs, open_data
from toolkit.quantize.ranges.split import Head
from toolkit.quantize.trials.metrics import int8_macs
from toolkit.workers import RefusedError, Workers, tasks_here

MAGIC = b"TNDMSHD\n"
WORK = 8e10  # multiplications of a shard at least: a second of one core, about
MIN_SAMPLES, MAX_SAMPLES, SHARDS = 256, 1024, 64  # of a shard of a small model; shards of a pass
_HASH_BYTES = hashlib.sha256().digest_size
_OPENING = threading.Lock()


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was observed in the samples from `start` to `stop` of a data set.

    `state`: as `calibration.state` writes it, empty if no sample could be read. `channels`: by
    tensor their number, and a bit for each, set if it was ever non-zero.
    """

    format: Literal[1]
    key: Sha256
    start: Annotated[int, Meta(ge=0)]
    stop: Annotated[int, Meta(ge=1)]
    samples: Annotated[int, Meta(ge=0)]
    skipped: tuple[tuple[str, str], ...]
    channels: dict[str, tuple[Annotated[int, Meta(ge=1)], bytes]]
    state: bytes


class _Job(msgspec.Struct, frozen=True):
    """What workers must know; nothing of it is secret. `first`: end of the head, and the hash of
    the first sample and its activations. `shards`: hash of the keys of all, so that the files are
    opened anew if one has changed."""

    cache: str
    graph: Sha256
    tensors: tuple[str, ...]
    data: str
    preprocess: PreprocessConfig | None
    samples: int | None
    first: tuple[int, str]
    shards: Sha256
    threads: int
    tasks_by_host: dict[str, int]


@dataclass(frozen=True, slots=True)
class ShardedPass:
    """A pass of `graph` over the data at `path`: `head` is observed here, the rest in shards.

    `first`: hash of the first sample and its activations, which tells machines apart whose floating
    point gives other bits.
    """

    graph: bytes
    tensors: Sequence[str]
    inputs: Sequence[InputSpec]
    path: Path
    preprocess: PreprocessConfig | None
    samples: int | None
    head: Head
    first: str

    @property
    def data(self) -> Divisible:
        """The samples of the pass, with those of the head."""
        return self.head.data

    @property
    def graph_sha256(self) -> str:
        """Hash of the graph that is run."""
        return hashlib.sha256(self.graph).hexdigest()

    def ranges(self, count: int) -> list[tuple[int, int]]:
        """Cut the samples after the head into `count` ranges."""
        first, rest = self.head.stop, len(self.data) - self.head.stop
        return list(pairwise(first + rest * number // count for number in range(count + 1)))

    def key(self, start: int, stop: int) -> str:
        """Return the cache key of the samples `start` to `stop` (not included)."""
        description = _description(
            self.graph_sha256, self.first, self.tensors, self.inputs, self.preprocess
        )
        return _key(description, self.data, start, stop)

    def observe(self, run: Run, start: int, stop: int) -> bytes:
        """Observe a shard in this process. Raises CalibrationError: a file changed meanwhile."""
        part = self.data.part(start, stop)
        before = part.stamps()
        shard = _observed(
            run, self.data, self.tensors,
            key=self.key(start, stop), start=start, stop=stop, threads=sample_threads(),
        )  # fmt: skip
        if changed := _changed(before, part.stamps()):
            raise CalibrationError(
                f"{changed} was changed while samples {start} to {stop} ran: observe that shard "
                "again once nothing writes to the data"
            )
        return shard


def _description(
    graph_sha256: str,
    first: str,
    tensors: Sequence[str],
    inputs: Sequence[InputSpec],
    preprocess: PreprocessConfig | None,
) -> str:
    return key_of(
        code_version(), graph_sha256, first, repr((list(tensors), inputs)),
        msgspec.json.encode(preprocess),
    )  # fmt: skip


def _changed(before: Mapping[str, Stamp], after: Mapping[str, Stamp]) -> str:
    """Return a file that was changed between two looks, "" if none was."""
    return next((name for name, stamp in before.items() if after[name] != stamp), "")


def _key(description: str, data: Divisible, start: int, stop: int) -> str:
    return key_of(description, repr((start, stop)), data.part(start, stop).sha256())


def sharded_pass(
    graph: ir.Model,
    tensors: Sequence[str],
    head: Head,
    run: Run,
    *,
    path: Path,
    preprocess: PreprocessConfig | None,
    samples: int | None,
) -> ShardedPass:
    """Return the pass of a graph. Raises CalibrationError: the graph is too large to be sent."""
    try:
        serialized = ir.to_proto(graph).SerializeToString(deterministic=True)
    except ValueError as error:  # protobuf ends at 2 GiB
        raise CalibrationError(
            f"the model is too large for shards ({error}): calibrate it in one process"
        ) from error
    inputs, first = input_specs(graph), _digest(run, head.observed[0])
    return ShardedPass(serialized, tensors, inputs, path, preprocess, samples, head, first)


def shard_count(graph: ir.Model, samples: int) -> int:
    """Return how many shards are worth their cost; it depends on model and data alone."""
    macs = sum(int8_macs(graph).values())
    least = max(1, min(MIN_SAMPLES, int(WORK / macs))) if macs else MIN_SAMPLES
    return -(-samples // max(least, min(MAX_SAMPLES, -(-samples // SHARDS))))


def shards_of_workers(
    sharded: ShardedPass,
    count: int,
    workers: Workers,
    on_progress: Callable[[int, int], None],
) -> Iterator[Shard]:
    """Yield the shards, of the cache or of workers, in the order in which they come."""
    total, done = len(sharded.data), sharded.head.stop
    with _naming_changes(sharded.data):
        keys = {place: sharded.key(*place) for place in sharded.ranges(count)}
        for shard in _cached_or_computed(sharded, keys, workers):
            yield shard
            done += shard.stop - shard.start
            on_progress(done, total)


@contextmanager
def _naming_changes(data: Divisible) -> Iterator[None]:
    """Raise CalibrationError with a file that was changed meanwhile, if workers fail."""
    before = data.stamps()
    try:
        yield
    except WorkersError as error:
        if changed := _changed(before, data.stamps()):
            raise CalibrationError(
                f"{changed} was changed while workers read it: calibrate again once nothing writes "
                "to the data"
            ) from error
        raise


def _cached_or_computed(
    sharded: ShardedPass, keys: Mapping[tuple[int, int], str], workers: Workers
) -> Iterator[Shard]:
    """Yield the shards of the cache, then those that workers compute, which the cache gets."""
    missing: dict[tuple[int, int], str] = {}

    def check(place: tuple[int, int], content: bytes) -> str:
        return _misfit(content, keys[place], place, sharded.tensors)

    for place, key in keys.items():
        cached = read_entry("shards", key)
        if cached is None or check(place, cached):
            missing[place] = key
        else:
            yield decode_shard(cached, "a shard of the cache")
    if not missing:
        return
    job = _job(sharded, keys, workers)
    results = workers.run(
        observe_shard,
        {place: (job, key, *place) for place, key in missing.items()},
        alike=True,
        model_bytes=len(sharded.graph),
        packages=CALIBRATING,
        check=check,
    )
    for place, content in results:
        write_entry("shards", missing[place], content)
        yield decode_shard(content, "a shard of a worker")


def _job(sharded: ShardedPass, keys: Mapping[tuple[int, int], str], workers: Workers) -> str:
    """Write the graph where workers read it; return the encoded job. Raises CalibrationError."""
    if not write_entry("graphs", sharded.graph_sha256, sharded.graph):
        raise CalibrationError(
            f"{cache_folder()} cannot be written, where workers read the model: set TANDEM_CACHE "
            "to a folder that they see, too"
        )
    job = _Job(
        cache=str(cache_folder()),
        graph=sharded.graph_sha256,
        tensors=tuple(sharded.tensors),
        data=str(sharded.path.absolute()),
        preprocess=sharded.preprocess,
        samples=sharded.samples,
        first=(sharded.head.stop, sharded.first),
        shards=key_of(*keys.values()),
        threads=workers.threads,
        tasks_by_host=workers.tasks_by_host(),
    )
    return msgspec.json.encode(job).decode()


def shards_of_files(sharded: ShardedPass, paths: Sequence[Path]) -> list[Shard]:
    """Return the shards in files. Raises CalibrationError: one is missing, or of something else."""
    shards: dict[tuple[int, int], Shard] = {}
    for path in paths:
        try:
            shard = decode_shard(path.read_bytes(), str(path))
        except OSError as error:
            raise CalibrationError(
                f"{path}: cannot read the state ({error.strerror}): check the path"
            ) from error
        place = (shard.start, shard.stop)
        if shard.stop > len(sharded.data) or sharded.key(*place) != shard.key:
            raise CalibrationError(
                f"{path} is of another version, model, option or of other data, or of a machine "
                "that computes other bits: observe that shard again"
            )
        shards[place] = shard
    ends = [(sharded.head.stop, sharded.head.stop), *sorted(shards)]
    ends.append((len(sharded.data), len(sharded.data)))
    for (_, stop), (start, _) in pairwise(ends):
        if stop != start:
            what = f"lack samples {stop} to" if stop < start else f"hold twice sample {start} to"
            raise CalibrationError(
                f"the {len(paths)} states {what} {max(start, stop)}: give those of all shards, "
                "cut into the same number"
            )
    return list(shards.values())


def merged(
    head: Observation, sharded: ShardedPass, watch: ChannelWatch, shards: Iterator[Shard]
) -> Observation | None:
    """Return the observation of head and shards, whose channels go to `watch`.

    None: an unreadable picture moves those after it into other batches than those of the shards.
    """
    histograms, without_state = dict(head.histograms), list[Shard]()
    for shard in shards:
        if shard.state:
            theirs = decode_state(shard.state, f"shard {shard.start} to {shard.stop}").histograms
            histograms = {name: merge(one, theirs[name]) for name, one in histograms.items()}
        without_state.append(msgspec.structs.replace(shard, state=b""))
    without_state.sort(key=lambda shard: shard.start)
    if sharded.data.shifts and any(shard.skipped for shard in without_state[:-1]):
        return None
    for shard in without_state:
        watch.merge(_unpacked(shard), shard.samples)
    skipped = [Skipped(*row) for shard in without_state for row in shard.skipped]
    return replace(
        head,
        histograms=histograms,
        samples=head.samples + sum(shard.samples for shard in without_state),
        skipped=(*sharded.head.skipped, *skipped),
        fed_sha256=key_of(head.fed_sha256, *(shard.key for shard in without_state)),
    )


def observe_head(
    run: Run, sharded: ShardedPass, on_progress: Callable[[int, int], None]
) -> Observation:
    """Observe the samples that are not left to shards."""
    head = observe_run(
        run, memory_dataset(sharded.head.observed), sharded.tensors,
        lambda done, _: on_progress(done, len(sharded.data)),
    )  # fmt: skip
    return replace(head, requested=sharded.data.requested)


def observe_shard(job: str, key: str, start: int, stop: int) -> bytes:
    """The task of a worker: observe samples `start` to `stop`; returns the encoded shard."""
    with _OPENING:
        work = _opened(job)
    part = work.data.part(start, stop)
    before = part.stamps()
    with ThreadPoolExecutor(1) as thread:  # hashes files while others of its threads run samples
        local_key = thread.submit(_key, work.description, work.data, start, stop)
        try:
            with about(f"samples {start} to {stop}"):
                return _observed(
                    work.run, work.data, work.tensors, key=key, start=start, stop=stop,
                    threads=work.threads,
                )  # fmt: skip
        finally:  # before any error of other files
            is_same = local_key.result() == key
            if changed := _changed(before, part.stamps()):
                raise RefusedError(f"read {changed} while it was changed")
            if not is_same:
                raise RefusedError(f"has other files for samples {start} to {stop}")


@dataclass(frozen=True, slots=True)
class _Work:
    run: Run
    data: Divisible
    tensors: tuple[str, ...]
    threads: int
    description: str


@lru_cache(maxsize=2)
def _opened(text: str) -> _Work:
    """Open graph and data of a job, once per worker. Raises RefusedError."""
    job = msgspec.json.decode(text, type=_Job)
    content = read_entry("graphs", job.graph, Path(job.cache))
    if content is None or hashlib.sha256(content).hexdigest() != job.graph:
        raise RefusedError(
            f"finds no model {job.graph[:12]} in {job.cache}: set TANDEM_CACHE to a folder that "
            "all workers see"
        )
    graph = ir.from_proto(onnx.ModelProto.FromString(content))
    cores = job.threads or usable_cores() // tasks_here(job.tasks_by_host)
    threads = min(sample_threads(), job.threads or usable_cores())
    try:
        inputs = input_specs(graph)
        data = open_data(Path(job.data), inputs, job.preprocess, job.samples)
        run = SharedRunner(ActivationRunner(graph, job.tensors, max(1, cores // threads)))
        assert isinstance(data, Divisible)
        stop, expected = job.first
        digest = _digest(run, next(iter(data.part(0, stop)), {}))
    except TandemError as error:
        raise RefusedError(f"cannot take part: {error}") from error
    if digest != expected:
        raise RefusedError(
            "computes other bits for the first sample: its CPU, its versions of packages or its "
            "files differ"
        )
    description = _description(job.graph, expected, job.tensors, inputs, job.preprocess)
    return _Work(run, data, job.tensors, threads, description)


def _observed(
    run: Run,
    data: Divisible,
    tensors: Sequence[str],
    *,
    key: str,
    start: int,
    stop: int,
    threads: int,
) -> bytes:
    watch, part = ChannelWatch(run), data.part(start, stop)
    state, samples = b"", 0
    try:
        # The key holds the hash of the files, which must not change meanwhile.
        observation = observe_run(watch, part, tensors, threads=threads, hash_inputs=False)
    except NoSampleError:
        skipped = part.skipped
    else:
        skipped, samples = observation.skipped, observation.samples
        state = encode_state(State(key, (Part(key, samples),), observation.histograms))
    channels = {
        name: (alive.size, np.packbits(alive).tobytes()) for name, alive in watch.alive.items()
    }
    rows = tuple((row.name, row.reason) for row in skipped)
    body = msgspec.msgpack.encode(Shard(1, key, start, stop, samples, rows, channels, state))
    return MAGIC + hashlib.sha256(body).digest() + body


def decode_shard(data: bytes, where: str) -> Shard:
    """Read an encoded shard; raises CalibrationError that starts with `where`."""
    head, body = data[: len(MAGIC) + _HASH_BYTES], data[len(MAGIC) + _HASH_BYTES :]
    if not head.startswith(MAGIC):
        raise CalibrationError(f"{where} is no state of a shard: check the path")
    try:
        if head != MAGIC + hashlib.sha256(body).digest():
            raise ValueError("its hash does not fit")
        shard = msgspec.msgpack.decode(body, type=Shard)
        if shard.stop <= shard.start or bool(shard.state) != bool(shard.samples):
            raise ValueError("its samples contradict each other")
        _unpacked(shard)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CalibrationError(f"{where} is damaged ({error}): observe that shard again") from error
    return shard


def _misfit(content: bytes, key: str, place: tuple[int, int], tensors: Sequence[str]) -> str:
    """Why an encoded shard is not that of `key`; empty if it is."""
    where = "its shard"
    try:
        shard = decode_shard(content, where)
        names = decode_state(shard.state, where).histograms.keys() if shard.state else set(tensors)
    except CalibrationError as error:
        return f"gives no shard: {error}"
    fits = (shard.key, (shard.start, shard.stop), set(names)) == (key, place, set(tensors))
    return "" if fits else "gives a shard of other samples, tensors or files"


def _unpacked(shard: Shard) -> Mapping[str, NDArray[np.bool_]]:
    """The channels of a shard; ValueError if they are impossible."""
    channels = {}
    for name, (size, packed) in shard.channels.items():
        if len(packed) != -(-size // 8):
            raise ValueError(f"{len(packed)} bytes for {size} channels of '{name}'")
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=size)
        channels[name] = bits.astype(np.bool_)
    return channels


def _digest(run: Run, sample: Sample) -> str:
    """The hash of a sample and its activations."""
    digest = hashlib.sha256()
    digest_sample(digest, sample)
    if sample:
        digest_sample(digest, run(sample))
    return digest.hexdigest()
