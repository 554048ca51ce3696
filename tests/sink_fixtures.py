"""Results with detections, and subscribers that read what sinks publish."""

import threading
from contextlib import contextmanager

import numpy as np
import paho.mqtt.client as paho
from video_fixtures import (
    LABELS,
    PATIENCE_S,
    frame_of,
    scene,
    wait_for,
)

from pipelines.results import Detections
from pipelines.sinks.events import encode_event, make_event
from pipelines.sinks.table import FrameResult

STAGES = {"preprocess": 1.234, "infer": 5.678, "decode": 0.5}


def detections(*rows):
    boxes = np.array([row[0] for row in rows], np.float32).reshape(-1, 4)
    return Detections(
        boxes, np.array([r[1] for r in rows], np.float32), np.array([r[2] for r in rows], np.int64)
    )


def result(seq=0, image=None, found=None):
    frame = frame_of(scene(1, 2) if image is None else image, seq)
    found = detections(([8, 16, 16.04, 24], 0.91234, 0)) if found is None else found
    event = make_event("door", frame, found, LABELS, STAGES)
    return FrameResult(frame, found, event, encode_event(event))


@contextmanager
def subscriber(port, topic="fleet/v1/robot-1/detections"):
    """A paho client of its own; yields the list of messages that it got."""
    seen, ready = [], threading.Event()
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.on_message = lambda _c, _u, message: seen.append(message)
    client.on_subscribe = lambda *_: ready.set()
    client.connect("127.0.0.1", port)
    client.loop_start()
    client.subscribe(topic, qos=1)
    assert ready.wait(PATIENCE_S)
    try:
        yield seen
    finally:
        client.disconnect()
        client.loop_stop()


def connected(sink, caplog):
    wait_for(lambda: "mqtt sink connected" in caplog.text, PATIENCE_S, "the sink connects")
