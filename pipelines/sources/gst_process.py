"""Runs a GStreamer pipeline that it reads from its standard input.

    python -I .../device/start pipelines.sources.gst_process PARENT_PID < words.json

gst-launch-1.0 takes its pipeline from the command line alone, where every user of the machine can
read the password of a camera. This process takes the same words, as a JSON list, from a pipe, and
does what gst-launch does with them, through GStreamer's library. It ends with its parent, at the
end of the stream, at an error, which it writes to standard error, or at SIGINT or SIGTERM.
"""

import ctypes
import json
import signal
import sys
from types import FrameType
from typing import Any

from device.start.guard import die_with_parent

LIBRARY = "libgstreamer-1.0.so.0"
POLL_NS = 100_000_000  # between two looks at the signals

_PLAYING, _NULL = 4, 1
_EOS, _ERROR = 1 << 0, 1 << 1


class _Error(ctypes.Structure):
    """GError."""

    _fields_ = (
        ("domain", ctypes.c_uint32),
        ("code", ctypes.c_int),
        ("message", ctypes.c_char_p),
    )


class _Message(ctypes.Structure):
    """The head of GstMessage: GstMiniObject, then the type."""

    _fields_ = (
        ("gtype", ctypes.c_size_t),
        ("references", ctypes.c_int),
        ("lock", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("functions", ctypes.c_void_p * 3),
        ("private_count", ctypes.c_uint),
        ("private", ctypes.c_void_p),
        ("type", ctypes.c_uint),
    )


def main(argv: list[str]) -> int:
    """Run the pipeline; 0 at the end of the stream or after a signal, 1 after an error."""
    if not die_with_parent(int(argv[1])):
        return 1
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    words = [word.encode() for word in json.load(sys.stdin)]
    try:
        gst = _library()
    except OSError as error:
        print(f"ERROR: no element can be loaded: {error}", file=sys.stderr)
        return 1
    gst.gst_init(None, None)
    return _run(gst, words, signals)


def _run(gst: Any, words: list[bytes], signals: list[int]) -> int:  # noqa: ANN401  (ctypes)
    error = ctypes.POINTER(_Error)()
    array = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    pipeline = gst.gst_parse_launchv(array, ctypes.byref(error))
    if error or not pipeline:
        print(f"ERROR: {_text(error)}", file=sys.stderr)
        return 1
    bus = gst.gst_element_get_bus(pipeline)
    gst.gst_element_set_state(pipeline, _PLAYING)  # a failure is a message on the bus
    status = 0
    while not signals:
        message = gst.gst_bus_timed_pop_filtered(bus, POLL_NS, _EOS | _ERROR)
        if message:
            if message.contents.type == _ERROR:
                _print_error(gst, message)
                status = 1
            break
    gst.gst_element_set_state(pipeline, _NULL)
    return status


def _print_error(gst: Any, message: Any) -> None:  # noqa: ANN401  (ctypes)
    error = ctypes.POINTER(_Error)()
    detail = ctypes.c_char_p()
    gst.gst_message_parse_error(message, ctypes.byref(error), ctypes.byref(detail))
    print(f"ERROR: {_text(error)}\n{_decoded(detail.value)}", file=sys.stderr)


def _text(error: Any) -> str:  # noqa: ANN401  (a pointer of ctypes)
    return _decoded(error.contents.message) if error else "the pipeline cannot be made"


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")


def _library() -> Any:  # noqa: ANN401  (ctypes)
    gst = ctypes.CDLL(LIBRARY)
    pointer = ctypes.c_void_p
    gst.gst_init.argtypes = (pointer, pointer)
    gst.gst_parse_launchv.argtypes = (
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.POINTER(ctypes.POINTER(_Error)),
    )
    gst.gst_parse_launchv.restype = pointer
    gst.gst_element_get_bus.argtypes = (pointer,)
    gst.gst_element_get_bus.restype = pointer
    gst.gst_element_set_state.argtypes = (pointer, ctypes.c_int)
    gst.gst_bus_timed_pop_filtered.argtypes = (pointer, ctypes.c_uint64, ctypes.c_int)
    gst.gst_bus_timed_pop_filtered.restype = ctypes.POINTER(_Message)
    gst.gst_message_parse_error.argtypes = (
        ctypes.POINTER(_Message),
        ctypes.POINTER(ctypes.POINTER(_Error)),
        ctypes.POINTER(ctypes.c_char_p),
    )
    return gst


if __name__ == "__main__":
    sys.exit(main(sys.argv))
