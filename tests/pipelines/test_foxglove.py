"""Live view: a client of Foxglove's WebSocket protocol gets pictures, detections and figures."""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from foxglove import layouts
from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from sink_fixtures import result
from video_fixtures import LABELS, PATIENCE_S
from websockets.asyncio.client import ClientConnection, connect

import configs
from device.errors import PipelineError
from device.protocol.messages import Stats
from pipelines.pictures import decode_picture
from pipelines.sink_config import FoxgloveSink
from pipelines.sinks import recording
from pipelines.sinks.foxglove_server import FoxgloveOut
from pipelines.sinks.result import SinkContext

PROTOCOL = "foxglove.sdk.v1"
MESSAGE = struct.Struct("<BIQ")  # opcode 1, subscription, time in ns
STATS = Stats(
    frames=30, fps=29.9, latency_p50_ms=5.0, latency_p99_ms=9.0, stage_p50_ms={},
    stage_p99_ms={}, dropped={},
)  # fmt: skip


@contextmanager
def server(*cameras: str) -> Iterator[FoxgloveOut]:
    """A sink that gets a frame of each camera and figures twenty times a second."""
    sink = FoxgloveOut(FoxgloveSink(port=0), SinkContext(LABELS, cameras=cameras or ("",)))
    done = threading.Event()

    def feed() -> None:
        seq = 0
        while not done.wait(0.05):
            sink.write(result(seq))
            sink.take_stats(STATS)
            seq += 1

    with sink:
        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            yield sink
        finally:
            done.set()
            feeder.join()


async def channels_of(client: ClientConnection) -> dict[str, dict[str, Any]]:
    """Read what the server says first, and return its channels by topic."""
    while True:
        message = json.loads(await asyncio.wait_for(client.recv(), PATIENCE_S))
        if message["op"] == "advertise":
            return {one["topic"]: one for one in message["channels"]}
        assert message["op"] in ("serverInfo", "status", "parameterValues"), message


async def watch(port: int, topics: list[str]) -> dict[str, tuple[dict[str, Any], int, bytes]]:
    """Subscribe to topics; return channel, time and bytes of the first message of each."""
    async with connect(f"ws://127.0.0.1:{port}", subprotocols=[PROTOCOL]) as client:
        assert client.subprotocol == PROTOCOL
        channels = await channels_of(client)
        expected = [
            {"id": number, "channelId": channels[topic]["id"]}
            for number, topic in enumerate(topics)
        ]
        await client.send(json.dumps({"op": "subscribe", "subscriptions": expected}))
        seen: dict[str, tuple[int, bytes]] = {}
        while len(seen) < len(topics):
            data = await asyncio.wait_for(client.recv(), PATIENCE_S)
            if isinstance(data, bytes) and data[0] == 1:
                _, number, wall_ns = MESSAGE.unpack_from(data)
                seen.setdefault(topics[number], (wall_ns, data[MESSAGE.size :]))
        return {topic: (channels[topic], *seen[topic]) for topic in topics}


def deserialize(channel: dict[str, Any], data: bytes) -> Any:
    """Read a message by the schema that the server sent, with rosbags."""
    assert channel["encoding"] == "cdr"
    assert channel["schemaEncoding"] == "ros2msg"
    store = get_typestore(Stores.EMPTY)
    store.register(get_types_from_msg(channel["schema"], channel["schemaName"]))
    return store.deserialize_cdr(data, channel["schemaName"])


def test_a_viewer_gets_pictures_detections_and_figures() -> None:
    topics = ["/image/compressed", "/detections", "/annotations", "/result", "/diagnostics"]
    with server() as sink:
        seen = asyncio.run(asyncio.wait_for(watch(sink.port, topics), 30))
    messages = {topic: deserialize(channel, data) for topic, (channel, _, data) in seen.items()}
    picture = messages["/image/compressed"]
    assert decode_picture(bytes(picture.data)).shape == (64, 64, 3)
    stamp = picture.header.stamp
    assert seen["/image/compressed"][1] == stamp.sec * 1_000_000_000 + stamp.nanosec
    assert messages["/detections"].detections[0].results[0].hypothesis.class_id == "red"
    assert [(point.x, point.y) for point in messages["/annotations"].points[0].points] == [
        (8, 16), (16, 16), (16, 24), (8, 24),
    ]  # fmt: skip
    assert json.loads(messages["/result"].data)["detections"][0]["label"] == "red"
    assert messages["/diagnostics"].status[0].message == "running"


def test_pictures_are_encoded_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    kind, make = recording.TOPICS[recording.PICTURES]
    monkeypatch.setitem(
        recording.TOPICS,
        recording.PICTURES,
        (kind, lambda one, config: (encoded.append(one.frame.seq), make(one, config))[1]),
    )
    with server() as sink:
        asyncio.run(asyncio.wait_for(watch(sink.port, ["/detections"]), 30))
        assert not encoded
        asyncio.run(asyncio.wait_for(watch(sink.port, ["/image/compressed"]), 30))
        assert encoded


def test_each_of_several_cameras_has_its_topics() -> None:
    async def topics(port: int) -> set[str]:
        async with connect(f"ws://127.0.0.1:{port}", subprotocols=[PROTOCOL]) as client:
            return set(await channels_of(client))

    sink = FoxgloveOut(FoxgloveSink(port=0), SinkContext(LABELS, cameras=("left", "2-right")))
    with sink:
        names = asyncio.run(asyncio.wait_for(topics(sink.port), 30))
    assert {"/left/detections", "/_2_right/image/compressed", "/diagnostics"} <= names


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PipelineError, match=f"127.0.0.1:{port}.*another `port`"):
            FoxgloveOut(FoxgloveSink(port=port), SinkContext(LABELS))


def test_the_link_is_that_of_the_sdk() -> None:
    sink = FoxgloveOut(FoxgloveSink(port=0), SinkContext(LABELS))
    with sink:
        assert FoxgloveSink(port=sink.port).link == sink._server.app_url()


def test_the_layout_has_settings_that_the_sdk_knows() -> None:
    """foxglove-sdk describes the panels of the app, and what may be set in each."""
    known = {
        "Image": layouts.ImageConfig, "DiagnosticSummary": layouts.DiagnosticsSummaryConfig,
        "Plot": layouts.PlotConfig, "RawMessages": layouts.RawMessagesConfig,
    }  # fmt: skip
    panels = json.loads((configs.ROOT / "foxglove.json").read_text())["configById"]
    for name, settings in panels.items():
        described = known[name.partition("!")[0]]()._to_dict()
        assert set(settings) <= {*described, "foxglovePanelTitle"}, name
    image = set(panels["Image!tandem"]["imageMode"])
    assert image <= set(layouts.ImageModeConfig()._to_dict())
    (series,) = panels["Plot!tandem"]["paths"]
    assert set(series) <= set(layouts.PlotSeries(value="")._to_dict())


def test_the_layout_shows_the_topics_of_one_camera() -> None:
    layout = json.loads((configs.ROOT / "foxglove.json").read_text())
    panels = layout["configById"]

    def leaves(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            yield from leaves(node["first"])
            yield from leaves(node["second"])

    assert sorted(leaves(layout["layout"])) == sorted(panels)
    text = json.dumps(panels)
    for topic in ("/image/compressed", "/annotations", "/diagnostics", "/detections", "/result"):
        assert topic in text
    image = panels["Image!tandem"]["imageMode"]
    assert image["imageTopic"] == f"/{recording.PICTURES}"
    assert image["annotations"] == {"/annotations": {"visible": True}}
