"""Camera frames as inputs of an engine: their bytes go to the GPU, and one kernel does the rest.

The engine carries the kernel (`tandem build --preprocess-on gpu`). No number of the input is made
or copied on the CPU.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from device.engine.file import Engine
from device.engine.frame_manifest import MAX_FRAME_SIDE, FrameKernels, Pixels
from device.errors import SessionError
from device.runtime.cuda.context import Bytes, Context
from device.runtime.cuda.device_array import DeviceArray
from device.runtime.cuda.driver import CudaError, device_sm
from device.runtime.cuda.launcher import Launcher
from device.runtime.cuda.program import acquire_program, release_program
from device.runtime.cuda.sharing import CallersContext
from device.runtime.session import Session

Array = npt.NDArray[Any]
_LOG = logging.getLogger("tandem.session")


@dataclass(frozen=True, slots=True, eq=False)
class FramePixels:
    """A frame as a source has it.

    `rows`: uint8 [height, width, 3] (pixels "bgr"), or [rows, stride] ("nv12"): luma, then chroma.
    """

    rows: npt.NDArray[np.uint8]
    pixels: Pixels
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class FramePlace:
    """Where a frame lies in the input: resized to inner_width x inner_height, put at (x, y)."""

    inner_width: int
    inner_height: int
    x: int
    y: int


FrameOpener = Callable[[int, Mapping[str, Array]], "FrameInput"]
"""Gets the most frames of a batch, and the session's other inputs at that batch."""


def frame_opener(engine: Engine, session: Session) -> FrameOpener | None:
    """Return what opens the session's input for frames, None where that is not on the GPU.

    The engine must be open until then.
    """
    if not engine.manifest.frames:
        return None
    reason = why_no_frames(engine, session)
    if reason is not None:
        _LOG.warning("%s: frames become inputs on the CPU: %s", engine.path, reason)
        return None
    return partial(FrameInput, engine, session)


def why_no_frames(engine: Engine, session: Session) -> str | None:
    """Return why frames do not become inputs on the GPU here, None if they do."""
    rows = engine.manifest.frames or ()
    if not rows:
        return "the engine has no kernels for it; `tandem build --preprocess-on gpu` adds them"
    try:
        sm = device_sm()
    except CudaError as error:
        return str(error)
    if sm != rows[0].kernels.sm:
        return f"its kernels are for sm_{rows[0].kernels.sm}, this GPU is sm_{sm}"
    first = next(s for s in engine.manifest.segments if rows[0].tensor in s.inputs)
    report = next(report for report in session.reports if report.segment == first.name)
    if report.implementation not in ("cuda", "tensorrt"):
        return f"segment {first.name} runs on the CPU: {report.reason}"
    return None


class _Kernel:
    """The launches of one kind of pixels."""

    def __init__(self, context: Context, engine: Engine, row: FrameKernels) -> None:
        program_key, program = acquire_program(engine, row.kernels)
        context.on_close(partial(release_program, program_key))
        self.launches = row.kernels.works[0].tactics[0].launches
        self.launcher = Launcher(row.kernels, program)
        self.target_offset = row.kernels.outputs[0].offset


