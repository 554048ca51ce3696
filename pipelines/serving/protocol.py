"""The values of a request and of an answer, the datatypes, and refusals with their status."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from device.errors import TandemError
from device.runtime.cuda.device_array import DeviceArray

Array = npt.NDArray[Any]
Parameter = bool | int | float | str
Parameters = Mapping[str, Parameter]

MAX_DIMS = 32  # of numpy before 2.0
MAX_ELEMENTS = 1 << 59  # numpy counts bytes in 63 bits, also where a dimension is 0
MAX_WHOLE = (1 << 63) - 1
KEPT_ID = 256  # the longest id of a request with which an answer's head is kept for the next

BYTES = "BYTES"
BF16 = "BF16"


class Status(Enum):
    """Why a request is refused: the HTTP status and the name of the gRPC code."""

    INVALID = (400, "INVALID_ARGUMENT")
    EXISTS = (400, "ALREADY_EXISTS")
    UNAUTHENTICATED = (401, "UNAUTHENTICATED")
    NOT_FOUND = (404, "NOT_FOUND")
    NO_METHOD = (405, "UNIMPLEMENTED")
    TOO_LARGE = (413, "RESOURCE_EXHAUSTED")
    MISDIRECTED = (421, "PERMISSION_DENIED")
    BUSY = (429, "RESOURCE_EXHAUSTED")
    HEADER_TOO_LARGE = (431, "RESOURCE_EXHAUSTED")
    INTERNAL = (500, "INTERNAL")
    UNIMPLEMENTED = (501, "UNIMPLEMENTED")
    UNAVAILABLE = (503, "UNAVAILABLE")


class Refusal(TandemError):  # noqa: N818  (what it is called in the protocol's words)
    """A request that is not answered; the message is the sentence that the client reads."""

    def __init__(self, status: Status, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def refuse(sentence: str, status: Status = Status.INVALID) -> NoReturn:
    """Raise a Refusal."""
    raise Refusal(status, sentence)


@dataclass(frozen=True, slots=True)
class Datatype:
    """A datatype of the protocol: numpy's, config.pbtxt's, and the field of typed contents.

    BYTES are arrays of objects, BF16 the upper halves of float32 in uint16.
    """

    numpy: np.dtype[Any]
    config: str
    contents: str


DATATYPES: Mapping[str, Datatype] = {
    name: Datatype(np.dtype(kind), f"TYPE_{config or name}", contents)
    for name, kind, config, contents in (
        ("BOOL", "bool", "", "bool_contents"),
        ("UINT8", "uint8", "", "uint_contents"),
        ("UINT16", "uint16", "", "uint_contents"),
        ("UINT32", "uint32", "", "uint_contents"),
        ("UINT64", "uint64", "", "uint64_contents"),
        ("INT8", "int8", "", "int_contents"),
        ("INT16", "int16", "", "int_contents"),
        ("INT32", "int32", "", "int_contents"),
        ("INT64", "int64", "", "int64_contents"),
        ("FP16", "float16", "", ""),
        ("FP32", "float32", "", "fp32_contents"),
        ("FP64", "float64", "", "fp64_contents"),
        (BYTES, "object", "STRING", "bytes_contents"),
        (BF16, "uint16", "", ""),
    )
}
BY_CONFIG = {row.config: name for name, row in DATATYPES.items()}
BY_NUMPY = {str(row.numpy): name for name, row in DATATYPES.items() if name != BF16}


class Tensor(msgspec.Struct, frozen=True):  # made in a sixth of a dataclass's time
    """A tensor on its way in or out. `place`: the shared memory that an input is to be read from,
    or an output was written to, as (region, offset, bytes). `device`: where it is on the GPU, in
    place of `data`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Array
    place: tuple[str, int, int] | None = None
    device: DeviceArray | None = None

    async def on_host(self) -> Array:
        """Return the data, a copy where they are on the GPU. Raises CudaError."""
        return self.data if self.device is None else await asyncio.to_thread(self.device.numpy)


class RequestedOutput(msgspec.Struct, frozen=True):
    """An output that a request asks for."""

    name: str
    parameters: Parameters = {}


class InferRequest(msgspec.Struct, frozen=True):
    """An inference: `traceparent` is that of W3C Trace Context, empty where none was sent;
    `targets`: bytes on the GPU that outputs may be written to."""

    model: str
    version: str
    inputs: Sequence[Tensor]
    outputs: Sequence[RequestedOutput] = ()
    id: str = ""
    parameters: Parameters = {}
    traceparent: str = ""
    targets: Mapping[str, DeviceArray] = {}


class InferResponse(msgspec.Struct, frozen=True):
    """The answer to an inference."""

    model: str
    version: str
    outputs: Sequence[Tensor]
    id: str = ""
    parameters: Parameters = {}


def trace_of(text: str) -> str:
    """Return a `traceparent` of W3C Trace Context (w3.org/TR/trace-context), or nothing."""
    return text if text and _TRACE.fullmatch(text) else ""


_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def check_datatype(name: str, datatype: str) -> Datatype:
    """Return the row of a datatype. Raises Refusal."""
    if datatype not in DATATYPES:
        refuse(
            f"input {name!r} has the datatype {datatype!r}, which is none of {', '.join(DATATYPES)}"
        )
    return DATATYPES[datatype]


def elements(name: str, shape: Sequence[int]) -> int:
    """Return the number of elements of a shape. Raises Refusal: it is no shape of a tensor."""
    if shape and min(shape) < 0:
        refuse(f"input {name!r} has the shape {list(shape)}: a dimension must be 0 or more")
    if len(shape) > MAX_DIMS:
        refuse(
            f"input {name!r} has the shape {str(list(shape))[:200]}: a tensor has at most"
            f" {MAX_DIMS} dimensions"
        )
    count = prod(shape)
    if (held := count or prod(dim or 1 for dim in shape)) > MAX_ELEMENTS:
        what = f"the shape {str(list(shape))[:200]} of input {name!r}"
        if held > MAX_WHOLE:
            refuse(f"{what} causes total element count to exceed maximum size of {MAX_WHOLE}")
        refuse(f"byte size overflow for input {name!r}: {what} has more than {MAX_ELEMENTS}")
    return count


def check_size(name: str, datatype: str, shape: Sequence[int], size: int) -> None:
    """Raise Refusal: an input of other than BYTES has not `size` bytes."""
    expected = check_datatype(name, datatype).numpy.itemsize * elements(name, shape)
    if size != expected:
        refuse(
            f"input {name!r} has {size} bytes; {datatype} of the shape {list(shape)} has {expected}"
        )


def whole(parameters: Parameters, key: str, where: str) -> int:
    """Return a parameter that is a whole number of 0 or more. Raises Refusal."""
    value = parameters.get(key, 0)
    if type(value) is not int or not 0 <= value <= MAX_WHOLE:  # bool is another type
        refuse(
            f"the parameter {key!r} of {where} is {value!r:.100}: give a whole number of 0 or more,"
            f" at most {MAX_WHOLE}"
        )
    return value


def from_bf16(halves: Array) -> Array:
    """Return float32 of BF16 in uint16: exact."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: Array) -> Array:
    """Return BF16 in uint16 of float32, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
