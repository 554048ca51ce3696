"""What the ros2 sink costs: encoding, the way to a subscriber in another process, and memory.

    python -m scripts.bench_ros2                   all rows, half a minute
    python -m scripts.bench_ros2 --frames 200 --json out.json

Each row prints its goal and what was measured here. `encode` is 20 detections with tracks, the best
of `--runs`; rosbags encodes the same message beside it. `zenoh` and `dds`: from `write` of the sink
to the callback of a subscriber, at `--hz`, on the clock of this machine. `memory`: what a process
with the sink has more than one that has OpenCV and the pipeline alone. Exit status 1: a frame did
not arrive.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from pipelines.frame import Frame, Stamp
from pipelines.results import Detections
from pipelines.ros2.cdr import encode
from pipelines.ros2.messages import DEFINITIONS, DETECTIONS_2D
from pipelines.sink_config import Ros2Sink, Ros2Wire
from pipelines.sinks.events import make_event
from pipelines.sinks.result import FrameResult, SinkContext
from pipelines.sinks.ros2_messages import detections_2d
from pipelines.sinks.table import open_sink
from toolkit.fleet.brokers.local import free_port

OBJECTS = 20
CALLS = 500
LABELS = ("person", "bicycle", "car")
DOMAIN = 77
WARM_FRAMES = 20

SUBSCRIBER = """
import sys, time
from pipelines.ros2.cdr import decode
from pipelines.ros2.messages import DETECTIONS_2D
from pipelines.ros2.wire import Node, open_wire
wire, connect = sys.argv[1:]
arrived = []
def take(kind, data):
    now_ns = time.time_ns()
    stamp = decode(kind, data)["header"]["stamp"]
    arrived.append(now_ns - stamp["sec"] * 10**9 - stamp["nanosec"])
node = open_wire(wire, Node("subscriber", domain=77, connect=(connect,)))
node.subscribe("detections", (DETECTIONS_2D,), "reliable", take)
print("ready", flush=True)
sys.stdin.readline()
print(*arrived, flush=True)
import os; os._exit(0)  # without the goodbye of the network
"""
ROUTER = """
import sys, json, zenoh
config = zenoh.Config()
config.insert_json5("mode", '"router"')
config.insert_json5("listen/endpoints", json.dumps([sys.argv[1]]))
config.insert_json5("scouting/multicast/enabled", "false")
session = zenoh.open(config)
print("ready", flush=True)
sys.stdin.readline()
"""
MEMORY = """
import sys
import pipelines.run, pipelines.sinks.table
from pipelines.vision import cv2
from pipelines.sink_config import Ros2Sink
from pipelines.sinks.result import SinkContext
cv2.getVersionString()
if sys.argv[1] != "none":
    sink = pipelines.sinks.table.open_sink(Ros2Sink(wire=sys.argv[1], domain=78), SinkContext(()))
    sink.__enter__()
