"""The AsyncAPI description of MQTT is valid, whole, and says what an agent really publishes."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import paho.mqtt.client as paho
import pytest
from deploy_fixtures import deploy
from mqtt_fixtures import AgentBox, Mosquitto, make_bundle
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from device.protocol.documents import Signed
from device.protocol.topics import FixedTopic, PipelineTopics, Topics
from scripts import asyncapi

SPECIFICATION = Path(__file__).parents[1] / "data" / "asyncapi-3.0.0.schema.json.gz"
PAGE: dict[str, Any] = json.loads(asyncapi.PATH.read_text())


def test_the_description_is_up_to_date() -> None:
    assert asyncapi.PATH.read_text() == asyncapi.description(), (
        "run python -m scripts.asyncapi --write"
    )


def test_the_description_is_valid_asyncapi() -> None:
    schema = json.loads(gzip.decompress(SPECIFICATION.read_bytes()))
    jsonschema.Draft7Validator(schema).validate(PAGE)
    broken = json.loads(asyncapi.description())
    broken["operations"]["state"]["action"] = "shout"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema).validate(broken)


def test_every_topic_is_described() -> None:
    topics = Topics("{device}")
    names = [name for name, one in vars(Topics).items() if isinstance(one, FixedTopic)]
    known = {getattr(topics, name) for name in names if name != "chunks"}
    pipeline = PipelineTopics(topics.root)
    names = [name for name, one in vars(PipelineTopics).items() if isinstance(one, FixedTopic)]
    known |= {getattr(pipeline, name) for name in names}
    assert {one for one in known if "+" not in one} <= {row.address for row in asyncapi.CHANNELS}


def test_every_reference_leads_somewhere() -> None:
    for path in re.findall(r'"\$ref": "#/([^"]+)"', asyncapi.description()):
        value = PAGE
        for name in path.split("/"):
            value = value[name]


@pytest.fixture
def messages(tmp_path: Path) -> list[paho.MQTTMessage]:
    """All that a bench with one device publishes while two releases come, one of them bad."""
    broker = Mosquitto(tmp_path)
    seen: list[paho.MQTTMessage] = []
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
    client.on_connect = lambda client, *_: client.subscribe("fleet/#", 1)
    client.on_message = lambda _client, _data, message: seen.append(message)
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    box = AgentBox(tmp_path, broker.port)
    box.start()
    try:
        for behaviour in ("good", "fails"):
            bundle = make_bundle(tmp_path / "in", behaviour)
            deploy(broker.port, bundle)
    finally:
        box.close()
        client.disconnect()
        client.loop_stop()
        broker.close()
    return seen


def test_what_is_published_is_what_the_description_says(
    messages: list[paho.MQTTMessage],
) -> None:
    used = set()
    for message in messages:
        row = next(one for one in asyncapi.CHANNELS if matches(one.address, message.topic))
        used.add(row.name)
        assert message.qos <= row.qos
        is_cleared = row.retain and not message.payload
        if row.payload is asyncapi.BYTES or is_cleared:
            continue
        schema = asyncapi.payload_schema(row)
        if row.payload is Signed:  # bare on a bench
            schema = {"$ref": "#/components/schemas/Desired"}
        validator = jsonschema.Draft202012Validator({**PAGE, **schema})
        text = message.payload.decode()
        is_text = isinstance(row.payload, dict) and row.payload["type"] == "string"
        validator.validate(text if is_text else json.loads(text))
    assert {"state", "desired", "reported", "chunkRequest", "chunk", "updateEvent"} <= used


def matches(address: str, topic: str) -> bool:
    return re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(address)), topic) is not None
