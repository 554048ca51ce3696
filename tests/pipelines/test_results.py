"""Results of every kind become JSON and pictures."""

import msgspec
import numpy as np
import pytest

from pipelines.frame import Frame, Stamp
from pipelines.results import (
    NO_TRACK,
    SPACE,
    Decoded,
    DepthMap,
    Detections,
    Masks,
    SegmentationMap,
    Texts,
    no_detections,
)
from pipelines.sinks.draw import annotate
from pipelines.sinks.events import Event, encode_event, make_event


def event_of(decoded: Decoded, labels: tuple[str, ...] = ("thing", "other")) -> Event:
    frame = Frame(np.zeros((48, 64, 3), np.uint8), 0, Stamp.now(), Stamp.now(), "")
    return make_event("p", frame, decoded, labels, {})


def test_an_event_carries_what_a_detection_has_beside_its_box():
    crop = np.full((4, 4), -1.0, np.float32)
    crop[1:3, 1:3] = 1.0
    detections = Detections(
        boxes=np.array([[0, 0, 16, 16], [2, 2, 8, 8]], np.float32),
        scores=np.array([0.9, 0.5], np.float32),
        class_ids=np.array([1, 0]),
        track_ids=np.array([7, NO_TRACK]),
        keypoints=np.full((2, 1, 3), 1.23456, np.float32),
        masks=Masks((crop, crop), np.array([[0, 0, 16, 16], [2, 2, 8, 8]], np.float32)),
        rotated=np.tile(np.array([8, 8, 4, 2, np.pi / 6], np.float32), (2, 1)),
    )
    first, second = msgspec.json.decode(encode_event(event_of(detections)))["detections"]
    assert (first["track_id"], "track_id" in second) == (7, False)
    assert first["keypoints"] == [[1.2, 1.2, 1.235]]
    assert first["rotated"] == [8.0, 8.0, 4.0, 2.0, 30.0]
    (outline,) = first["mask"]
    assert (min(outline), max(outline)) == (4, 11)


def test_an_event_of_a_map_or_a_text_has_no_detections():
    classes = np.array([[0, 0, 0, 2]] * 4, np.uint8)
    event = event_of(SegmentationMap(classes, (0, 0, 8, 8)), ("road", "car", "tree"))
    assert event.detections == ()
    assert [(one.label, one.share) for one in event.classes] == [("road", 0.75), ("tree", 0.25)]
    depth = np.linspace(1, 5, 101, dtype=np.float32).reshape(1, -1)
    event = event_of(DepthMap(depth, (0, 0, 8, 8), True))
    assert (event.depth.nearest, event.depth.median, event.depth.farthest) == (1.08, 3.0, 4.92)
    event = event_of(DepthMap(depth, (0, 0, 8, 8), False))
    assert (event.depth.nearest, event.depth.farthest) == (4.92, 1.08)
    texts = Texts(((1, SPACE, 0, 9),), np.array([0.98765], np.float32))
    (line,) = event_of(texts, ("a", "b")).texts
    assert (line.text, line.score) == ("b a", 0.988)
    plain = msgspec.json.decode(encode_event(event_of(no_detections())))
    assert not {"classes", "depth", "texts"} & set(plain)


@pytest.mark.parametrize(
    "decoded",
    [
        SegmentationMap(np.full((4, 8), 1, np.uint8), (0, 0, 64, 48)),
        DepthMap(np.linspace(0, 1, 32, dtype=np.float32).reshape(4, 8), (0, 0, 64, 48), True),
        DepthMap(np.zeros((4, 8), np.float32), (-8, -8, 70, 60), False),
        Texts(((0,),), np.ones(1, np.float32)),
        Detections(
            np.array([[4, 4, 40, 30]], np.float32), np.ones(1, np.float32), np.zeros(1, np.int64),
            track_ids=np.array([3]),
            keypoints=np.random.default_rng(0).uniform(0, 40, (1, 17, 3)).astype(np.float32),
            masks=Masks((np.ones((5, 5), np.float32),), np.array([[4, 4, 40, 30]], np.float32)),
            rotated=np.array([[22, 17, 30, 20, 0.3]], np.float32),
        ),
    ],
    ids=["classes", "depth", "flat depth", "text", "detection"],
)  # fmt: skip
def test_every_kind_of_result_is_drawn(decoded):
    image = np.full((48, 64, 3), 100, np.uint8)
    drawn = annotate(image, decoded, ("thing", "other"))
    assert (drawn.shape, drawn.dtype) == (image.shape, np.uint8)
    assert (drawn != image).any()
    assert (image == 100).all()


def test_the_event_is_the_payload_as_an_object():
    """As docs/results.md says: fields are attributes, what is left out is false."""
    objects = Detections(
        np.array([[1, 2, 30, 40]], np.float32), np.array([0.9], np.float32), np.array([1])
    )
    event = event_of(objects)
    payload = msgspec.json.decode(encode_event(event))
    assert payload == msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(event)))
    assert event.detections[0].label == payload["detections"][0]["label"] == "other"
    assert event.camera is msgspec.UNSET
    assert not event.camera
    assert "camera" not in payload
