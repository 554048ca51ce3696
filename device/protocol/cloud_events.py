"""CloudEvents 1.0: what a device tells once, as MQTT messages.

On MQTT 5 the attributes are user properties and the payload is the data (binary mode); on 3.1.1 all
of it is one JSON object (structured mode). Source: CloudEvents MQTT Protocol Binding 1.0.2.
"""

import msgspec

SPEC_VERSION = "1.0"
DATA_TYPE = "application/json"


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event. `id` is unique below `source`: one that comes twice is the same event.

    `time`: RFC 3339, UTC. `data` is JSON.
    """

    id: str
    source: str
    type: str
    time: str
    data: msgspec.Raw
    specversion: str = SPEC_VERSION


def properties_of(event: CloudEvent) -> tuple[tuple[str, str], ...]:
    """Return the user properties of the binary mode."""
    return (
        ("specversion", event.specversion),
        ("type", event.type),
        ("id", event.id),
        ("source", event.source),
        ("time", event.time),
    )


def structured(event: CloudEvent) -> bytes:
    """Return the payload of the structured mode."""
    attributes = dict(properties_of(event))
    return msgspec.json.encode({**attributes, "datacontenttype": DATA_TYPE, "data": event.data})
