"""Messages of ROS 2 over Zenoh and DDS, as clients made by others see them."""

import os
import random
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import zenoh
from cyclonedds.builtin import (
    BuiltinDataReader,
    BuiltinTopicDcpsParticipant,
    BuiltinTopicDcpsPublication,
    BuiltinTopicDcpsSubscription,
)
from cyclonedds.core import InstanceState
from cyclonedds.domain import DomainParticipant
from cyclonedds.idl import IdlStruct, make_idl_struct
from cyclonedds.idl.types import array, bounded_str, sequence, uint8
from cyclonedds.qos import Policy, Qos
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration
from ros2_fixtures import (
    SDK_READER,
    build_reader,
    detections_line,
    random_value,
    reading,
    zenoh_router,
)
from video_fixtures import PATIENCE_S, free_port

from device.errors import PipelineError
from pipelines.ros2.cdr import HEAD, decode, encode
from pipelines.ros2.messages import DETECTIONS_2D, DIAGNOSTICS, IMAGE
from pipelines.ros2.type_hash import type_hash
from pipelines.ros2.wire import DEPTHS, MAX_REQUEST, Node, open_wire
from pipelines.ros2.zenoh_wire import ATTACHMENT

QUICK, ALL = 200, 10_000
HASH = type_hash(DETECTIONS_2D)
TYPE = "vision_msgs::msg::dds_::Detection2DArray_"
DOMAINS = iter(range(100, 200))  # of DDS, one for each test: a process keeps them


