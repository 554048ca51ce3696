"""Tensors as bytes and as JSON. Bytes become views, not copies."""

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from pipelines.serving.protocol import (
    BF16,
    BYTES,
    Array,
    Parameter,
    RequestedOutput,
    Status,
    Tensor,
    check_datatype,
    check_size,
    elements,
    from_bf16,
    refuse,
    to_bf16,
)

MAX_DEPTH = 100  # of lists in the data of an input, as Triton's
KEPT_BYTES = 2048  # of the JSON of a request: clients send the same again and again

Bytes = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<I")  # before each element of BYTES


class JsonTensor(msgspec.Struct):
    """An input in a request's JSON."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    parameters: dict[str, Parameter] = {}
    data: msgspec.Raw = msgspec.Raw()  # empty where it is not given


class JsonRequest(msgspec.Struct):
    """The JSON of an inference."""

    inputs: tuple[JsonTensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    id: str = ""
    parameters: dict[str, Parameter] = {}


_REQUEST = msgspec.json.Decoder(JsonRequest)


def decode_json(decoder: msgspec.json.Decoder[Any], body: Bytes) -> Any:  # noqa: ANN401
    """Return a decoded body. Raises Refusal: it is no JSON, or none of this form."""
    try:
        return decoder.decode(body)
    except RecursionError:
        refuse("the JSON of the request nests too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        refuse(f"failed to parse the request JSON: {error}")


def parse_request(body: Bytes) -> JsonRequest:
    """Return the JSON of an inference. Raises Refusal."""
    if len(body) <= KEPT_BYTES:
        return _known_request(bytes(body))
    request: JsonRequest = decode_json(_REQUEST, body)
    return request


@lru_cache(128)
def _known_request(body: bytes) -> JsonRequest:
    request: JsonRequest = decode_json(_REQUEST, body)
    return request


def from_bytes(name: str, datatype: str, shape: tuple[int, ...], data: Bytes) -> Tensor:
    """Return the tensor of its bytes, a view of them. Raises Refusal: the size does not fit."""
    kind, count = check_datatype(name, datatype), elements(name, shape)
    view = memoryview(data)
    if datatype == BYTES:
        array = _split(name, view, count).reshape(shape)
    else:
        check_size(name, datatype, shape, view.nbytes)
        array = np.frombuffer(view, kind.numpy).reshape(shape)
    return Tensor(name, datatype, shape, array)


def from_values(name: str, datatype: str, shape: tuple[int, ...], values: Sequence[Any]) -> Tensor:
    """Return the tensor of numbers, truths or texts in row-major order. Raises Refusal."""
    kind, count = check_datatype(name, datatype), elements(name, shape)
    if len(values) != count:
        refuse(f"input {name!r} has {len(values)} elements; the shape {list(shape)} has {count}")
    if kind.numpy.kind in "iu" and datatype != BF16 and count:
        low, high = np.iinfo(kind.numpy).min, np.iinfo(kind.numpy).max
        if min(values) < low or max(values) > high:
            refuse(
                f"input {name!r} has values from {min(values)} to {max(values)}; {datatype} takes"
                f" {low} to {high}"
            )
    if datatype == BYTES:
        array = np.empty(count, object)
        array[:] = [value.encode() if isinstance(value, str) else value for value in values]
    elif datatype == BF16:
        array = to_bf16(np.array(values, np.float32))
    else:
        with np.errstate(over="ignore"):
            array = np.array(values, kind.numpy)
    return Tensor(name, datatype, shape, array.reshape(shape))


def from_json(tensor: JsonTensor) -> Tensor:
    """Return the tensor of `data` in JSON, nested or flat. Raises Refusal."""
    name, raw = tensor.name, tensor.data
    kind = check_datatype(name, tensor.datatype).numpy.kind
    if not raw:
        refuse(f"input {name!r} has no data: neither `data`, nor bytes, nor shared memory")
    item = {"b": bool, "O": str, "f": float}.get(kind, int)
    item = float if tensor.datatype == BF16 else item
    try:
        values = msgspec.json.decode(raw, type=list[item])  # type: ignore[valid-type]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        values = _flatten(name, raw, item)
    return from_values(name, tensor.datatype, tensor.shape, values)


def to_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor: a view of its array where that is possible."""
    if tensor.datatype != BYTES:
        array = np.ascontiguousarray(tensor.data)
        return array.data.cast("B") if array.size else memoryview(b"")
    parts = [_encoded(one) for one in tensor.data.reshape(-1)]
    return memoryview(b"".join(chain.from_iterable((_LENGTH.pack(len(p)), p) for p in parts)))


def to_values(tensor: Tensor) -> list[Any]:
    """Return the elements of a tensor for JSON. Raises Refusal: JSON has no such values."""
    if tensor.datatype == BYTES:
        try:
            return [_encoded(one).decode() for one in tensor.data.reshape(-1)]
        except UnicodeDecodeError:
            refuse(f"output {tensor.name!r} holds bytes that are no UTF-8: ask for binary_data")
    array = from_bf16(tensor.data) if tensor.datatype == BF16 else tensor.data
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        refuse(
            f"output {tensor.name!r} holds infinity or NaN, which JSON lacks: ask for binary_data",
            Status.INTERNAL,
        )
    values: list[Any] = array.reshape(-1).tolist()
    return values


def _encoded(element: str | bytes) -> bytes:
    return element.encode() if isinstance(element, str) else bytes(element)


def _split(name: str, view: memoryview, count: int) -> Array:
    """Return the elements of BYTES, each behind its length in 4 bytes."""
    parts: list[bytes] = []
    at = 0
    while at < view.nbytes and len(parts) <= count:
        start = at + _LENGTH.size
        end = start + _LENGTH.unpack_from(view, at)[0] if start <= view.nbytes else start
        if end > view.nbytes:
            refuse(
                f"input {name!r}: element {len(parts)} of BYTES ends at byte {end} of {view.nbytes}"
            )
        parts.append(bytes(view[start:end]))
        at = end
    if len(parts) != count:
        more = "more than " if len(parts) > count else ""
        refuse(
            f"input {name!r} has {more}{min(len(parts), count)} elements of BYTES; its shape has"
            f" {count}"
        )
    array = np.empty(count, object)
    array[:] = parts
    return array


def _flatten(name: str, raw: msgspec.Raw, item: type) -> list[Any]:
    try:
        values, depth = msgspec.json.decode(raw), 1
        while isinstance(values, list) and values and isinstance(values[0], list):
            depth += 1
            if depth > MAX_DEPTH:
                refuse(
                    f"the data of input {name!r}: JSON nesting depth exceeds maximum allowed limit"
                    f" ({MAX_DEPTH})"
                )
            if not all(isinstance(value, list) for value in values):
                refuse(f"the data of input {name!r} has lists beside values")
            values = list(chain.from_iterable(values))
        flat: list[Any] = msgspec.convert(values, list[item])  # type: ignore[valid-type]
    except RecursionError:
        refuse(f"the data of input {name!r} nests too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        refuse(f"the data of input {name!r}: {error}")
    return flat
