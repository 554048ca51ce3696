"""The ROS 2 messages that Tandem writes and reads, as rosidl defines them (.msg), as data.

Sources: ros2/common_interfaces, ros2/rcl_interfaces, ros2/rmw_dds_common, ros-perception's
vision_msgs 4 (Humble and later), foxglove/foxglove-sdk 2 (`foxglove_msgs`, with timestamp and
metadata).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from device.choices import list_choices
from device.errors import PipelineError

DETECTIONS_2D = "vision_msgs/msg/Detection2DArray"
DETECTIONS_3D = "vision_msgs/msg/Detection3DArray"
IMAGE = "sensor_msgs/msg/Image"
COMPRESSED_IMAGE = "sensor_msgs/msg/CompressedImage"
CAMERA_INFO = "sensor_msgs/msg/CameraInfo"
LABEL_INFO = "vision_msgs/msg/LabelInfo"
ANNOTATIONS = "foxglove_msgs/msg/ImageAnnotations"
STRING = "std_msgs/msg/String"
DIAGNOSTICS = "diagnostic_msgs/msg/DiagnosticArray"
# Which endpoints of a DDS participant are of which node; in Humble ids have 24 bytes, later 16.
ENTITIES = "rmw_dds_common/msg/ParticipantEntitiesInfo"
HUMBLE_ENTITIES = f"{ENTITIES}24"

_HEADER = "std_msgs/Header header\n"
_XYZ = "float64 x\nfloat64 y\nfloat64 z\n"
_RGBA = "float64 r\nfloat64 g\nfloat64 b\nfloat64 a\n"
_RANGE = "{0} from_value\n{0} to_value\n{1} step\n"


def _entities(size: str, suffix: str) -> dict[str, str]:
    package = "rmw_dds_common"
    return {
        f"{package}/msg/Gid{suffix}": f"uint8[{size}] data\n",
        f"{package}/msg/NodeEntitiesInfo{suffix}": (
            f"string<=256 node_namespace\nstring<=256 node_name\n"
            f"{package}/Gid{suffix}[] reader_gid_seq\n{package}/Gid{suffix}[] writer_gid_seq\n"
        ),
        f"{ENTITIES}{suffix}": (
            f"{package}/Gid{suffix} gid\n"
            f"{package}/NodeEntitiesInfo{suffix}[] node_entities_info_seq\n"
        ),
    }


# Of constants those alone that Tandem uses. A service is two messages, as rosidl names them.
DEFINITIONS: dict[str, str] = {
    "builtin_interfaces/msg/Time": "int32 sec\nuint32 nanosec\n",
    "std_msgs/msg/Header": "builtin_interfaces/Time stamp\nstring frame_id\n",
    STRING: "string data\n",
    "geometry_msgs/msg/Point": _XYZ,
    "geometry_msgs/msg/Vector3": _XYZ,
    "geometry_msgs/msg/Quaternion": "float64 x 0\nfloat64 y 0\nfloat64 z 0\nfloat64 w 1\n",
    "geometry_msgs/msg/Pose": (
        "geometry_msgs/Point position\ngeometry_msgs/Quaternion orientation\n"
    ),
    "geometry_msgs/msg/PoseWithCovariance": "geometry_msgs/Pose pose\nfloat64[36] covariance\n",
    "sensor_msgs/msg/RegionOfInterest": (
        "uint32 x_offset\nuint32 y_offset\nuint32 height\nuint32 width\nbool do_rectify\n"
    ),
    IMAGE: (
        f"{_HEADER}uint32 height\nuint32 width\nstring encoding\nuint8 is_bigendian\nuint32 step\n"
        "uint8[] data\n"
    ),
    COMPRESSED_IMAGE: f"{_HEADER}string format\nuint8[] data\n",
    CAMERA_INFO: (
        f"{_HEADER}uint32 height\nuint32 width\nstring distortion_model\nfloat64[] d\n"
        "float64[9] k\nfloat64[9] r\nfloat64[12] p\nuint32 binning_x\nuint32 binning_y\n"
        "sensor_msgs/RegionOfInterest roi\n"
    ),
    "vision_msgs/msg/ObjectHypothesis": "string class_id\nfloat64 score\n",
    "vision_msgs/msg/ObjectHypothesisWithPose": (
        "vision_msgs/ObjectHypothesis hypothesis\ngeometry_msgs/PoseWithCovariance pose\n"
    ),
    "vision_msgs/msg/Point2D": "float64 x\nfloat64 y\n",
    "vision_msgs/msg/Pose2D": "vision_msgs/Point2D position\nfloat64 theta\n",
    "vision_msgs/msg/BoundingBox2D": (
        "vision_msgs/Pose2D center\nfloat64 size_x\nfloat64 size_y\n"
    ),
    "vision_msgs/msg/BoundingBox3D": "geometry_msgs/Pose center\ngeometry_msgs/Vector3 size\n",
    "vision_msgs/msg/Detection2D": (
        f"{_HEADER}vision_msgs/ObjectHypothesisWithPose[] results\n"
        "vision_msgs/BoundingBox2D bbox\nstring id\n"
    ),
    "vision_msgs/msg/Detection3D": (
        f"{_HEADER}vision_msgs/ObjectHypothesisWithPose[] results\n"
        "vision_msgs/BoundingBox3D bbox\nstring id\n"
    ),
    DETECTIONS_2D: f"{_HEADER}vision_msgs/Detection2D[] detections\n",
    DETECTIONS_3D: f"{_HEADER}vision_msgs/Detection3D[] detections\n",
    "vision_msgs/msg/VisionClass": "uint16 class_id\nstring class_name\n",
    LABEL_INFO: f"{_HEADER}vision_msgs/VisionClass[] class_map\nfloat32 threshold\n",
    "foxglove_msgs/msg/Color": _RGBA,
    "foxglove_msgs/msg/Point2": "float64 x\nfloat64 y\n",
    "foxglove_msgs/msg/KeyValuePair": "string key\nstring value\n",
    "foxglove_msgs/msg/CircleAnnotation": (
        "builtin_interfaces/Time timestamp\nfoxglove_msgs/Point2 position\nfloat64 diameter\n"
        "float64 thickness\nfoxglove_msgs/Color fill_color\nfoxglove_msgs/Color outline_color\n"
        "foxglove_msgs/KeyValuePair[] metadata\n"
    ),
    "foxglove_msgs/msg/PointsAnnotation": (
        "builtin_interfaces/Time timestamp\nuint8 POINTS=1\nuint8 LINE_LOOP=2\nuint8 type\n"
        "foxglove_msgs/Point2[] points\nfoxglove_msgs/Color outline_color\n"
        "foxglove_msgs/Color[] outline_colors\nfoxglove_msgs/Color fill_color\nfloat64 thickness\n"
        "foxglove_msgs/KeyValuePair[] metadata\n"
    ),
    "foxglove_msgs/msg/TextAnnotation": (
        "builtin_interfaces/Time timestamp\nfoxglove_msgs/Point2 position\nstring text\n"
        "float64 font_size\nfoxglove_msgs/Color text_color\nfoxglove_msgs/Color background_color\n"
        "foxglove_msgs/KeyValuePair[] metadata\n"
    ),
    ANNOTATIONS: (
        "builtin_interfaces/Time timestamp\nfoxglove_msgs/CircleAnnotation[] circles\n"
        "foxglove_msgs/PointsAnnotation[] points\nfoxglove_msgs/TextAnnotation[] texts\n"
        "foxglove_msgs/KeyValuePair[] metadata\n"
    ),
    "diagnostic_msgs/msg/KeyValue": "string key\nstring value\n",
    "diagnostic_msgs/msg/DiagnosticStatus": (
        "byte OK=0\nbyte WARN=1\nbyte ERROR=2\nbyte level\nstring name\nstring message\n"
        "string hardware_id\ndiagnostic_msgs/KeyValue[] values\n"
    ),
    DIAGNOSTICS: f"{_HEADER}diagnostic_msgs/DiagnosticStatus[] status\n",
    "service_msgs/msg/ServiceEventInfo": (
        "uint8 event_type\nbuiltin_interfaces/Time stamp\nuint8[16] client_gid\n"
        "int64 sequence_number\n"
    ),
    "rcl_interfaces/msg/ParameterValue": (
        "uint8 type\nbool bool_value\nint64 integer_value\nfloat64 double_value\n"
        "string string_value\nbyte[] byte_array_value\nbool[] bool_array_value\n"
        "int64[] integer_array_value\nfloat64[] double_array_value\nstring[] string_array_value\n"
    ),
    "rcl_interfaces/msg/Parameter": "string name\nrcl_interfaces/ParameterValue value\n",
    "rcl_interfaces/msg/FloatingPointRange": _RANGE.format("float64", "float64"),
    "rcl_interfaces/msg/IntegerRange": _RANGE.format("int64", "uint64"),
    "rcl_interfaces/msg/ParameterDescriptor": (
        "string name\nuint8 type\nstring description\nstring additional_constraints\n"
        "bool read_only\nbool dynamic_typing\n"
        "rcl_interfaces/FloatingPointRange[<=1] floating_point_range\n"
        "rcl_interfaces/IntegerRange[<=1] integer_range\n"
    ),
    "rcl_interfaces/msg/SetParametersResult": "bool successful\nstring reason\n",
    "rcl_interfaces/msg/ListParametersResult": "string[] names\nstring[] prefixes\n",
    "rcl_interfaces/srv/GetParameters_Request": "string[] names\n",
    "rcl_interfaces/srv/GetParameters_Response": "rcl_interfaces/ParameterValue[] values\n",
    "rcl_interfaces/srv/GetParameterTypes_Request": "string[] names\n",
    "rcl_interfaces/srv/GetParameterTypes_Response": "uint8[] types\n",
    "rcl_interfaces/srv/SetParameters_Request": "rcl_interfaces/Parameter[] parameters\n",
    "rcl_interfaces/srv/SetParameters_Response": "rcl_interfaces/SetParametersResult[] results\n",
    "rcl_interfaces/srv/SetParametersAtomically_Request": "rcl_interfaces/Parameter[] parameters\n",
    "rcl_interfaces/srv/SetParametersAtomically_Response": (
        "rcl_interfaces/SetParametersResult result\n"
    ),
    "rcl_interfaces/srv/ListParameters_Request": "string[] prefixes\nuint64 depth\n",
    "rcl_interfaces/srv/ListParameters_Response": "rcl_interfaces/ListParametersResult result\n",
    "rcl_interfaces/srv/DescribeParameters_Request": "string[] names\n",
    "rcl_interfaces/srv/DescribeParameters_Response": (
        "rcl_interfaces/ParameterDescriptor[] descriptors\n"
    ),
    **_entities("16", ""),
    **_entities("24", "24"),
}

_FIELD = re.compile(r"([\w/]+)(?:<=(\d+))?(?:\[(<=)?(\d*)\])? +(\w+)(?: +(\S+))?$")


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `type`: a primitive, or the full name of a message. `count`: of an array, None
    for a single value and for a sequence; `bound`: of a sequence, 0 for none, else None;
    `length`: of a string, 0 for any."""

    name: str
    type: str
    count: int | None = None
    bound: int | None = None
    default: float = 0
    length: int = 0

    @property
    def nested(self) -> bool:
        """Whether it is made of messages."""
        return "/" in self.type

    @property
    def is_sequence(self) -> bool:
        """Whether the number of its values is part of the message."""
        return self.bound is not None