def until(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@contextmanager
def wire(name, node):
    opened = open_wire(name, node)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def router():
    with zenoh_router() as (locator, _):
        yield locator


def zenoh_session(locator):
    """A client of Zenoh that knows nothing of ROS 2."""
    config = zenoh.Config()
    config.insert_json5("mode", '"client"')
    config.insert_json5("connect/endpoints", f'["{locator}"]')
    return zenoh.open(config)


def arrays(count, seed=1):
    """Return messages without line feeds, which the readers print as lines."""
    draw = random.Random(seed)
    messages = []
    for number in range(count):
        message = random_value(DETECTIONS_2D, draw)
        message["header"]["frame_id"] = f"camera {number}"
        for one in message["detections"]:
            one["id"] = one["id"].replace("\n", " ")
            for result in one["results"]:
                result["hypothesis"]["class_id"] = f"label {number}"
                result["pose"]["covariance"] = [float(number)] * 36
        messages.append(message)
    return messages


# --- Zenoh


def test_tokens_and_keys_are_those_of_rmw_zenoh(router):
    node = Node("tandem", "/robot1", domain=3, connect=(router,))
    with wire("zenoh", node) as ours, zenoh_session(router) as second:
        received = []
        subscriber = second.declare_subscriber(
            f"3/robot1/detections/{TYPE}/{HASH}", received.append
        )
        publisher = ours.publish("detections", DETECTIONS_2D, "sensor_data")
        ours.publish("/diagnostics", DIAGNOSTICS, "reliable")
        ours.serve("tandem/set_parameters", "rcl_interfaces/srv/SetParameters", lambda data: data)

        def tokens():
            return [str(reply.ok.key_expr) for reply in second.liveliness().get("@ros2_lv/3/**")]

        until(lambda: len(tokens()) == 4)
        actual = sorted(token.split("/") for token in tokens())
        assert len({token[2] for token in actual}) == 1
        assert [[*token[:2], *token[3:]] for token in actual] == [
            ["@ros2_lv", "3", "0", "0", "NN", "%", "%robot1", "tandem"],
            ["@ros2_lv", "3", "0", "1", "MP", "%", "%robot1", "tandem", "%robot1%detections",
             TYPE, HASH, "2::,5:,:,:,,"],
            ["@ros2_lv", "3", "0", "2", "MP", "%", "%robot1", "tandem", "%diagnostics",
             "diagnostic_msgs::msg::dds_::DiagnosticArray_", type_hash(DIAGNOSTICS),
             "::,10:,:,:,,"],
            ["@ros2_lv", "3", "0", "3", "SS", "%", "%robot1", "tandem",
             "%robot1%tandem%set_parameters", "rcl_interfaces::srv::dds_::SetParameters_",
             type_hash("rcl_interfaces/srv/SetParameters"), "::,10:,:,:,,"],
        ]  # fmt: skip
        data = encode(DETECTIONS_2D, {})

        def sent():
            publisher.put(data, 1_700_000_000_000_000_007)
            return received

        until(sent)
        assert received[0].payload.to_bytes() == data
        attachment = received[0].attachment.to_bytes()
        assert len(attachment) == 33
        number, wall_ns, size, gid = ATTACHMENT.unpack(attachment)
        assert (number >= 1, wall_ns, size) == (True, 1_700_000_000_000_000_007, 16)
        assert gid != bytes(16)
        subscriber.undeclare()


def test_a_request_that_is_too_large_is_not_answered(router):
    kind, requests = "rcl_interfaces/srv/GetParameters", []

    def answer(data):
        requests.append(len(data))
        return data

    with (
        wire("zenoh", Node("tandem", domain=6, connect=(router,))) as ours,
        zenoh_session(router) as second,
    ):
        ours.serve("tandem/get_parameters", kind, answer)
        key = f"6/tandem/get_parameters/rcl_interfaces::srv::dds_::GetParameters_/{type_hash(kind)}"
        head = ATTACHMENT.pack(1, 0, 16, bytes(16))

        def replies(size):
            return list(second.get(key, payload=bytes(size), attachment=head, timeout=10))

        until(lambda: replies(MAX_REQUEST))
        requests.clear()
        assert replies(MAX_REQUEST + 1) == []
        assert requests == []


def test_humble_has_no_hashes(router):
    with (
        wire("zenoh", Node("tandem", domain=4, distro="humble", connect=(router,))) as ours,
        zenoh_session(router) as second,
    ):
        received = []
        second.declare_subscriber(f"4/detections/{TYPE}/TypeHashNotSupported", received.append)
        publisher = ours.publish("detections", DETECTIONS_2D, "reliable")
        until(lambda: publisher.put(encode(DETECTIONS_2D, {}), 1) or received)


def check_sdk(router, tmp_path, count, seconds):
    messages = arrays(count)
    out, port = tmp_path / "sdk.txt", router.rpartition(":")[2]
    command = (sys.executable, "-c", SDK_READER, port, "/detections", DETECTIONS_2D, HASH)
    paths = os.pathsep.join(sys.path)
    command = ("env", f"PYTHONPATH={paths}", *command, str(count), str(seconds), "5")
    with (
        wire("zenoh", Node("tandem", domain=5, connect=(router,))) as ours,
        zenoh_session(router) as second,
        reading(*command, out=out) as reader,
    ):
        publisher = ours.publish("detections", DETECTIONS_2D, "reliable")
        until(lambda: [1 for _ in second.liveliness().get("@ros2_lv/5/*/*/*/MS/**")])
        time.sleep(0.5)
        for message in messages:
            publisher.put(encode(DETECTIONS_2D, message), time.time_ns())
        assert reader.wait(seconds) == 0
    assert out.read_text().splitlines() == [detections_line(message) for message in messages]


def test_an_independent_client_receives_every_field(router, tmp_path):
    check_sdk(router, tmp_path, QUICK, 60)


@pytest.mark.slow
def test_an_independent_client_receives_ten_thousand_of_ten_thousand(router, tmp_path):
    check_sdk(router, tmp_path, ALL, 280)


def test_a_late_subscriber_gets_the_last_message(router):
    with (
        wire("zenoh", Node("tandem", domain=6, connect=(router,))) as ours,
        wire("zenoh", Node("late", domain=6, connect=(router,))) as late,
    ):
        data = encode(DETECTIONS_2D, {"header": {"frame_id": "last"}})
        ours.publish("latched", DETECTIONS_2D, "transient_local").put(data, 1)
        received = []
        time.sleep(0.2)
        late.subscribe(
            "latched", (DETECTIONS_2D,), "transient_local", lambda *one: received.append(one)
        )
        until(lambda: received)
        assert received == [(DETECTIONS_2D, data)]


def test_peers_need_no_router():
    locator = f"tcp/127.0.0.1:{free_port()}"
    config = zenoh.Config()
    config.insert_json5("listen/endpoints", f'["{locator}"]')
    config.insert_json5("scouting/multicast/enabled", "false")
    received = []
    with zenoh.open(config) as peer, wire("zenoh", Node("a", connect=(locator,))) as ours:
        peer.declare_subscriber(f"0/detections/{TYPE}/{HASH}", received.append)
        publisher = ours.publish("detections", DETECTIONS_2D, "sensor_data")
        until(lambda: publisher.put(encode(DETECTIONS_2D, {}), 1) or received)


def test_a_router_may_start_later_die_and_return():
    port = free_port()
    locator = f"tcp/127.0.0.1:{port}"
    data = encode(DETECTIONS_2D, {})
    with wire("zenoh", Node("tandem", domain=7, connect=(locator,))) as ours:
        publisher = ours.publish("detections", DETECTIONS_2D, "sensor_data")
        for _ in range(2):
            publisher.put(data, 1)  # to nobody
            with zenoh_router(port) as (_, kill), zenoh_session(locator) as second:
                received = []
                second.declare_subscriber(f"7/detections/{TYPE}/{HASH}", received.append)
                until(lambda: publisher.put(data, 1) or received)  # noqa: B023
                names = [str(one.ok.key_expr) for one in second.liveliness().get("@ros2_lv/7/**")]
                assert sum("/MP/" in name for name in names) == 1  # it is on the list again
                kill()


def test_a_slow_subscriber_does_not_hold_a_sensor_topic(router):
    data = encode(IMAGE, {"data": bytes(1 << 20)})
    held, quick = threading.Event(), []
    with (
        wire("zenoh", Node("tandem", domain=8, connect=(router,))) as ours,
        wire("zenoh", Node("quick", domain=8, connect=(router,))) as second,
        zenoh_session(router) as slow,
    ):
        key = f"8/image/sensor_msgs::msg::dds_::Image_/{type_hash(IMAGE)}"
        slow.declare_subscriber(key, lambda sample: held.wait(PATIENCE_S))
        second.subscribe("image", (IMAGE,), "sensor_data", lambda *one: quick.append(one))
        publisher = ours.publish("image", IMAGE, "sensor_data")
        until(lambda: publisher.put(data, 1) or quick)
        longest_s, before = 0.0, len(quick)
        for _ in range(60):
            begin_s = time.monotonic()
            publisher.put(data, 1)
            longest_s = max(longest_s, time.monotonic() - begin_s)
            time.sleep(0.01)
        held.set()
        assert longest_s < 1.0
        assert len(quick) > before


def test_an_address_that_is_none_is_named():
    with pytest.raises(PipelineError, match=r"connect = \['10.0.0.5'\].*tcp/localhost:7447"):
        open_wire("zenoh", Node("tandem", connect=("10.0.0.5",)))


# --- DDS


@pytest.mark.parametrize("qos", DEPTHS)
def test_dds_carries_the_bytes_in_order(qos):
    messages = arrays(QUICK)
    node = Node("tandem", "/robot1", next(DOMAINS), connect=("localhost",))
    received = []
    with wire("dds", node) as ours:
        publisher = ours.publish("detections", DETECTIONS_2D, qos)
        ours.subscribe("detections", (DETECTIONS_2D,), qos, lambda *one: received.append(one))
        until(lambda: publisher.put(encode(DETECTIONS_2D, {}), 1) or received)
        time.sleep(0.3)
        received.clear()
        for message in messages:
            publisher.put(encode(DETECTIONS_2D, message), time.time_ns())
            time.sleep(0.002)  # a sensor's profile keeps 5 alone
        last = encode(DETECTIONS_2D, messages[-1])
        until(lambda: received[-1:] and decode(*received[-1]) == decode(DETECTIONS_2D, last))
    read = [decode(kind, data) for kind, data in received]
    expected = [message["header"]["frame_id"] for message in messages]
    names = [message["header"]["frame_id"] for message in read]
    known = [name for name in expected if name in set(names)]
    assert names == (expected if qos == "reliable" else known)


def test_a_late_reader_of_dds_gets_the_last_message():
    received, domain = [], next(DOMAINS)
    with wire("dds", Node("tandem", domain=domain, connect=("localhost",))) as ours:
        publisher = ours.publish("latched", DETECTIONS_2D, "transient_local")
        for message in arrays(3):
            publisher.put(encode(DETECTIONS_2D, message), 1)
        ours.subscribe(
            "latched", (DETECTIONS_2D,), "transient_local", lambda *one: received.append(one)
        )
        until(lambda: received)
        time.sleep(0.2)
    names = [decode(*one)["header"]["frame_id"] for one in received]
    assert names == ["camera 2"]


def test_a_node_of_dds_that_is_closed_has_gone_at_once():
    node = Node("tandem", domain=next(DOMAINS), connect=("localhost",))
    with wire("dds", node) as second:
        reader = BuiltinDataReader(second._participant, BuiltinTopicDcpsParticipant)

        def alive():
            states = [one.sample_info.instance_state for one in reader.read(10)]
            return states.count(InstanceState.Alive)

        with wire("dds", node) as ours:
            publisher = ours.publish("detections", DETECTIONS_2D, "reliable")
            until(lambda: alive() == 2)
        until(lambda: alive() == 1)
        publisher.put(encode(DETECTIONS_2D, {}), 1)  # by a sender that is late: to nobody


def test_a_service_of_dds_outlasts_a_request_that_fails_or_is_too_large(caplog):
    kind, lengths = "rcl_interfaces/srv/GetParameters", []

    def answer(data):
        lengths.append(len(data))
        if len(data) == 8:
            raise ValueError("no such case")
        return data

    node = Node("tandem", domain=next(DOMAINS), connect=("localhost",))
    with wire("dds", node) as ours:
        ours.serve("get_parameters", kind, answer)
        requests = ours._writer("rq/get_parametersRequest", f"{kind}_Request", "reliable")

        def ask(size):
            requests.put(HEAD + bytes(16 + size - len(HEAD)), 1)

        until(lambda: lengths or ask(8))
        ask(MAX_REQUEST + 4)
        ask(12)
        until(lambda: lengths[-1] == 12)
    assert set(lengths) == {8, 12}
    assert "no such case" in caplog.text
    assert f"{MAX_REQUEST + 4} bytes, more than {MAX_REQUEST}" in caplog.text


def test_a_slow_reader_of_dds_costs_messages_and_never_the_sender():
    node = Node("tandem", domain=next(DOMAINS), connect=("localhost",))
    data, quick = encode(DETECTIONS_2D, {}), []
    other_node = Node("quick", domain=node.domain, connect=("localhost",))
    with wire("dds", node) as ours, wire("dds", other_node) as second:
        publisher = ours.publish("detections", DETECTIONS_2D, "reliable")
        second.subscribe("detections", (DETECTIONS_2D,), "reliable", lambda *one: quick.append(one))
        policies = [Policy.Reliability.Reliable(duration(seconds=1)), Policy.History.KeepAll,
                    Policy.ResourceLimits(1, 1, 1)]  # fmt: skip
        # Its only place is full after the first message, and nobody takes it.
        slow = DataReader(
            second._participant, second._topic("rt/detections", DETECTIONS_2D), Qos(*policies)
        )
        until(slow.get_matched_publications)
        until(lambda: quick or publisher.put(data, 1))
        received = len(quick)
        for _ in range(3):
            with pytest.raises(PipelineError, match="DDS takes no message"):
                publisher.put(data, 1)
        until(lambda: len(quick) > received)


@dataclass
class Gid(IdlStruct, typename="rmw_dds_common.msg.dds_.Gid_"):
    data: array[uint8, 16]


@dataclass
class HumbleGid(IdlStruct, typename="rmw_dds_common.msg.dds_.Gid_"):
    data: array[uint8, 24]


def entities_type(gid):
    """Return ParticipantEntitiesInfo of rmw_dds_common as Cyclone describes types."""
    name = "rmw_dds_common.msg.dds_.{}_"
    node = make_idl_struct("NodeEntitiesInfo", name.format("NodeEntitiesInfo"), {
        "node_namespace": bounded_str[256], "node_name": bounded_str[256],
        "reader_gid_seq": sequence[gid], "writer_gid_seq": sequence[gid],
    })  # fmt: skip
    return make_idl_struct("ParticipantEntitiesInfo", name.format("ParticipantEntitiesInfo"), {
        "gid": gid, "node_entities_info_seq": sequence[node],
    })  # fmt: skip


@pytest.mark.parametrize(("distro", "gid", "size"), [("jazzy", Gid, 16), ("humble", HumbleGid, 24)])
def test_tools_of_dds_know_which_node_has_a_topic(distro, gid, size):
    """As rmw_dds_common's graph cache finds names: by the ids of participant and endpoint."""
    node = Node("tandem", "/robot1", next(DOMAINS), distro, ("localhost",))
    with wire("dds", node) as ours:
        ours.publish("detections", DETECTIONS_2D, "reliable")
        ours.serve("tandem/set_parameters", "rcl_interfaces/srv/SetParameters", lambda data: data)
        tool = DomainParticipant(node.domain)
        topic = Topic(tool, "ros_discovery_info", entities_type(gid))
        policies = [
            Policy.Reliability.Reliable(duration(seconds=1)),
            Policy.Durability.TransientLocal,
        ]
        reader = DataReader(tool, topic, Qos(*policies))
        entities = next(reader.take_iter(timeout=duration(seconds=PATIENCE_S)))
        participants = BuiltinDataReader(tool, BuiltinTopicDcpsParticipant).read(10)
        (participant,) = [one for one in participants if one.qos[Policy.Userdata]]
        assert participant.qos[Policy.Userdata].data == b"enclave=/;"
        assert bytes(entities.gid.data) == participant.key.bytes.ljust(size, b"\0")
        (named,) = entities.node_entities_info_seq
        assert (named.node_namespace, named.node_name) == ("/robot1", "tandem")

        def topics_of(builtin, gids):
            names = {one.key.bytes.ljust(size, b"\0"): one.topic_name
                     for one in BuiltinDataReader(tool, builtin).read(50)}  # fmt: skip
            return [names[bytes(one.data)] for one in gids]

        assert topics_of(BuiltinTopicDcpsPublication, named.writer_gid_seq) == [
            "ros_discovery_info", "rt/robot1/detections", "rr/robot1/tandem/set_parametersReply",
        ]  # fmt: skip
        assert topics_of(BuiltinTopicDcpsSubscription, named.reader_gid_seq) == [
            "rq/robot1/tandem/set_parametersRequest"
        ]


def check_reader(name, tmp_path, count, seconds):
    program = build_reader(name, tmp_path / name)
    messages = arrays(count)
    node = Node("tandem", "/robot1", next(DOMAINS))  # found by multicast
    out = tmp_path / "out.txt"
    topic = "rt/robot1/detections"
    with wire("dds", node) as ours:
        publisher = ours.publish("detections", DETECTIONS_2D, "reliable")
        with reading(
            str(program), str(node.domain), topic, str(count), str(seconds), out=out
        ) as reader:
            until(publisher._writer.get_matched_subscriptions)
            time.sleep(1.0)
            for message in messages:
                publisher.put(encode(DETECTIONS_2D, message), time.time_ns())
                time.sleep(0.001)  # 10 alone are kept for a reader that is late
            assert reader.wait(seconds) == 0
    assert out.read_text().splitlines() == [detections_line(message) for message in messages]


def test_cyclone_0_10_in_c_receives_every_field(tmp_path):
    check_reader("cyclone_reader", tmp_path, QUICK, 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cyclone_reader", "fastdds_reader"])
def test_readers_in_c_and_cpp_receive_ten_thousand_of_ten_thousand(name, tmp_path):
    check_reader(name, tmp_path, ALL, 280)
