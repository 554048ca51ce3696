"""What sinks write of a frame: the results of all models, or of those that they name, as JSON.

`ros2`: in the shape of ROS 2's vision_msgs/Detection2DArray (vision_msgs 4). The keys are the
fields of the message, so a bridge such as rosbridge publishes the object as it is; fields that are
left out keep their defaults there.
"""

from collections.abc import Collection

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from pipelines.sink_config import JsonlSink, MqttSink
from pipelines.sinks.events import Event, encode_event
from pipelines.sinks.result import FrameResult

_ENCODER = msgspec.json.Encoder()


def payload_of(result: FrameResult, config: JsonlSink | MqttSink) -> bytes:
    """Return a frame as the sink writes it, JSON without a line feed."""
    if config.format == "ros2":
        from pipelines.sinks.ros2_messages import detections_2d, upright_bbox

        names = config.models or (result.roles.followed,)
        return _ENCODER.encode(detections_2d(result, names, bbox=upright_bbox))
    if not config.models:
        return result.payload
    return encode_event(only(result.event, result.roles.first, config.models))


def only(event: Event, first: str, names: Collection[str]) -> Event:
    """Return an event without the results of models that are not named; `first`: the first one."""
    models = {name: rows for name, rows in (event.models or {}).items() if name in names}
    event = replace(event, models=models or UNSET)
    if first in names:
        return event
    return replace(event, detections=(), classes=UNSET, depth=UNSET, texts=UNSET)
