"""What a recording and a live view cost: CPU beyond the JPEG encoder, and memory.

    python -m scripts.bench_recording            10 s of 1080p at 30 frames a second
    python -m scripts.bench_recording --frames 60 --json out.json

CPU is of the whole process, user and system, less that of the encoder for the same frames: what
else runs on the machine counts little. Exit status 1: frames were lost, as on a busy machine; the
figures are of those that were taken.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from pipelines.frame import Frame, Stamp
from pipelines.results import Detections
from pipelines.sink_config import FoxgloveSink, McapSink
from pipelines.sinks.events import make_event
from pipelines.sinks.result import FrameResult, SinkContext
from pipelines.sinks.table import open_sink

FPS = 30.0
QUALITY = 85
OBJECTS = 20
PICTURES = 8
SINKS = ("mcap", "foxglove")
GOAL_CPU, GOAL_MB = "<= 15 % of a core", "<= 30 MB"


@dataclass(frozen=True, slots=True)
class Row:
    """A figure with its goal."""

    what: str
    value: float
    unit: str
    goal: str


def pictures(count: int) -> list[np.ndarray]:
    """Draw pictures of 1920 x 1080 whose JPEG files have the size of a camera's, 300 to 500 KB."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 255, (count, 270, 480, 3), np.uint8)
    return [cv2.resize(one, (1920, 1080), interpolation=cv2.INTER_CUBIC) // 3 + 80 for one in small]


def results(images: Sequence[np.ndarray], count: int) -> list[FrameResult]:
    """Return results of frames with twenty objects each."""
    boxes = np.array([[90 * k, 50 * k, 90 * k + 80, 50 * k + 40] for k in range(OBJECTS)])
    objects = Detections(
        boxes.astype(np.float32), np.full(OBJECTS, 0.9, np.float32), np.zeros(OBJECTS, np.int64)
    )
    rows = []
    for seq in range(count):
        now = Stamp.now()
        frame = Frame(images[seq % len(images)], seq, now, now, "bench")
        event = make_event("bench", frame, objects, ("thing",), {"infer": 1.0})
        rows.append(FrameResult(frame, objects, event))
    return rows


def paced_s(act: Callable[[FrameResult], None], given: Sequence[FrameResult]) -> float:
    """Return the CPU seconds of a function called at the pace of a camera, caches cold as there."""
    begin_s, next_s = time.process_time(), time.monotonic()
    for one in given:
        act(one)
        next_s += 1.0 / FPS
        time.sleep(max(0.0, next_s - time.monotonic()))
    return time.process_time() - begin_s


def encode(one: FrameResult) -> None:
    """Encode the picture as the sinks do."""
    cv2.imencode(".jpg", one.frame.image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])


def memory_mb() -> float:
    """Return the memory of this process that no other shares, in MB."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(
        int(line.split()[1]) / 1000
        for line in text.splitlines()
        if line.startswith(("Private_Dirty", "Private_Clean"))
    )


def measure(kind: str, count: int) -> dict[str, Any]:
    """Run one sink at the pace of a camera, in this process, and return its figures."""
    cv2.setNumThreads(1)
    given = results(pictures(PICTURES), count)
    for one in given:
        _ = one.payload  # JSON and MQTT sinks make it, too
    alone_s = paced_s(encode, given)
    before_mb = memory_mb()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.mcap"
        config = (
            McapSink(path=str(path), quality=QUALITY)
            if kind == "mcap"
            else FoxgloveSink(port=0, quality=QUALITY)
        )
        with open_sink(config, SinkContext(("thing",))) as sink:
            spent_s = paced_s(sink.write, given)
            used_mb = memory_mb() - before_mb
        size = path.stat().st_size if path.exists() else 0
    taken = count - sink.dropped.get(f"{kind}_queue", 0)
    encoder_s = alone_s / count
    own_s = spent_s / taken - (encoder_s if kind == "mcap" else 0.0)  # nobody looks: not encoded
    return {
        "cpu_percent": 100 * own_s * FPS,
        "encoder_percent": 100 * encoder_s * FPS,
        "memory_mb": used_mb,
        "kb_per_frame": size / taken / 1000,
        "dropped": dict(sink.dropped),
    }


def rows_of(kind: str, seen: dict[str, Any]) -> list[Row]:
    """Return the figures of a sink with their goals."""
    name = "recording of 1080p at 30 Hz" if kind == "mcap" else "live view that nobody looks at"
    return [
        Row(f"{name}: CPU beyond the encoder", seen["cpu_percent"], "% of a core", GOAL_CPU),
        *(
            [
                Row("the JPEG encoder alone", seen["encoder_percent"], "% of a core", "-"),
                Row("file", seen["kb_per_frame"], "KB a frame", "-"),
            ]
            if kind == "mcap"
            else []
        ),
        Row(f"{name}: memory", seen["memory_mb"], "MB", GOAL_MB),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description="What a recording and a live view cost.")
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--json", type=Path, dest="out")
    parser.add_argument("--measure", choices=SINKS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure, options.frames)))
        return 0
    rows, dropped = [], {}
    for kind in SINKS:  # a process each: memory is of one sink
        done = subprocess.run(
            [sys.executable, "-m", "scripts.bench_recording", "--measure", kind,
             "--frames", str(options.frames)],
            check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1],
            env=os.environ,
        )  # fmt: skip
        seen = json.loads(done.stdout)
        rows += rows_of(kind, seen)
        dropped.update(seen["dropped"])
    for row in rows:
        print(f"{row.what:55} {row.value:8.1f} {row.unit:12} {row.goal}")
    if dropped:
        print(f"dropped: {dropped}")
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows]))
    return 1 if dropped else 0


if __name__ == "__main__":
    sys.exit(main())
