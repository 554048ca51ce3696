"""Measure a pipeline against its goal figures: python -m scripts.bench_pipeline [--json].

    python -m scripts.bench_pipeline --only G1 G7 --seconds 20
    pip install --no-deps supervision trackers   # peers, where they install

G1 to G12 are the goals; beside each stands the best figure that others were seen with, and what
other libraries take for the same work here (`scripts/pipeline_peers.py`). Cameras are real RTSP
servers with a clock in their pictures, the broker is mosquitto, and the engine's double takes a
fixed time. The goals are for a machine that does nothing else: others make it miss some.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig, SourceConfig
from pipelines.decode_config import UltralyticsDetect
from pipelines.frame import Frame, Stamp
from pipelines.results import Detections
from pipelines.runtime.batch import BatchRunner, Model
from pipelines.runtime.in_flight import run_frames
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sink_config import MqttSink
from pipelines.sinks.events import encode_event, make_event
from pipelines.sinks.table import Broker, FrameResult
from pipelines.sources.batching import Pace, batches_of
from pipelines.sources.live import Ended, LiveSource, Waiting
from pipelines.sources.table import open_source
from pipelines.stages.decode import decode, view_of
from pipelines.stages.preprocess import Preprocessor, fit
from pipelines.vision import cv2
from scripts.bench_tracker import ours, scene
from scripts.pipeline_parts import (
    LABELS,
    BurstyCamera,
    EngineDouble,
    TickingCamera,
    arrivals,
    broker,
    camera,
    clock_of,
    detector_pipeline,
    head,
    listener,
    made_ns,
    read_clock,
)
from scripts.pipeline_peers import PEERS, Peer, time_ms

ENGINE_S = 0.005
SWITCH_INTERVAL_S = 0.0005  # that of pipelines/__main__.py, which is for processes of its own
OLDEST_MS = 350.0  # frames of G9 that are older are dropped, so that one batch later they are < 535
SIDE = 640


@dataclass(frozen=True, slots=True)
class Figure:
    """One goal: what, the limit, what others reach, and what was measured here."""

    id: str
    what: str
    limit: float
    unit: str
    anchor: str
    ours: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the goal is met."""
        return self.ours >= self.limit if self.at_least else self.ours <= self.limit


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the measurements take: seconds of a stream, runs of a stage."""

    seconds: float
    runs: int


def stream(effort: Effort) -> list[Figure]:
    """G1, G2, G10, G12: one run from RTSP to a subscriber."""
    clocks: dict[int, NDArray[np.uint8]] = {}
    overhead_ms: list[float] = []
    loop_cpu_ns: list[int] = []
    first_s: list[float] = []
    count = max(60, int(effort.seconds * 30))
    with tempfile.TemporaryDirectory() as folder, camera() as server, broker(Path(folder)) as port:
        out = Path(folder) / "arrivals"
        begin_s = time.monotonic()

        def watch(result: FrameResult) -> None:
            first_s.append(time.monotonic() - begin_s)
            picture = result.frame.nv12  # not ours to pay: to convert it, and to read it now
            pixels = result.frame.image if picture is None else picture.rows
            clocks[result.frame.seq] = clock_of(pixels)
            latency = result.event.latency_ms
            overhead_ms.append(latency["total"] - latency["infer"])
            loop_cpu_ns.append(time.thread_time_ns())

        with listener(port, out):
            config = detector_pipeline(
                SourceConfig(uri=server.url, id="cam"), sinks=(MqttSink(events=False),)
            )
            model = Model(EngineDouble(ENGINE_S), LABELS, "")
            target = Broker("127.0.0.1", port, "bench")
            begin_s = time.monotonic()
            cpu_s = time.process_time()
            run_pipeline(config, model, RunOptions(broker=target, frames=count), watch=watch)
            cpu_share = (time.process_time() - cpu_s) / (time.monotonic() - begin_s)
            time.sleep(0.5)  # the last messages are under way
        ends = arrivals(out)
    glass_ms = [
        (ends[seq] - read_clock(clocks[seq])) / 1e6 for seq in sorted(clocks)[30:] if seq in ends
    ]
    steady = overhead_ms[30:]
    return [
        Figure("G1", "made to MQTT received, 5 ms engine, p50", 10.0, "ms",
               "69 + 6.5 with OpenCV's default capture; 136 by ffmpeg's pipe", _p(glass_ms, 50)),
        Figure("G1", "the same, p99", 17.0, "ms", "16.3, a prototype", _p(glass_ms, 99)),
        Figure("G2", "overhead without engine, 58 objects, p50", 1.5, "ms",
               "12 to 18 of Ultralytics on an Orin Nano", _p(steady, 50)),
        Figure("G2", "the same, p99", 2.5, "ms", "2.36, a prototype", _p(steady, 99)),
        Figure("G10", "start to first result, engine loaded", 0.5 + ENGINE_S, "s",
               "1.0 of OpenCV, and 0.9 old", first_s[0]),
        Figure("G12", "CPU of a 30 FPS camera, without decoding", 10.0, "% of a core",
               "6, a prototype", 100.0 * cpu_share),
        Figure("G12", "CPU of the loop's thread for a frame, p50", 2.8, "ms",
               "", _p((np.diff(loop_cpu_ns)[30:] / 1e6).tolist(), 50)),
    ]  # fmt: skip


def preprocess_figures(effort: Effort) -> list[Figure]:
    """G3: 1080p to 640 x 640."""
    image = np.random.default_rng(0).integers(0, 256, (1080, 1920, 3), np.uint8)
    floats = Preprocessor(PreprocessConfig(width=SIDE, height=SIDE))
    pixels = Preprocessor(PreprocessConfig(width=SIDE, height=SIDE, dtype="uint8", scale=1.0))
    anchor = "1.3 to 1.7 of blobFromImage and of transpose + astype"
    return [
        Figure("G3", "1080p to 640, float32", 0.66, "ms", anchor,
               time_ms(lambda: floats.run(image), effort.runs)),
        Figure("G3", "1080p to 640, bytes", 0.50, "ms", anchor,
               time_ms(lambda: pixels.run(image), effort.runs)),
    ]  # fmt: skip


def decode_figures(effort: Effort) -> list[Figure]:
    """G4: a YOLOv8 head to boxes in the frame."""
    preprocess = PreprocessConfig(width=SIDE, height=SIDE)
    view = view_of(fit(1080, 1920, preprocess), (1080, 1920, 3), preprocess)
    outputs = {"output0": head(60)}
    ours_ms = time_ms(lambda: decode(outputs, UltralyticsDetect(), view), effort.runs)
    return [Figure("G4", "decode 84 x 8400, NMS, clip", 0.43, "ms",
                   "3.0 of supervision for NMS of 300 alone", ours_ms)]  # fmt: skip


def track_figures(effort: Effort) -> list[Figure]:
    """G5: 100 objects."""
    update = ours()
    times_ms = []
    for frame in scene(100, max(60, effort.runs // 2)):
        begin_s = time.perf_counter()
        update(frame.detections, frame.time_s)
        times_ms.append(1e3 * (time.perf_counter() - begin_s))
    return [Figure("G5", "tracker, 100 objects", 0.5, "ms",
                   "2.7 of trackers, 6.9 of supervision", _p(times_ms, 50))]  # fmt: skip


def encode_figures(effort: Effort) -> list[Figure]:
    """G6: 100 detections to JSON."""
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, 900, (100, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(20, 150, (100, 2))], 1)
    scores = np.sort(rng.uniform(0.2, 1.0, 100))[::-1]
    detections = Detections(
        boxes.astype(np.float32), scores.astype(np.float32), rng.integers(0, 80, 100)
    )
    now = Stamp.now()
    frame = Frame(np.zeros((1080, 1920, 3), np.uint8), 0, now, now, "test://")

    def encode() -> bytes:
        return encode_event(make_event("bench", frame, detections, LABELS, {}))

    anchor = "0.28 and 14 KB of json; 0.05 of orjson"
    return [
        Figure("G6", "100 detections to JSON", 0.10, "ms", anchor, time_ms(encode, effort.runs)),
        Figure("G6", "their bytes", 9.0, "KB", anchor, len(encode()) / 1e3),
    ]


def recovery_figures(effort: Effort) -> list[Figure]:
    """G7: a camera freezes and comes back."""
    stop, seen = threading.Event(), threading.Event()
    latest_s = [0.0]
    with camera() as server:
        config = SourceConfig(uri=server.url, id="cam")
        with open_source(config, Waiting(stop)) as source:

            def take() -> None:
                for _ in batches_of([source], Waiting(stop), 1, Pace()):
                    latest_s[0] = time.monotonic()
                    seen.set()

            thread = threading.Thread(target=take)
            thread.start()
            time.sleep(1.5)
            server.freeze()
            frozen_s = time.monotonic()
            while source.away is None and time.monotonic() < frozen_s + 30:
                time.sleep(0.005)
            noticed_s = time.monotonic() - frozen_s
            time.sleep(max(3.0, min(8.0, effort.seconds / 3)))
            seen.clear()
            server.thaw()
            back_s = time.monotonic()
            seen.wait(30.0)
            again_s = latest_s[0] - back_s
            stop.set()
            thread.join()
    anchor = "90 s of OpenCV, 20 + 10 of Frigate, 15 of Roboflow, 10 of Savant"
    return [
        Figure("G7", "frozen camera noticed after", 1.3, "s", anchor, noticed_s),
        Figure("G7", "frames again after its return", 2.2, "s", anchor, again_s),
    ]


def slow_figures(effort: Effort) -> list[Figure]:
    """G8: the engine takes 50 ms, the camera gives a frame every 33."""
    engine_s = 0.05
    ages_ms: list[float] = []

    def watch(result: FrameResult) -> None:
        ages_ms.append((time.monotonic_ns() - made_ns(result.frame.image)) / 1e6)

    with camera() as server:
        config = detector_pipeline(SourceConfig(uri=server.url, id="cam"))
        model = Model(EngineDouble(engine_s), LABELS, "")
        frames = max(40, int(effort.seconds * 15))
        run_pipeline(config, model, RunOptions(frames=frames), watch=watch)
    steady = ages_ms[10:]
    third = len(steady) // 3
    growth = median(steady[-third:]) - median(steady[:third])
    anchor = "136, and 6200 and growing without a slot"
    return [
        Figure("G8", "age at the result, 50 ms engine, p50", 1e3 * engine_s + 2 * 1e3 / 30, "ms",
               anchor, _p(steady, 50)),
        Figure("G8", "its growth, last third to first", 5.0, "ms", anchor, growth),
    ]  # fmt: skip


def many_figures(effort: Effort) -> list[Figure]:
    """G9: eight bursty cameras on one engine, and the same with an engine that is too slow."""
    rate, p95, dropped = _bursty(EngineDouble(0.004, 0.002, batch=8), effort.seconds)
    slow_rate, slow_p95, _ = _bursty(EngineDouble(0.005, 0.016, batch=8), effort.seconds)
    anchor = "115 FPS, 190 ms of Roboflow; 30 FPS, 470 ms of a batch that waits for all"
    return [
        Figure("G9", f"8 bursty cameras ({dropped} dropped)", 115.0, "FPS of 120", anchor, rate,
               at_least=True),
        Figure("G9", "received to result, p95", 190.0, "ms", anchor, p95),
        Figure("G9", "engine of 60 FPS", 55.0, "FPS", "58 FPS, 535 ms of Roboflow", slow_rate,
               at_least=True),
        Figure("G9", "received to result there, p95", 535.0, "ms", "58 FPS, 535 ms of Roboflow",
               slow_p95),
    ]  # fmt: skip


def _bursty(engine: EngineDouble, seconds: float) -> tuple[float, float, int]:
    """Return results a second, their p95 age in ms, and the number of drops."""
    stop = threading.Event()
    waiting = Waiting(stop)
    start_s = time.monotonic() + 0.5
    configs = [
        SourceConfig(uri="test://", id=f"cam{n}", frames="bounded", max_age_ms=OLDEST_MS)
        for n in range(8)
    ]

    def opener(number: int) -> Callable[[Ended], BurstyCamera]:
        return lambda ended: BurstyCamera(start_s + number * 0.271)

    runner = BatchRunner(detector_pipeline(*configs), Model(engine, LABELS, ""))
    sources = [LiveSource(c.id, opener(n), c, waiting) for n, c in enumerate(configs)]
    ages_ms: list[float] = []
    threading.Timer(seconds + 0.5 + 8 * 0.271 + 1.0, stop.set).start()
    begin_s = 0.0
    for source in sources:
        source.__enter__()
    runner.watch_drops(sources)
    for result in run_frames(sources, waiting, runner, lambda: ()):
        if time.monotonic() < start_s + 8 * 0.271 + 1.0:
            begin_s = time.monotonic()
            ages_ms.clear()
            continue
        ages_ms.append((time.monotonic_ns() - result.frame.t_recv.mono_ns) / 1e6)
    span_s = time.monotonic() - begin_s
    runner.close()
    for source in sources:
        source.__exit__(None, None, None)
    dropped = sum(sum(source.dropped.values()) for source in sources)
    return len(ages_ms) / span_s, _p(ages_ms, 95), dropped


def handoff_figures(effort: Effort) -> list[Figure]:
    """G11: from the reader's thread to the loop, beside a thread that is busy in Python."""
    stop, done = threading.Event(), threading.Event()
    waits_ms: list[float] = []

    def work() -> None:
        number = 0
        while not done.is_set():
            number += 1

    thread = threading.Thread(target=work)
    waiting = Waiting(stop)
    config = SourceConfig(uri="test://", id="cam")
    with LiveSource("ticks", lambda ended: TickingCamera(), config, waiting) as source:
        thread.start()
        for batch in batches_of([source], waiting, 1, Pace()):
            waits_ms.append((time.monotonic_ns() - batch[0].t_recv.mono_ns) / 1e6)
            if len(waits_ms) >= max(200, int(effort.seconds * 50)):
                stop.set()
    done.set()
    thread.join()
    return [Figure("G11", "hand-over beside a busy thread, p99", 1.2, "ms",
                   "20 to 63 at Python's default", _p(waits_ms, 99))]  # fmt: skip


