"""What ROS 2 may change in a running pipeline, as parameters of its node: for each camera
`min_score` (0 to 1) and `detect`, with `<camera>.` before them where there are several.

Services: rcl_interfaces, as `ros2 param` and rqt_reconfigure call them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelines.ros2.cdr import Message, decode, encode
from pipelines.sinks.controls import Controls

NOT_SET, BOOL, DOUBLE = 0, 1, 3  # rcl_interfaces/msg/ParameterType
MIN_SCORE, DETECT = "min_score", "detect"
PACKAGE = "rcl_interfaces/srv"


class Parameters:
    """Parameters of the cameras of a pipeline; from any thread."""

    def __init__(self, controls: Controls, cameras: Sequence[str]) -> None:
        self._controls = controls
        self._cameras: dict[str, tuple[str, str]] = {  # parameter -> camera, what
            (f"{camera}.{what}" if len(cameras) > 1 else what): (camera, what)
            for camera in cameras
            for what in (MIN_SCORE, DETECT)
        }

    def services(self) -> Mapping[str, Callable[[bytes], bytes]]:
        """Return what answers each service, by the name of its type; requests and answers in CDR.

        PipelineError: a request is damaged."""
        answers: dict[str, Callable[[Message], Message]] = {
            "GetParameters": lambda m: {"values": [self._value(one) for one in m["names"]]},
            "GetParameterTypes": lambda m: {
                "types": [self._value(one)["type"] for one in m["names"]]
            },
            "SetParameters": lambda m: {
                "results": [self._set_all([one]) for one in m["parameters"]]
            },
            "SetParametersAtomically": lambda m: {"result": self._set_all(m["parameters"])},
            "ListParameters": lambda m: {"result": {"names": self._list(m["prefixes"])}},
            "DescribeParameters": lambda m: {
                "descriptors": [self._describe(one) for one in m["names"]]
            },
        }
        return {name: _in_cdr(name, answer) for name, answer in answers.items()}

    def _list(self, prefixes: Sequence[str]) -> list[str]:
        return [
            name
            for name in self._cameras
            if not prefixes
            or any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
        ]

    def _value(self, name: str) -> dict[str, Any]:
        if name not in self._cameras:
            return {"type": NOT_SET}
        camera, what = self._cameras[name]
        if what == DETECT:
            return {"type": BOOL, "bool_value": self._controls.is_on(camera)}
        return {"type": DOUBLE, "double_value": self._controls.least_score(camera)}

    def _set_all(self, parameters: Sequence[Message]) -> Message:
        """Set all or none."""
        if reason := next(filter(None, map(self._refusal, parameters)), ""):
            return {"reason": reason}
        for parameter in parameters:
            (camera, what), value = self._cameras[parameter["name"]], parameter["value"]
            if what == DETECT:
                self._controls.switch(camera, on=value["bool_value"])
            else:
                self._controls.set_least_score(camera, value["double_value"])
        return {"successful": True}

    def _refusal(self, parameter: Message) -> str:
        """Return why a parameter cannot be set, or nothing."""
        name, value = parameter["name"], parameter["value"]
        if name not in self._cameras:
            return f"no parameter {name!r}: use one of {', '.join(self._cameras)}"
        kind = BOOL if self._cameras[name][1] == DETECT else DOUBLE
        if value["type"] != kind:
            return f"{name} is {'true or false' if kind == BOOL else 'a double'}"
        if kind == DOUBLE and not 0.0 <= value["double_value"] <= 1.0:
            return f"{name} is 0 to 1, not {value['double_value']:g}"
        return ""

    def _describe(self, name: str) -> Message:
        kind = self._value(name)["type"]
        texts = {BOOL: "look at frames of this camera", DOUBLE: "drop detections below this score"}
        score_range = [{"from_value": 0.0, "to_value": 1.0}] if kind == DOUBLE else []
        return {
            "name": name,
            "type": kind,
            "description": texts.get(kind, ""),
            "floating_point_range": score_range,
        }


def _in_cdr(name: str, answer: Callable[[Message], Message]) -> Callable[[bytes], bytes]:
    kind = f"{PACKAGE}/{name}"

    def answer_cdr(request: bytes) -> bytes:
        return encode(f"{kind}_Response", answer(decode(f"{kind}_Request", request)))

    return answer_cdr
