"""MAVLink 2 frames, written and read: the few messages that a camera has for an autopilot.

A frame is STX, length, two flag bytes, sequence, system, component, 3 bytes of message id, payload,
and a CRC-16/MCRF4XX over all but STX, seeded with a byte of the message's definition. Zero bytes at
the end of a payload are not sent. Definitions: common.xml of mavlink/mavlink; fields go by size,
extensions after them in their order.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

STX = 0xFD
HEAD_BYTES = 10
CRC_BYTES = 2
SIGNATURE_BYTES = 13
SIGNED = 0x01

Value = Union[int, float, Sequence[int], Sequence[float]]  # noqa: UP007  (an alias, so 3.10 evaluates it)


@dataclass(frozen=True, slots=True)
class Message:
    """A message: its id, the byte that seeds its CRC, and (name, struct code) on the wire."""

    id: int
    crc_extra: int
    fields: tuple[tuple[str, str], ...]

    @property
    def layout(self) -> struct.Struct:
        """The payload with nothing cut off."""
        return struct.Struct("<" + "".join(code for _, code in self.fields))


HEARTBEAT = Message(
    0,
    50,
    (
        ("custom_mode", "I"),
        ("type", "B"),
        ("autopilot", "B"),
        ("base_mode", "B"),
        ("system_status", "B"),
        ("mavlink_version", "B"),
    ),
)
TIMESYNC = Message(111, 34, (("tc1", "q"), ("ts1", "q")))
LANDING_TARGET = Message(
    149,
    200,
    (
        ("time_usec", "Q"),
        ("angle_x", "f"),
        ("angle_y", "f"),
        ("distance", "f"),
        ("size_x", "f"),
        ("size_y", "f"),
        ("target_num", "B"),
        ("frame", "B"),
        ("x", "f"),
        ("y", "f"),
        ("z", "f"),
        ("q", "4f"),
        ("type", "B"),
        ("position_valid", "B"),
    ),
)
CAMERA_TRACKING_IMAGE_STATUS = Message(
    275,
    126,
    (
        ("point_x", "f"),
        ("point_y", "f"),
        ("radius", "f"),
        ("rec_top_x", "f"),
        ("rec_top_y", "f"),
        ("rec_bottom_x", "f"),
        ("rec_bottom_y", "f"),
        ("tracking_status", "B"),
        ("tracking_mode", "B"),
        ("target_data", "B"),
        ("camera_device_id", "B"),
    ),
)
OBSTACLE_DISTANCE = Message(
    330,
    23,
    (
        ("time_usec", "Q"),
        ("distances", "72H"),
        ("min_distance", "H"),
        ("max_distance", "H"),
        ("sensor_type", "B"),
        ("increment", "B"),
        ("increment_f", "f"),
        ("angle_offset", "f"),
        ("frame", "B"),
    ),
)
ONBOARD_COMPUTER_STATUS = Message(
    390,
    156,
    (
        ("time_usec", "Q"),
        ("uptime", "I"),
        ("ram_usage", "I"),
        ("ram_total", "I"),
        ("storage_type", "4I"),
        ("storage_usage", "4I"),
        ("storage_total", "4I"),
        ("link_type", "6I"),
        ("link_tx_rate", "6I"),
        ("link_rx_rate", "6I"),
        ("link_tx_max", "6I"),
        ("link_rx_max", "6I"),
        ("fan_speed", "4h"),
        ("type", "B"),
        ("cpu_cores", "8B"),
        ("cpu_combined", "10B"),
        ("gpu_cores", "4B"),
        ("gpu_combined", "10B"),
        ("temperature_board", "b"),
        ("temperature_core", "8b"),
        ("status_flags", "H"),
    ),
)
MESSAGES = {
    message.id: message
    for message in (
        HEARTBEAT,
        TIMESYNC,
        LANDING_TARGET,
        CAMERA_TRACKING_IMAGE_STATUS,
        OBSTACLE_DISTANCE,
        ONBOARD_COMPUTER_STATUS,
    )
}


def encode(
    message: Message, values: Mapping[str, Value], *, sequence: int, system: int, component: int
) -> bytes:
    """Return a frame; fields that `values` does not name are zero."""
    flat: list[int | float] = []
    for name, code in message.fields:
        count = int(code[:-1] or 1)
        value = values.get(name, 0)
        row = [value] if isinstance(value, (int, float)) else list(value)
        flat += row + [0] * (count - len(row))
    payload = message.layout.pack(*flat).rstrip(b"\0") or b"\0"
    head = bytes([STX, len(payload), 0, 0, sequence & 0xFF, system, component])
    head += message.id.to_bytes(3, "little")
    checksum = crc16(head[1:] + payload + bytes([message.crc_extra]))
    return head + payload + checksum.to_bytes(CRC_BYTES, "little")


class Reader:
    """Finds frames in a stream of bytes, which may begin anywhere and hold damage."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, dict[str, tuple[int | float, ...]]]]:
        """Yield (message id, fields) of each whole frame that is one of `MESSAGES` and intact."""
        self._pending += data
        while len(self._pending) >= HEAD_BYTES:
            length, message = _measure(self._pending)
            if message is None:
                self._pending = self._pending[1:]
                continue
            if len(self._pending) < length:
                return
            end = HEAD_BYTES + self._pending[1]
            checksum = int.from_bytes(self._pending[end : end + CRC_BYTES], "little")
            payload = self._pending[HEAD_BYTES:end]
            intact = crc16(self._pending[1:end] + bytes([message.crc_extra])) == checksum
            self._pending = self._pending[length if intact else 1 :]
            if intact:
                yield message.id, _fields(message, payload)


def _measure(data: bytes) -> tuple[int, Message | None]:
    """Return the length of the frame that begins here and its message, None if none does."""
    if data[0] != STX:
        return 0, None
    message = MESSAGES.get(int.from_bytes(data[7:HEAD_BYTES], "little"))
    if message is None or data[1] > message.layout.size:
        return 0, None  # of another message the seed is not known: nothing tells it from damage
    signature = SIGNATURE_BYTES if data[2] & SIGNED else 0
    return HEAD_BYTES + data[1] + CRC_BYTES + signature, message


def _fields(message: Message, payload: bytes) -> dict[str, tuple[int | float, ...]]:
    values = message.layout.unpack(payload.ljust(message.layout.size, b"\0"))
    fields, at = {}, 0
    for name, code in message.fields:
        count = int(code[:-1] or 1)
        fields[name] = values[at : at + count]
        at += count
    return fields


def _make_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x8408 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC_TABLE = _make_table()


def crc16(data: bytes) -> int:
    """Return the CRC-16/MCRF4XX of some bytes."""
    value = 0xFFFF
    for byte in data:
        value = (value >> 8) ^ _CRC_TABLE[(value ^ byte) & 0xFF]
    return value