MEASURES: tuple[tuple[tuple[str, ...], Callable[[Effort], list[Figure]]], ...] = (
    (("G1", "G2", "G10", "G12"), stream),
    (("G3",), preprocess_figures),
    (("G4",), decode_figures),
    (("G5",), track_figures),
    (("G6",), encode_figures),
    (("G7",), recovery_figures),
    (("G8",), slow_figures),
    (("G9",), many_figures),
    (("G11",), handoff_figures),
)


def measure(only: Sequence[str], effort: Effort) -> list[Figure]:
    """Return the figures of these goals, all if none is named; says on stderr what it does."""
    figures: list[Figure] = []
    for ids, run in MEASURES:
        if only and not set(only) & set(ids):
            continue
        print(f"measuring {', '.join(ids)} ...", file=sys.stderr, flush=True)
        figures += run(effort)
    return sorted(figures, key=lambda figure: int(figure.id[1:]))


def _p(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.asarray(values), percent))


def table(figures: Sequence[Figure], peers: Sequence[Peer]) -> str:
    """Return the figures as a table in Markdown."""
    lines = ["| goal | | limit | ours | | others |", "|---|---|--:|--:|---|---|"]
    for one in figures:
        sign = ">=" if one.at_least else "<="
        lines.append(
            f"| {one.id} | {one.what} | {sign} {one.limit:.3g} {one.unit} | {one.ours:.3g} |"
            f" {'holds' if one.holds else 'MISSED'} | {one.anchor} |"
        )
    lines += ["", "| the same work here | ms | |", "|---|--:|---|"]
    for peer in peers:
        shown = "" if peer.ms is None else f"{peer.ms:.2f}"
        lines.append(f"| {peer.goal}: {peer.what} | {shown} | {peer.note} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="GOAL", help="such as G1 G7")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each stream")
    parser.add_argument("--runs", type=int, default=300, help="of each stage")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    effort = Effort(arguments.seconds, arguments.runs)
    figures = measure(arguments.only, effort)
    peers = [
        peer(arguments.runs) for goal, peer in PEERS if not arguments.only or goal in arguments.only
    ]
    load = round(os.getloadavg()[0], 2)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if arguments.json:
        rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
        print(json.dumps({"figures": rows, "peers": [asdict(peer) for peer in peers],
                          "load": load, "peak_mb": peak_mb}))  # fmt: skip
        return
    print(table(figures, peers))
    print(f"\nload at the end {load}, most memory {peak_mb} MB")


if __name__ == "__main__":
    main()
