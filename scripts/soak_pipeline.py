"""Run a pipeline for long, or through many faults, and say whether anything grows or leaks.

    python -m scripts.soak_pipeline --minutes 30 [--json]
    python -m scripts.soak_pipeline --faults 10000 --seed 7

The long run reads 30 frames a second from a real RTSP server and publishes them to a real broker.
Memory must not grow, threads, handles and child processes must be as many at the end as at the
start, and no frame may be older than its bound when its turn comes. With --faults the child that
reads the camera is killed and frozen at random, and so is the broker, until so many frames are
through; then the same must hold. The exit status is 1 where something does not.
"""

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from device.protocol.messages import ChildMessage, Stats
from pipelines.config import PipelineConfig, SourceConfig
from pipelines.runtime.batch import Model
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sink_config import MqttSink
from pipelines.sinks.table import Broker, FrameResult
from pipelines.sources.gst import CHILD
from pipelines.vision import cv2
from scripts.pipeline_parts import (
    LABELS,
    BrokerProcess,
    EngineDouble,
    arrivals,
    camera,
    detector_pipeline,
    listener,
    made_ns,
)

BOUND_MS = 500.0  # of the source: older frames are dropped
SLACK_MS = 100.0  # a capture time is estimated, and taking a frame takes time
SETTLE_S = 20.0
GROWTH_MB = 8.0
SETTLE_S = 20.0  # of a long run; caches fill
FAST_FPS = 240  # of the camera that faults are injected to
STALL_S = 0.5
TEST_CAMERA = f"videotestsrc is-live=true ! video/x-raw,width=64,height=64,framerate={FAST_FPS}/1"


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds: memory in MB, threads, open handles, child processes."""

    rss_mb: float
    threads: int
    handles: int
    children: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run ended; `problems`: what does not hold, empty if all does."""

    frames: int
    seconds: float
    fps: float
    received: int
    oldest_ms: float
    age_p50_ms: float
    age_p99_ms: float
    growth_mb: float
    before: Holdings
    after: Holdings
    dropped: dict[str, int]
    faults: dict[str, int]
    problems: tuple[str, ...]


@dataclass(slots=True)
class _Watch:
    """What is noted while frames go by: ages in ms when their turn came, and memory."""

    has_clock: bool
    count: int = 0
    ages_ms: list[float] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    sampled_s: float = 0.0

    def see(self, result: FrameResult) -> None:
        self.count += 1
        if self.has_clock:
            turn = result.frame.t_recv.mono_ns + result.event.latency_ms["wait"] * 1e6
            self.ages_ms.append((turn - made_ns(result.frame.image)) / 1e6)
        now_s = time.monotonic()
        if now_s - self.sampled_s > 1.0:
            self.sampled_s = now_s
            self.memory.append((now_s, holdings().rss_mb))

    def hear(self, message: ChildMessage) -> None:
        if isinstance(message, Stats):
            self.dropped = Counter(message.dropped)


def holdings() -> Holdings:
    """Return what this process holds now."""
    status = Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in status if len(line.split()) > 1}
    return Holdings(
        rss_mb=int(values["VmRSS"]) / 1024,
        threads=int(values["Threads"]),
        handles=len(os.listdir("/proc/self/fd")),
        children=len(children()),
    )


def children(word: str = "") -> list[int]:
    """Return the ids of this process's children, zombies too, whose command line has a word."""
    pids: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = path.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
            if parent == os.getpid() and word in command:
                pids.append(int(path.parent.name))
    return pids


def growth_mb(memory: list[tuple[float, float]], settle_s: float) -> float:
    """Return by how much the last quarter of a run holds more than its second, in MB; the first
    `settle_s` seconds do not count."""
    if not memory:
        return 0.0
    steady = [mb for at_s, mb in memory if at_s - memory[0][0] >= settle_s] or [memory[-1][1]]
    quarter = max(1, len(steady) // 4)
    return median(steady[-quarter:]) - median(steady[quarter : 2 * quarter] or steady[:1])


def soak(minutes: float, report: Callable[[str], None]) -> Verdict:
    """Run for so long from RTSP to the broker."""
    stop = threading.Event()
    watch = _Watch(has_clock=True)
    with camera() as server, _broker() as (broker, folder):
        source = SourceConfig(uri=server.url, id="cam", frames="bounded", max_age_ms=BOUND_MS)
        out = folder / "arrivals"
        with listener(broker.port, out):
            timer = threading.Timer(minutes * 60.0, stop.set)
            ticker = threading.Thread(target=_tell, args=(watch, stop, report), daemon=True)
            timer.start()
            ticker.start()
            verdict = _run(_config(source), broker, watch, stop, engine_s=0.005)
            timer.cancel()
            stop.set()
            ticker.join()
            time.sleep(0.5)  # the last messages are under way
        received = len(arrivals(out))
    return _judged(verdict, received, watch, settle_s=min(SETTLE_S, minutes * 15.0))


def with_faults(frames: int, seed: int, report: Callable[[str], None]) -> Verdict:
    """Run until so many frames are through, while parts are killed and frozen at random."""
    stop = threading.Event()
    watch = _Watch(has_clock=False)
    with _broker() as (broker, _):
        source = SourceConfig(uri=f"gst://{TEST_CAMERA}", id="cam", frames="every", stall_s=STALL_S)
        chaos = _Chaos(random.Random(seed), broker, stop)
        thread = threading.Thread(target=chaos.run)
        ticker = threading.Thread(target=_tell, args=(watch, stop, report), daemon=True)
        thread.start()
        ticker.start()
        try:
            verdict = _run(_config(source), broker, watch, stop, engine_s=0.0, frames=frames)
        finally:
            stop.set()
            thread.join()
            ticker.join()
    watched_s = watch.memory[-1][0] - watch.memory[0][0] if watch.memory else 0.0
    verdict = replace(verdict, faults=dict(chaos.done))
    return _judged(verdict, 0, watch, settle_s=watched_s / 4)


@dataclass(frozen=True, slots=True)
class _Raw:
    """What a run gave, before it is judged."""

    before: Holdings
    after: Holdings
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)


