"""What an autopilot is told of a frame, and the common clock that TIMESYNC makes.

Angles and distances are those of a pinhole camera: the focal length follows from the horizontal
field of view, a distance from the height of a box whose object's true height is known.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pipelines.sinks import mavlink
from pipelines.sinks.board_status import BoardStatus
from pipelines.sinks.mavlink import Message, Value
from pipelines.sinks.records import NO_NUMBER, Target

PERIOD_S = 1.0  # of heartbeat, time and status
MAV_TYPE_ONBOARD_CONTROLLER = 18
MAV_AUTOPILOT_INVALID = 8
MAV_STATE_ACTIVE = 4
MAV_FRAME_BODY_FRD = 12
LANDING_TARGET_TYPE_VISION_OTHER = 3
TRACKING_RECTANGLE = 2
TRACKING_DATA_IN_STATUS = 4
DISTANCE_SENSOR_UNKNOWN = 4
SECTORS = 72
NEAREST_CM, FARTHEST_CM, UNKNOWN_CM = 10, 10_000, 65535
SYNC_SAMPLES = 10


class Autopilot:
    """Writes the messages of one camera, and answers those of the autopilot."""

    def __init__(
        self,
        hfov_deg: float,
        heights_m: Mapping[str, float],
        system: int = 1,
        component: int = 191,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._hfov = math.radians(hfov_deg)
        self._heights_m = heights_m
        self._system = system
        self._component = component
        self._clock_ns = clock_ns
        self._sequence = 0
        self._reader = mavlink.Reader()
        self._board = BoardStatus()
        self._locked = NO_NUMBER
        self._syncs: deque[tuple[int, int]] = deque(maxlen=SYNC_SAMPLES)  # round trip, offset
        self._due_s = 0.0

    @property
    def offset_ns(self) -> int | None:
        """The autopilot's clock less ours, from the exchange with the shortest round trip."""
        return min(self._syncs)[1] if self._syncs else None

    def frame(
        self,
        capture_mono_ns: int,
        capture_wall_ns: int,
        targets: Sequence[Target],
        width: int,
        height: int,
    ) -> bytes:
        """Return LANDING_TARGET and CAMERA_TRACKING_IMAGE_STATUS of one target, and with known
        heights OBSTACLE_DISTANCE of all.

        Times are those of the capture: on the autopilot's clock once it answered, else since 1970.
        """
        offset_ns = self.offset_ns
        stamp_ns = capture_wall_ns if offset_ns is None else capture_mono_ns + offset_ns
        time_us = stamp_ns // 1000
        focal_px = width / 2.0 / math.tan(self._hfov / 2.0)
        target = self._choose(targets)
        data = self._encode(mavlink.CAMERA_TRACKING_IMAGE_STATUS, tracking(target, width, height))
        if target is not None:
            values = landing_target(
                target, focal_px, width, height, self._distance(target, focal_px)
            )
            data = self._encode(mavlink.LANDING_TARGET, {"time_usec": time_us, **values}) + data
        if self._heights_m:
            distances = [(one.box, self._distance(one, focal_px)) for one in targets]
            sectors = obstacle_sectors(distances, focal_px, width, self._hfov)
            values = {
                "time_usec": time_us,
                "distances": sectors,
                "min_distance": NEAREST_CM,
                "max_distance": FARTHEST_CM,
                "sensor_type": DISTANCE_SENSOR_UNKNOWN,
                "increment_f": math.degrees(self._hfov) / SECTORS,
                "angle_offset": -math.degrees(self._hfov) / 2.0,
                "frame": MAV_FRAME_BODY_FRD,
            }
            data += self._encode(mavlink.OBSTACLE_DISTANCE, values)
        return data

    def periodic(self, now_s: float) -> bytes:
        """Return what is due once a second: HEARTBEAT, a TIMESYNC request, the board's status."""
        if now_s < self._due_s:
            return b""
        self._due_s = now_s + PERIOD_S
        heartbeat: dict[str, Value] = {
            "type": MAV_TYPE_ONBOARD_CONTROLLER,
            "autopilot": MAV_AUTOPILOT_INVALID,
            "system_status": MAV_STATE_ACTIVE,
            "mavlink_version": 3,
        }
        return (
            self._encode(mavlink.HEARTBEAT, heartbeat)
            + self._encode(mavlink.TIMESYNC, {"tc1": 0, "ts1": self._clock_ns()})
            + self._encode(mavlink.ONBOARD_COMPUTER_STATUS, self._board.values(time.time_ns()))
        )

    def received(self, data: bytes) -> bytes:
        """Take bytes of the autopilot; return the answers to its TIMESYNC requests."""
        now_ns = self._clock_ns()
        answers = b""
        for number, fields in self._reader.feed(data):
            if number != mavlink.TIMESYNC.id:
                continue
            theirs, ours = int(fields["tc1"][0]), int(fields["ts1"][0])
            if theirs == 0:
                answers += self._encode(mavlink.TIMESYNC, {"tc1": now_ns, "ts1": ours})
            elif 0 <= now_ns - ours < int(PERIOD_S * 1e9):
                self._syncs.append((now_ns - ours, theirs - (ours + now_ns) // 2))
        return answers

    def _choose(self, targets: Sequence[Target]) -> Target | None:
        """Return the target that was chosen before while it is there, else the best."""
        locked = (one for one in targets if one.track == self._locked != NO_NUMBER)
        target = next(locked, targets[0] if targets else None)
        self._locked = NO_NUMBER if target is None else target.track
        return target

    def _distance(self, target: Target, focal_px: float) -> float:
        """Return metres, or 0 where the true height is not known."""
        height_px = target.box[3] - target.box[1]
        return self._heights_m.get(target.label, 0.0) * focal_px / max(height_px, 1.0)

    def _encode(self, message: Message, values: Mapping[str, Value]) -> bytes:
        data = mavlink.encode(
            message,
            values,
            sequence=self._sequence,
            system=self._system,
            component=self._component,
        )
        self._sequence = (self._sequence + 1) & 0xFF
        return data


def landing_target(
    target: Target, focal_px: float, width: int, height: int, distance_m: float
) -> dict[str, Value]:
    """Return the direction and angular size of a target, in radians from the optical axis."""
    x1, y1, x2, y2 = target.box
    return {
        "angle_x": math.atan(((x1 + x2) / 2 - width / 2) / focal_px),
        "angle_y": math.atan(((y1 + y2) / 2 - height / 2) / focal_px),
        "distance": distance_m,
        "size_x": 2 * math.atan((x2 - x1) / 2 / focal_px),
        "size_y": 2 * math.atan((y2 - y1) / 2 / focal_px),
        "frame": MAV_FRAME_BODY_FRD,
        "q": (1.0, 0.0, 0.0, 0.0),
        "type": LANDING_TARGET_TYPE_VISION_OTHER,
    }


def tracking(target: Target | None, width: int, height: int) -> dict[str, Value]:
    """Return where the target is, as fractions of the frame; idle without one."""
    values: dict[str, Value] = dict.fromkeys(("point_x", "point_y", "radius"), math.nan)
    corners = ("rec_top_x", "rec_top_y", "rec_bottom_x", "rec_bottom_y")
    if target is None:
        return {
            **values,
            **dict.fromkeys(corners, math.nan),
            "target_data": TRACKING_DATA_IN_STATUS,
        }
    sides = (width, height, width, height)
    shares = (value / side for value, side in zip(target.box, sides, strict=True))
    return {
        **values,
        **dict(zip(corners, shares, strict=True)),
        "tracking_status": 1,
        "tracking_mode": TRACKING_RECTANGLE,
        "target_data": TRACKING_DATA_IN_STATUS,
    }


def obstacle_sectors(
    distances: Sequence[tuple[tuple[float, float, float, float], float]],
    focal_px: float,
    width: int,
    hfov: float,
) -> list[int]:
    """Return the nearest object of each of 72 sectors of the view in cm, 65535 where none is known.

    `distances`: boxes with their distance in metres, 0 for unknown; `hfov` in radians.
    """
    sectors = [UNKNOWN_CM] * SECTORS
    for (x1, _, x2, _), metres in distances:
        if not metres:
            continue
        first, last = (
            int((math.atan((x - width / 2) / focal_px) / hfov + 0.5) * SECTORS) for x in (x1, x2)
        )
        distance_cm = min(FARTHEST_CM + 1, max(NEAREST_CM, round(100 * metres)))
        for sector in range(max(0, first), min(SECTORS - 1, last) + 1):
            sectors[sector] = min(sectors[sector], distance_cm)
    return sectors