rows = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(rows["VmRSS"].split()[0]) / 1024, flush=True)
import os; os._exit(0)
"""

Row = dict[str, object]


def result_of(seq: int) -> FrameResult:
    """Return a frame of now with 20 tracked objects."""
    numbers = np.arange(OBJECTS)
    boxes = np.stack([numbers * 30, numbers * 10, numbers * 30 + 25.5, numbers * 10 + 60.25], 1)
    scores = (1.0 - numbers / 40).astype(np.float32)
    objects = Detections(boxes.astype(np.float32), scores, numbers % len(LABELS), numbers + 95)
    now = Stamp.now()
    frame = Frame(np.zeros((480, 640, 3), np.uint8), seq, now, now, "bench", "camera")
    return FrameResult(frame, objects, make_event("bench", frame, objects, LABELS, {"infer": 1.0}))


def best_us(runs: int, call: Callable[[], object], calls: int = CALLS) -> float:
    """Return the shortest mean time of a call in microseconds."""
    best = float("inf")
    for _ in range(runs):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls * 1e6)
    return best


def encoding(runs: int) -> Row:
    """Measure ours, with and without the mapping that it is made of, and rosbags."""
    result = result_of(0)
    message = detections_2d(result, ("model",))
    store = get_typestore(Stores.ROS2_JAZZY)
    for kind, text in DEFINITIONS.items():
        if kind not in store.fielddefs and "/msg/" in kind:
            store.register(get_types_from_msg(text, kind))
    data = encode(DETECTIONS_2D, message)
    theirs = store.deserialize_cdr(data, DETECTIONS_2D)
    if bytes(store.serialize_cdr(theirs, DETECTIONS_2D)) != data:
        raise SystemExit("rosbags and Tandem do not write the same bytes")
    return {
        "name": "encode",
        "goal": "<= 50 us",
        "encode_us": best_us(runs, lambda: encode(DETECTIONS_2D, message)),
        "with_mapping_us": best_us(
            runs, lambda: encode(DETECTIONS_2D, detections_2d(result, ("model",)))
        ),
        "rosbags_us": best_us(runs, lambda: store.serialize_cdr(theirs, DETECTIONS_2D), 50),
    }


def way(wire: Ros2Wire, frames: int, hz: float) -> Row:
    """Measure how long frames take to a subscriber, in ms."""
    locator = f"tcp/127.0.0.1:{free_port()}" if wire == "zenoh" else "localhost"
    children: list[tuple[str, ...]] = [("-c", ROUTER, locator)] if wire == "zenoh" else []
    children.append(("-c", SUBSCRIBER, wire, locator))
    running = [
        subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for words in children
    ]
    try:
        for child in running:
            if child.stdout is None or child.stdout.readline() != "ready\n":
                raise SystemExit(f"a process of {wire} did not start")
        config = Ros2Sink(wire=wire, domain=DOMAIN, connect=(locator,), qos="reliable", max_hz=1e6)
        with open_sink(config, SinkContext(LABELS, cameras=("camera",))) as sink:
            time.sleep(2.0)  # until they have found each other
            for seq in range(WARM_FRAMES + frames):
                sink.write(result_of(seq))
                time.sleep(1.0 / hz)
            time.sleep(0.5)
        answer, _ = running[-1].communicate("\n", timeout=30)
    finally:
        for child in running:
            child.kill()
            child.wait()
    all_ms = np.array(answer.split(), np.float64) / 1e6
    arrived_ms = all_ms[-frames:]
    p50, p99 = np.percentile(arrived_ms, (50, 99)).tolist() if len(arrived_ms) else (0.0, 0.0)
    return {
        "name": wire,
        "goal": "p50 <= 2 ms, p99 <= 10 ms",
        "frames": frames,
        "arrived": len(arrived_ms),
        "p50_ms": p50,
        "p99_ms": p99,
    }


def memory() -> Row:
    """Measure the resident memory that each wire adds, in MiB."""
    used = {
        wire: float(subprocess.check_output([sys.executable, "-c", MEMORY, wire]))
        for wire in ("none", "zenoh", "dds")
    }
    return {
        "name": "memory",
        "goal": "<= 30 MB more",
        **{f"{wire}_mb": used[wire] - used["none"] for wire in ("zenoh", "dds")},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--frames", type=int, default=300, metavar="N", help="of each wire")
    parser.add_argument("--hz", type=float, default=60.0, metavar="HZ", help="frames a second")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="of the encoders")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    options = parser.parse_args(arguments)
    rows = [
        encoding(options.runs),
        way("zenoh", options.frames, options.hz),
        way("dds", options.frames, options.hz),
        memory(),
    ]
    for row in rows:
        figures = ", ".join(
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key not in ("name", "goal")
        )
        print(f"{row['name']:8} {row['goal']:28} {figures}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["arrived"] != row["frames"] for row in rows if "frames" in row))


if __name__ == "__main__":
    sys.exit(main())