class _Chaos:
    """Kills and freezes the camera's child and the broker, one at a time."""

    def __init__(self, rng: random.Random, broker: BrokerProcess, stop: threading.Event) -> None:
        self.done: Counter[str] = Counter()
        self._rng = rng
        self._broker = broker
        self._stop = stop
        self._acts: tuple[tuple[str, Callable[[], None]], ...] = (
            ("camera killed", lambda: self._signal(signal.SIGKILL)),
            ("camera frozen", lambda: self._signal(signal.SIGSTOP)),
            ("broker killed", self._kill_broker),
            ("broker frozen", self._freeze_broker),
        )

    def run(self) -> None:
        while not self._stop.wait(self._rng.uniform(0.2, 1.5)):
            name, act = self._rng.choice(self._acts)
            act()
            self.done[name] += 1

    def _signal(self, number: signal.Signals) -> None:
        for pid in children(CHILD):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill_broker(self) -> None:
        self._broker.kill()
        self._stop.wait(self._rng.uniform(0.0, 0.5))
        self._broker.start()

    def _freeze_broker(self) -> None:
        self._broker.freeze()
        self._stop.wait(self._rng.uniform(0.0, 0.5))
        self._broker.thaw()


def _config(source: SourceConfig) -> PipelineConfig:
    return detector_pipeline(source, sinks=(MqttSink(),))


def _run(
    config: PipelineConfig,
    broker: BrokerProcess,
    watch: _Watch,
    stop: threading.Event,
    *,
    engine_s: float,
    frames: int | None = None,
) -> _Raw:
    engine = EngineDouble(engine_s)
    # What a first run takes for ever: modules, thread pools, the encoder's tables.
    _warm_up(engine)
    before = holdings()
    begin_s = time.monotonic()
    run_pipeline(
        config,
        Model(engine, LABELS, ""),
        RunOptions(
            emit=watch.hear,
            stop=stop,
            broker=Broker("127.0.0.1", broker.port, "bench"),
            patient=True,
            frames=frames,
        ),
        watch=watch.see,
    )
    seconds = time.monotonic() - begin_s
    return _Raw(before=before, after=_settled(before), seconds=seconds)


def _settled(before: Holdings) -> Holdings:
    """Return what is held once threads of the MQTT library have ended, which they do by themselves;
    at the latest after `SETTLE_S`."""
    until_s = time.monotonic() + SETTLE_S
    while True:
        gc.collect()  # its clients are in cycles, and hold sockets until then
        now = holdings()
        if not _grown(before, now) or time.monotonic() > until_s:
            return now
        time.sleep(0.1)


def _grown(before: Holdings, after: Holdings) -> list[str]:
    """Say of what there is more than before."""
    pairs = (
        (name, getattr(before, name), getattr(after, name))
        for name in ("threads", "handles", "children")
    )
    return [f"{name}: {first} before, {last} after" for name, first, last in pairs if last > first]


def _warm_up(engine: EngineDouble) -> None:
    config = detector_pipeline(SourceConfig(uri="test://", id="cam"))
    run_pipeline(config, Model(engine, LABELS, ""), RunOptions(frames=3))


def _judged(raw: _Raw, received: int, watch: _Watch, *, settle_s: float) -> Verdict:
    ages = sorted(watch.ages_ms) or [0.0]
    growth = growth_mb(watch.memory, settle_s)
    problems = []
    if watch.count == 0:
        problems.append("no frame came through")
    if growth > GROWTH_MB:
        problems.append(f"memory grew by {growth:.1f} MB; the limit is {GROWTH_MB}")
    problems += _grown(raw.before, raw.after)
    if ages[-1] > BOUND_MS + SLACK_MS:
        problems.append(f"a frame was {ages[-1]:.0f} ms old at its turn; the bound is {BOUND_MS}")
    return Verdict(
        frames=watch.count,
        seconds=round(raw.seconds, 1),
        fps=round(watch.count / raw.seconds, 2),
        received=received,
        oldest_ms=round(ages[-1], 1),
        age_p50_ms=round(ages[len(ages) // 2], 1),
        age_p99_ms=round(ages[int(len(ages) * 0.99)], 1),
        growth_mb=round(growth, 2),
        before=raw.before,
        after=raw.after,
        dropped=dict(watch.dropped),
        faults=raw.faults,
        problems=tuple(problems),
    )


def _tell(watch: _Watch, stop: threading.Event, report: Callable[[str], None]) -> None:
    while not stop.wait(10.0):
        now = holdings()
        report(
            f"{watch.count} frames, {now.rss_mb:.1f} MB, {now.threads} threads,"
            f" {now.handles} handles"
        )


@contextmanager
def _broker() -> Iterator[tuple[BrokerProcess, Path]]:
    with tempfile.TemporaryDirectory() as name:
        broker = BrokerProcess(Path(name))
        broker.start()
        try:
            yield broker, Path(name)
        finally:
            broker.kill()


def main() -> int:
    """Run and print; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of the long run")
    parser.add_argument("--faults", type=int, metavar="FRAMES", help="inject faults instead")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    sys.setswitchinterval(0.0005)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if arguments.faults is None:
        verdict = soak(arguments.minutes, report)
    else:
        verdict = with_faults(arguments.faults, arguments.seed, report)
    if arguments.json:
        print(json.dumps(asdict(verdict)))
    else:
        for name, value in asdict(verdict).items():
            print(f"{name:12} {value}")
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