@cache
def fields_of(name: str) -> tuple[Field, ...]:
    """Return the fields of a message such as `std_msgs/msg/Header`, in their order."""
    if name not in DEFINITIONS:
        raise PipelineError(
            f"the ROS 2 type {name!r} is not known here: use one of"
            f" {list_choices(name, DEFINITIONS)}."
        )
    return tuple(_parse(line) for line in DEFINITIONS[name].splitlines() if "=" not in _type(line))


def _type(line: str) -> str:
    return line.partition(" ")[2]


def _parse(line: str) -> Field:
    match = _FIELD.match(line)
    assert match is not None, line
    kind, length, bounded, size, name, default = match.groups()
    package, _, message = kind.rpartition("/")
    count = int(size) if size and not bounded else None
    bound = None if size is None or count is not None else int(size or 0)
    full_name = f"{package}/msg/{message}" if package else message
    number = float(default or 0) if kind.startswith("float") else 0
    return Field(name, full_name, count, bound, number, int(length or 0))


@cache
def dependencies_of(name: str) -> tuple[str, ...]:
    """Return the messages that a message is made of, without itself, each once, depth first."""
    return tuple(dict.fromkeys(_nested(name)))


def _nested(name: str) -> Iterator[str]:
    for field in fields_of(name):
        if field.nested:
            yield field.type
            yield from _nested(field.type)


@cache
def message_text(name: str) -> str:
    """Return the definition with those of all dependencies, as MCAP's schema encoding ros2msg has
    it: the .msg text, then each dependency below a line of 80 `=` and `MSG: package/Name`."""
    parts = [DEFINITIONS[name]]
    for dependency in dependencies_of(name):
        parts.append(f"MSG: {dependency.replace('/msg/', '/')}\n{DEFINITIONS[dependency]}")
    return ("=" * 80 + "\n").join(parts)
