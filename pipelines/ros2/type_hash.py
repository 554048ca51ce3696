"""RIHS01: the hash of a ROS 2 type, by which rmw_zenoh and Iron and later tell types apart.

SHA-256 of the type's description as JSON (REP 2011, type_description_interfaces).
"""

import hashlib
import json
from functools import cache

from pipelines.ros2.messages import DEFINITIONS, Field, dependencies_of, fields_of

# type_description_interfaces/msg/FieldType
TYPE_IDS: dict[str, int] = {
    "int8": 2, "uint8": 3, "int16": 4, "uint16": 5, "int32": 6, "uint32": 7, "int64": 8,
    "uint64": 9, "float32": 10, "float64": 11, "bool": 15, "byte": 16, "string": 17,
}  # fmt: skip
NESTED, BOUNDED_STRING, ARRAY, BOUNDED_SEQUENCE, SEQUENCE = 1, 21, 48, 96, 144
EVENT_INFO = "service_msgs/msg/ServiceEventInfo"

Description = dict[str, object]


@cache
def type_hash(name: str) -> str:
    """Return `RIHS01_` and 64 hexadecimal digits, of a message or of a service `package/srv/Name`,
    which is known by its `_Request` and `_Response`."""
    if name in DEFINITIONS:
        return _hash(name, fields_of(name), {one: fields_of(one) for one in dependencies_of(name)})
    request, response, event = (f"{name}_{part}" for part in ("Request", "Response", "Event"))
    of_service = tuple(
        Field(field, kind)
        for field, kind in (
            ("request_message", request), ("response_message", response), ("event_message", event)
        )
    )  # fmt: skip
    of_event = (
        Field("info", EVENT_INFO),
        Field("request", request, bound=1),
        Field("response", response, bound=1),
    )
    parts = (request, response, EVENT_INFO)
    used = {one for part in parts for one in (part, *dependencies_of(part))}
    return _hash(name, of_service, {event: of_event, **{one: fields_of(one) for one in used}})


def _hash(name: str, fields: tuple[Field, ...], others: dict[str, tuple[Field, ...]]) -> str:
    description = {
        "type_description": _describe(name, fields),
        "referenced_type_descriptions": [_describe(*item) for item in sorted(others.items())],
    }
    return f"RIHS01_{hashlib.sha256(json.dumps(description).encode()).hexdigest()}"


def _describe(name: str, fields: tuple[Field, ...]) -> Description:
    return {"type_name": name, "fields": [_describe_field(field) for field in fields]}


def _describe_field(field: Field) -> Description:
    form = 0
    if field.count is not None:
        form = ARRAY
    elif field.bound is not None:
        form = BOUNDED_SEQUENCE if field.bound else SEQUENCE
    of_one = NESTED if field.nested else TYPE_IDS[field.type]
    kind = {
        "type_id": form + (BOUNDED_STRING if field.length else of_one),
        "capacity": field.count or field.bound or 0,
        "string_capacity": field.length,
        "nested_type_name": field.type if field.nested else "",
    }
    return {"name": field.name, "type": kind}
