"""CDR, type hashes and definitions of ROS 2, compared with rosbags and Cyclone DDS."""

import random
import struct
from contextlib import suppress

import pytest
from ros2_fixtures import (
    plain,
    random_value,
    rosbags_name,
    rosbags_store,
    to_cyclone,
    to_rosbags,
)
from rosbags.typesys import get_types_from_msg

from device.errors import PipelineError
from pipelines.ros2.cdr import HEAD, decode, encode
from pipelines.ros2.messages import DEFINITIONS, DETECTIONS_2D, IMAGE, message_text
from pipelines.ros2.type_hash import type_hash

QUICK, ALL = 1500, 10_000
SERVICES = sorted({name.rpartition("_")[0] for name in DEFINITIONS if "/srv/" in name})


def check(count, seed):
    draw, kinds = random.Random(seed), list(DEFINITIONS)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        message = random_value(kind, draw)
        data = encode(kind, message)
        expected = rosbags_store().serialize_cdr(to_rosbags(kind, message), rosbags_name(kind))
        assert data == bytes(expected), (kind, message)
        assert data == to_cyclone(kind, message).serialize(use_version_2=False), (kind, message)
        assert plain(decode(kind, data)) == message


def test_messages_of_every_type_are_the_bytes_of_rosbags_and_of_cyclone():
    check(QUICK, seed=34)


@pytest.mark.slow
def test_ten_thousand_messages_are_the_bytes_of_rosbags_and_of_cyclone():
    check(ALL, seed=35)


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_a_left_out_field_has_the_default_of_its_type(kind):
    message = decode(kind, encode(kind, {}))
    assert encode(kind, message) == encode(kind, {})


@pytest.mark.parametrize("pose", [{}, {"pose": {}}, {"pose": {"pose": {"position": {"x": 2.0}}}}])
def test_an_orientation_that_is_left_out_does_not_turn(pose):
    kind = "vision_msgs/msg/ObjectHypothesisWithPose"
    orientation = decode(kind, encode(kind, pose))["pose"]["pose"]["orientation"]
    assert orientation == {"x": 0.0, "y": 0.0, "z": 0.0, "w": 1.0}


# rosbags has these with `char`, which .msg has as another name of uint8.
WITH_CHAR = ("service_msgs/", "rmw_dds_common/")


@pytest.mark.parametrize(
    "kind", [one for one in DEFINITIONS if "/msg/" in one and not one.startswith(WITH_CHAR)]
)
def test_hashes_and_texts_are_those_of_rosbags(kind):
    assert type_hash(kind) == rosbags_store().hash_rihs01(kind)
    types = get_types_from_msg(message_text(kind), kind)
    fields = {name: one[1] for name, one in rosbags_store().fielddefs.items()}
    assert {name: fields[name] for name in types} == {name: one[1] for name, one in types.items()}


def test_the_hashes_are_those_that_ros_2_itself_has(monkeypatch):
    # The first as nodes of Jazzy have it, the second of ros2/rmw_zenoh's docs/design.md.
    assert type_hash(DETECTIONS_2D) == (
        "RIHS01_214274120007f4a683866481336b70310268cfa107aebe9d594a6acf75bda968"
    )
    service = "example_interfaces/srv/AddTwoInts"
    monkeypatch.setitem(DEFINITIONS, f"{service}_Request", "int64 a\nint64 b\n")
    monkeypatch.setitem(DEFINITIONS, f"{service}_Response", "int64 sum\n")
    assert type_hash(service) == (
        "RIHS01_e118de6bf5eeb66a2491b5bda11202e7b68f198d6f67922cf30364858239c81a"
    )
    # As nodes of Jazzy have them.
    assert {one.rpartition("/")[2]: type_hash(one)[7:23] for one in SERVICES} == {
        "DescribeParameters": "845b484d71eb0673", "GetParameterTypes": "da199c878688b3e5",
        "GetParameters": "bf9803d5c74cf989", "ListParameters": "3e6062bfbb27bfb8",
        "SetParameters": "56eed9a67e169f9c", "SetParametersAtomically": "0e192ef259c07fc3",
    }  # fmt: skip


def test_damaged_messages_raise_no_other_error():
    draw = random.Random(5)
    for kind in DEFINITIONS:
        data = encode(kind, random_value(kind, draw))
        for _ in range(20):
            damaged = bytearray(data[: draw.randrange(len(data) + 1)])
            for _ in range(draw.randrange(4) if len(damaged) > len(HEAD) else 0):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            with suppress(PipelineError):
                decode(kind, bytes(damaged))


def test_a_count_that_the_message_cannot_hold_is_refused_at_once():
    huge = HEAD + struct.pack("<iIIBxxxI", 0, 0, 1, 0, 0xFFFFFFFF)
    with pytest.raises(PipelineError, match="announces 4294967295 elements"):
        decode(DETECTIONS_2D, huge)


def test_other_encodings_are_refused_by_name():
    with pytest.raises(PipelineError, match="begins with 00070000, which is not plain CDR"):
        decode(DETECTIONS_2D, b"\0\7\0\0" + bytes(64))
    with pytest.raises(PipelineError, match="'vision_msgs/msg/Detection2DArr' is not known"):
        encode("vision_msgs/msg/Detection2DArr", {})


def test_big_endian_messages_are_read():
    data = b"\0\0\0\0" + struct.pack(">iII4sIII", 7, 8, 4, b"cam\0", 2, 3, 5)
    data += b"mono8"[:4] + b"\0" + bytes(3) + struct.pack(">II", 3, 2) + b"xy"
    message = decode(IMAGE, data)
    assert message["header"] == {"stamp": {"sec": 7, "nanosec": 8}, "frame_id": "cam"}
    assert (message["height"], message["width"], message["encoding"]) == (2, 3, "mono")
    assert bytes(message["data"]) == b"xy"


def test_bytes_are_not_copied():
    pixels = bytes(100_000)
    data = encode(IMAGE, {"data": memoryview(pixels)})
    assert decode(IMAGE, data)["data"].obj is data
