"""The stages that every frame passes, by libtandem (docs/cpp.md) where it is installed.

Each gives the same bits as the Python beside it, which runs everywhere else, and does what the
library leaves to it. The library is the one that the system's loader finds.
"""

import ctypes
import logging
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.decode_config import Scored
from pipelines.frame import Nv12
from pipelines.results import Detections
from pipelines.stages.track import Tracker, Tracks
from pipelines.stages.view import View
from pipelines.track_config import TrackerConfig

LIBRARY = "libtandem.so.1"
VERSION = 1  # TANDEM_STAGES_VERSION of tandem_stages.h
NO_IOU = -1.0
FIRST_CAPACITY = 64  # tracks
TRACK_ARRAYS = ("states", "ids", "class_ids", "hits", "scores", "status", "seen_s")

_LOG = logging.getLogger(__name__)


class _PlanesCall(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("pixels", "planes")),
        *((name, c_float * 3) for name in ("factors", "shifts")),
        *((name, c_size_t) for name in ("rows", "columns")),
        *((name, c_size_t) for name in ("pixel_stride", "row_stride", "plane_stride")),
        ("reversed", c_int),
    )


class _DecodeCall(Structure):
    _fields_ = (
        ("head", c_void_p),
        *((name, c_size_t) for name in ("classes", "cells", "max_detections")),
        *((name, c_float) for name in ("score_threshold", "max_iou")),
        *((name, c_float) for name in ("scale_x", "scale_y", "pad_x", "pad_y")),
        *((name, c_float) for name in ("frame_width", "frame_height")),
        *((name, c_void_p) for name in ("boxes", "input_boxes", "scores", "class_ids", "places")),
    )


class _Tracks(Structure):
    _fields_ = (
        *((name, c_void_p) for name in TRACK_ARRAYS),
        *((name, c_size_t) for name in ("count", "capacity")),
        ("at_s", c_double),
        ("next_id", c_int64),
    )