class FrameInput:
    """The input of a session on the GPU, for up to `room` frames. One thread at a time uses it: it
    may be filled in one and run in another."""

    def __init__(
        self, engine: Engine, session: Session, room: int, others: Mapping[str, Array]
    ) -> None:
        """Load the kernels and take memory. `others`: the session's other inputs for `room` images,
        which stay the same. Raises SessionError if the driver refuses."""
        rows = engine.manifest.frames or ()
        self._session = session
        self._where = str(engine.path)
        self._name = rows[0].tensor
        tensor = next(info for info in session.inputs if info.name == self._name)
        self._shape = tuple(dim for dim in tensor.shape[1:] if isinstance(dim, int))
        self._dtype = np.dtype(tensor.dtype)
        self._image_bytes = math.prod(self._shape) * self._dtype.itemsize
        self._staged: dict[int, tuple[Bytes, int]] = {}
        self._outputs: dict[int, dict[str, DeviceArray]] = {}
        try:
            with CallersContext():
                self._context = Context()
                try:
                    self._kernels = {r.pixels: _Kernel(self._context, engine, r) for r in rows}
                    self._stream = self._context.stream()
                    self._images = self._context.allocate(room * self._image_bytes)
                    self._context.fill(self._images, 0, room * self._image_bytes)
                    self._others = {name: self._upload(array) for name, array in others.items()}
                except BaseException:
                    self._context.close()
                    raise
        except CudaError as error:
            raise self._failed(error) from error

    def put(self, row: int, frame: FramePixels, place: FramePlace) -> None:
        """Enqueue what makes image number `row` of the next batch from a frame, which is copied."""
        if not 0 < max(frame.width, frame.height) <= MAX_FRAME_SIDE:
            raise SessionError(
                f"a frame has {frame.width} x {frame.height} pixels; kernels take up to"
                f" {MAX_FRAME_SIDE} along a side: use a smaller mode of the camera"
            )
        stride = frame.rows.shape[1] * (3 if frame.pixels == "bgr" else 1)
        point = (
            *(frame.width, frame.height, stride, _chroma_offset(frame, stride)),
            *(place.inner_width, place.inner_height, place.x, place.y),
        )
        kernel = self._kernels[frame.pixels]
        target = self._images + row * self._image_bytes
        try:
            with CallersContext():
                self._context.activate()
                host, source = self._staging(row, frame.rows.nbytes)
                np.copyto(host.reshape(frame.rows.shape), frame.rows)
                self._stream.upload(source, host)
                kernel.launcher.start(
                    kernel.launches,
                    point,
                    lambda offset: target if offset == kernel.target_offset else source,
                    self._stream,
                )
        except CudaError as error:
            raise self._failed(error) from error

    def infer(self, count: int) -> dict[str, Array]:
        """Run the session on the first `count` images; return its outputs in the CPU's memory."""
        feeds = {name: _first(array, count) for name, array in self._others.items()}
        feeds[self._name] = DeviceArray(self._images, (count, *self._shape), self._dtype)
        try:
            with CallersContext():
                known = self._outputs.setdefault(count, {})
                handle = self._stream.handle.value or 0
                results = self._session.infer_on_device(feeds, known, stream=handle)
                self._keep(known, results)
                self._context.activate()
                arrays = {n: np.empty(array.shape, array.dtype) for n, array in results.items()}
                for name, values in arrays.items():
                    if values.nbytes:
                        flat = values.reshape(-1).view(np.uint8)
                        self._stream.download(flat, results[name].address)
                self._stream.wait()
                return arrays
        except CudaError as error:
            raise self._failed(error) from error

    def image(self, row: int) -> Array:
        """Return a copy of image number `row`."""
        with CallersContext():
            self._context.activate()
            self._stream.wait()
        address = self._images + row * self._image_bytes
        return DeviceArray(address, self._shape, self._dtype).numpy()

    def close(self) -> None:
        """Free everything."""
        self._outputs.clear()
        self._staged.clear()
        with CallersContext():
            self._context.close()

    def _keep(self, known: dict[str, DeviceArray], results: Mapping[str, DeviceArray]) -> None:
        """Let later runs write where the first one did, if sizes are known before a run."""
        fixed = {info.name for info in self._session.outputs if None not in info.shape}
        for name, array in results.items():
            if name in fixed:
                known.setdefault(name, array)

    def _upload(self, array: Array) -> DeviceArray:
        values = np.ascontiguousarray(array)
        address = self._context.allocate(values.nbytes)
        self._context.upload(address, values.reshape(-1).view(np.uint8))
        return DeviceArray(address, values.shape, values.dtype)

    def _staging(self, row: int, size: int) -> tuple[Bytes, int]:
        """Return `size` bytes of page-locked memory, and of the GPU's, for a frame of this row."""
        if row not in self._staged or len(self._staged[row][0]) < size:
            self._staged[row] = self._context.allocate_host(size), self._context.allocate(size)
        host, address = self._staged[row]
        return host[:size], address

    def _failed(self, error: CudaError) -> SessionError:
        return SessionError(
            f"{self._where}: frames cannot become inputs on the GPU: {error}; build the engine"
            " again without `tandem build --preprocess-on gpu`"
        )


def _first(array: DeviceArray, count: int) -> DeviceArray:
    """Return the rows of the first `count` images."""
    shape = (count, *array.shape[1:])
    return DeviceArray.within(array, array.address, shape, array.dtype)


def _chroma_offset(frame: FramePixels, stride: int) -> int:
    """Return the bytes before the plane of chroma: two thirds of all rows are luma."""
    return 0 if frame.pixels == "bgr" else frame.rows.shape[0] // 3 * 2 * stride
