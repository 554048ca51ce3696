"""Detections for microcontrollers: a binary record in COBS frames, and lines like those of NMEA.

Both need no library on the other side: docs/serial.md has their bytes and a reader in C.
"""

import binascii
import struct
from collections.abc import Sequence
from dataclasses import dataclass

VERSION = 1
NO_NUMBER = 0  # of an object without a track
HEAD = struct.Struct("<BBHI")  # version, count, sequence, ms
ROW = struct.Struct("<hhhhBBH")  # x, y, width, height, score, class, track
CRC_SEED = 0xFFFF


@dataclass(frozen=True, slots=True)
class Target:
    """One object for a serial line: `box` x1, y1, x2, y2 in pixels; `track` 0 for none."""

    class_id: int
    label: str
    score: float
    box: tuple[float, float, float, float]
    track: int = NO_NUMBER


def cobs_frame(sequence: int, time_ms: int, targets: Sequence[Target]) -> bytes:
    """Return one record in COBS, with a zero byte at its end: head, targets, CRC-16/CCITT-FALSE.

    `sequence` and `time_ms` (of the capture, since 1970) are cut to 16 and 32 bits.
    """
    record = HEAD.pack(VERSION, len(targets), sequence & 0xFFFF, time_ms & 0xFFFFFFFF)
    for target in targets:
        x1, y1, x2, y2 = target.box
        record += ROW.pack(
            *map(_int16, (x1, y1, x2 - x1, y2 - y1)),
            min(255, max(0, round(255 * target.score))),
            min(255, target.class_id),
            target.track & 0xFFFF,
        )
    record += struct.pack("<H", binascii.crc_hqx(record, CRC_SEED))
    return cobs(record) + b"\0"


def cobs(data: bytes) -> bytes:
    """Return data without zero bytes (Cheshire and Baker 1999): each run of up to 254 other bytes
    is preceded by its length and one."""
    out = bytearray()
    for run in data.split(b"\0"):
        whole = len(run) // 254 * 254
        for at in range(0, whole, 254):
            out += b"\xff" + run[at : at + 254]
        out += bytes([len(run) - whole + 1]) + run[whole:]
    return bytes(out)


def nmea_lines(sequence: int, time_ms: int, targets: Sequence[Target]) -> bytes:
    """Return `$FRM,seq,ms,count*CS`, then `$DET,seq,ms,class,track,x,y,w,h,score*CS` of each."""
    lines = [f"FRM,{sequence},{time_ms},{len(targets)}"]
    for target in targets:
        x1, y1, x2, y2 = target.box
        place = ",".join(str(round(value)) for value in (x1, y1, x2 - x1, y2 - y1))
        lines.append(
            f"DET,{sequence},{time_ms},{_plain(target.label)},{target.track},{place},{target.score:.2f}"
        )
    return b"".join(map(_with_checksum, lines))


def _with_checksum(text: str) -> bytes:
    body = text.encode("ascii")
    checksum = 0
    for byte in body:
        checksum ^= byte
    return b"$" + body + f"*{checksum:02X}\r\n".encode()


def _plain(label: str) -> str:
    """Return a label without what has a meaning in a line."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in label)


def _int16(value: float) -> int:
    return min(32767, max(-32768, round(value)))