class _TrackerConfig(Structure):
    _fields_ = (
        *((name, c_float) for name in ("high_score", "low_score", "start_score", "iou")),
        ("lost_s", c_double),
        ("confirm_frames", c_int64),
        ("same_class", c_int),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecodedHead:
    """Detections with their boxes in input pixels, float32 [N, 4], and their cells, int64 [N]."""

    detections: Detections
    input_boxes: NDArray[np.float32]
    cells: NDArray[np.int64]


class NativeStages:
    """The functions of tandem_stages.h."""

    def __init__(self, library: str) -> None:
        """Raise OSError: it cannot be loaded, or is of another version."""
        self.path = library
        functions = ctypes.CDLL(library)
        version = getattr(functions, "tandem_stages_version", int)()
        if version != VERSION:
            raise OSError(f"{library}: its stages have version {version}, not {VERSION}")
        self.planes = functions.tandem_stages_planes
        self.planes.argtypes, self.planes.restype = (POINTER(_PlanesCall),), None
        # None in libtandem 1.0.0, whose other stages run all the same.
        self.planes_nv12 = getattr(functions, "tandem_stages_planes_nv12", None)
        if self.planes_nv12 is not None:
            self.planes_nv12.argtypes = (POINTER(_PlanesCall), c_void_p)
            self.planes_nv12.restype = None
        self._decode = functions.tandem_stages_decode
        self._decode.argtypes, self._decode.restype = (POINTER(_DecodeCall),), c_int64
        self.track = functions.tandem_stages_track
        self.track.argtypes = (
            *(POINTER(_Tracks), POINTER(_TrackerConfig), c_void_p, c_void_p, c_void_p),
            *(c_size_t, c_double, c_void_p, c_void_p),
        )
        self.track.restype = c_int64
        self.follow = getattr(functions, "tandem_stages_follow", None)  # None in 1.0.0, too
        if self.follow is not None:
            self.follow.argtypes = (
                *(POINTER(_DecodeCall), POINTER(_Tracks), POINTER(_TrackerConfig)),
                *(c_double, c_void_p, POINTER(c_int64)),
            )
            self.follow.restype = c_int64

    def decode(
        self, head: NDArray[Any], classes: int, config: Scored, view: View
    ) -> DecodedHead | None:
        """Return what a head [4+C+extras, A] detects; None: the library does not take it."""
        if head.dtype != np.float32 or not head.flags.c_contiguous:
            return None
        results = _Results(min(config.max_detections, head.shape[1]))
        count = self._decode(byref(_decode_call(head, classes, config, view, results)))
        if count < 0:
            return None
        detections = results.detections(count)
        return DecodedHead(detections, results.input_boxes[:count], results.cells[:count])


class _Results:
    """Arrays for up to `most` detections, and where they are."""

    def __init__(self, most: int) -> None:
        floats, integers = np.empty((9, most), np.float32), np.empty((3, most), np.int64)
        self._boxes, self.input_boxes = floats[:8].reshape(2, most, 4)
        self._scores = floats[8]
        self._class_ids, self.cells, self._track_ids = integers
        at, integers_at = _address(floats), _address(integers)
        self.pointers = (
            *(at, at + 16 * most, at + 32 * most),
            *(integers_at, integers_at + 8 * most),
        )
        self.track_ids_at = integers_at + 16 * most
        self.most = most

    def detections(self, count: int) -> Detections:
        """Return the first of them, without tracks."""
        return Detections(self._boxes[:count], self._scores[:count], self._class_ids[:count])

    def tracked(self, count: int) -> Detections:
        """Return copies of the first of them: the next frame overwrites these."""
        return Detections(
            self._boxes[:count].copy(),
            self._scores[:count].copy(),
            self._class_ids[:count].copy(),
            self._track_ids[:count].copy(),
        )


def _address(array: NDArray[Any]) -> int:
    """Return where an array begins; `array.ctypes` takes several times as long."""
    return int(array.__array_interface__["data"][0])


def _decode_call(
    head: NDArray[Any], classes: int, config: Scored, view: View, results: _Results
) -> _DecodeCall:
    geometry, max_iou = view.geometry, config.max_iou
    return _DecodeCall(
        _address(head), classes, head.shape[1], results.most, config.score_threshold,
        NO_IOU if max_iou is None else max_iou,
        geometry.scale_x, geometry.scale_y, geometry.pad_x, geometry.pad_y,
        view.frame_width, view.frame_height, *results.pointers,
    )  # fmt: skip


class NativePlanes:
    """The planes of a network input, which the library fills: value * factor - shift."""

    def __init__(
        self,
        stages: NativeStages,
        out: NDArray[np.float32],
        factors: tuple[float, ...],
        shifts: tuple[float, ...],
        *,
        reverse: bool,
    ) -> None:
        """`out`: [3, H, W]; from the last channel on if `reverse`."""
        self._stages = stages
        self._out = out
        plane_bytes, row_bytes, element_bytes = out.strides
        self._is_possible = (
            element_bytes == 4 and out.flags.aligned and min(plane_bytes, row_bytes) >= 0
        )
        self._call = _PlanesCall(
            0, out.ctypes.data, (c_float * 3)(*factors), (c_float * 3)(*shifts),
            *out.shape[1:], 0, row_bytes // 4, plane_bytes // 4, reverse,
        )  # fmt: skip

    def write(self, pixels: NDArray[np.uint8]) -> bool:
        """Fill them with BGR pixels [H, W, 3]; return False for arrays that the library does not
        take."""
        is_fit = pixels.strides[1:] == (3, 1) and pixels.shape[:2] == self._out.shape[1:]
        if not self._takes(pixels) or not is_fit:
            return False
        self._stages.planes(byref(self._call))
        return True

    def write_nv12(self, picture: Nv12) -> bool:
        """Fill them with the BGR pixels that OpenCV would make of a picture; return False for one
        that the library does not take."""
        if self._stages.planes_nv12 is None:
            return False
        rows = picture.rows
        is_fit = (picture.height, picture.width) == self._out.shape[1:]
        luma_rows = len(rows) // 3 * 2
        is_fit &= len(rows) % 3 == 0 and luma_rows >= picture.height
        if rows.strides[1] != 1 or not self._takes(rows) or not is_fit:
            return False
        if rows.shape[1] < picture.width + picture.width % 2:
            return False
        chroma = self._call.pixels + luma_rows * rows.strides[0]
        self._stages.planes_nv12(byref(self._call), chroma)
        return True

    def _takes(self, pixels: NDArray[np.uint8]) -> bool:
        self._call.pixels, self._call.pixel_stride = _address(pixels), max(pixels.strides[0], 0)
        return self._is_possible and pixels.strides[0] >= 0


@lru_cache(maxsize=1)
def native_stages() -> NativeStages | None:
    """Return the library's stages; None where it is not installed. The log has which one runs."""
    try:
        stages = NativeStages(LIBRARY)
    except (OSError, AttributeError) as error:  # a function that is not there
        _LOG.info("decoding and tracking run in Python: %s", error)
        return None
    _LOG.info("decoding and tracking run in %s", LIBRARY)
    return stages


class NativeTracker(Tracker):
    """A tracker whose `update` the library does, on arrays with room for more tracks."""

    def __init__(self, config: TrackerConfig, first_id: int, stages: NativeStages) -> None:
        self._stages = stages
        self._arrays: Tracks
        self._call = _Tracks()
        self._settings: tuple[TrackerConfig, _TrackerConfig] = config, _settings_of(config)
        self._results = _Results(0)
        super().__init__(config, first_id)

    @property
    def tracks(self) -> Tracks:
        """A copy of all tracks: the next frame changes the library's arrays in place."""
        return self._tracks.take(np.arange(len(self._tracks)))

    @property
    def _tracks(self) -> Tracks:
        """All tracks: the part of the library's arrays that has some, or what Python made of it."""
        if self._python is not None:
            return self._python
        return self._arrays.take(slice(0, self._call.count))

    @_tracks.setter
    def _tracks(self, tracks: Tracks) -> None:
        self._python: Tracks | None = tracks

    def update(self, detections: Detections, time_s: float) -> Detections:
        """See `Tracker.update`."""
        count = len(detections)
        boxes = np.ascontiguousarray(detections.boxes, np.float32)
        scores = np.ascontiguousarray(detections.scores, np.float32)
        class_ids = np.ascontiguousarray(detections.class_ids, np.int64)
        if boxes.shape != (count, 4) or class_ids.shape != (count,):  # the library reads as many
            return super().update(detections, time_s)
        ids, stays = np.empty(count, np.int64), np.empty(count, np.bool_)
        self._prepare(count)
        staying = self._stages.track(
            byref(self._call), byref(self._settings[1]), _address(boxes), _address(scores),
            _address(class_ids), count, time_s, _address(ids), _address(stays),
        )  # fmt: skip
        if staying < 0:
            return super().update(detections, time_s)
        self._at_s, self._next_id = time_s, self._call.next_id
        tracked = replace(detections, track_ids=ids)
        return tracked if staying == count else tracked[stays]

    @property
    def can_follow(self) -> bool:
        """Whether the library has `follow`; that of an earlier version has not."""
        return self._stages.follow is not None

    def follow(
        self, head: NDArray[Any], classes: int, config: Scored, view: View, time_s: float
    ) -> tuple[Detections, int] | None:
        """`update` by what a head [4+C, A] detects, in one call: return the detections, and when
        they were decoded, in ns of `time.monotonic()`. None: the library does not take it, and all
        is as before."""
        function = self._stages.follow
        if function is None or head.dtype != np.float32 or not head.flags.c_contiguous:
            return None
        most = min(config.max_detections, head.shape[1])
        if self._results.most != most:
            self._results = _Results(most)
        self._prepare(most)
        call, decoded_ns = _decode_call(head, classes, config, view, self._results), c_int64()
        count = function(
            byref(call), byref(self._call), byref(self._settings[1]), time_s,
            self._results.track_ids_at, byref(decoded_ns),
        )  # fmt: skip
        if count < 0:
            return None
        self._at_s, self._next_id = time_s, self._call.next_id
        return self._results.tracked(count), decoded_ns.value

    def _prepare(self, count: int) -> None:
        """Bring tracks and settings to the library, with room for so many detections."""
        call = self._call
        known = call.count if self._python is None else len(self._python)
        if self._python is not None or known + count > call.capacity:
            self._take_over(known + count)
        if self._settings[0] is not self.config:
            self._settings = self.config, _settings_of(self.config)
        call = self._call
        call.at_s, call.next_id = self._at_s, self._next_id

    def _take_over(self, room: int) -> None:
        """Bring the tracks into arrays of the library's layout, with room for so many."""
        tracks, count = self._tracks, len(self._tracks)
        capacity = max(FIRST_CAPACITY, 2 * room)
        self._arrays = Tracks(
            **{
                field.name: np.empty(
                    (5, capacity, 4) if field.name == "states" else capacity,
                    getattr(tracks, field.name).dtype,
                )
                for field in fields(Tracks)
            }
        )
        arrays = self._arrays.take(slice(0, count))
        for field in fields(Tracks):
            getattr(arrays, field.name)[...] = getattr(tracks, field.name)
        pointers = (_address(getattr(self._arrays, name)) for name in TRACK_ARRAYS)
        self._call, self._python = _Tracks(*pointers, count, capacity), None


def new_tracker(config: TrackerConfig, first_id: int) -> Tracker:
    """Return the tracker that runs here; `first_id`: the number of the first track."""
    stages = native_stages()
    return Tracker(config, first_id) if stages is None else NativeTracker(config, first_id, stages)


def _settings_of(config: TrackerConfig) -> _TrackerConfig:
    start_score = max(config.new_score, config.high_score)
    return _TrackerConfig(
        config.high_score, config.low_score, start_score, config.iou,
        config.lost_s, config.confirm_frames, config.same_class,
    )  # fmt: skip
