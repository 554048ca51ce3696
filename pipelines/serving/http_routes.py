"""What each path of the HTTP port answers."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import unquote

import msgspec
import numpy as np

from pipelines.serving.codec import (
    JsonTensor,
    decode_json,
    from_bytes,
    from_json,
    from_values,
    parse_request,
    to_bytes,
    to_values,
)
from pipelines.serving.http_messages import HEADER_LENGTH, Answer, Head
from pipelines.serving.protocol import (
    BYTES,
    DATATYPES,
    KEPT_ID,
    InferRequest,
    InferResponse,
    Refusal,
    Status,
    Tensor,
    refuse,
    trace_of,
    whole,
)
from pipelines.serving.service import Service, wants_binary
from pipelines.serving.shared_memory import Kind


def _json(value: object) -> Answer:
    return Answer((msgspec.json.encode(value),))


Handler = Callable[..., Awaitable[Answer]]


async def _live(service: Service, head: Head, body: memoryview) -> Answer:
    return _json({"live": True})


async def _ready(service: Service, head: Head, body: memoryview) -> Answer:
    if not service.ready:
        refuse("the server is loading its models", Status.UNAVAILABLE)
    return _json({"ready": True})


async def _metadata(service: Service, head: Head, body: memoryview) -> Answer:
    return _json(service.server_metadata())


async def _model_metadata(
    service: Service, head: Head, body: memoryview, model: str, version: str = ""
) -> Answer:
    return _json(service.model_metadata(model, version))


async def _model_ready(
    service: Service, head: Head, body: memoryview, model: str, version: str = ""
) -> Answer:
    service.repository.find(model, version)
    return _json({"name": model, "ready": True})


async def _model_config(
    service: Service, head: Head, body: memoryview, model: str, version: str = ""
) -> Answer:
    return _json(service.model_config(model, version))


async def _statistics(
    service: Service, head: Head, body: memoryview, model: str = "", version: str = ""
) -> Answer:
    return _json(service.statistics(model, version))


async def _index(service: Service, head: Head, body: memoryview) -> Answer:
    try:
        query = _INDEX.decode(body or b"{}")
    except msgspec.ValidationError as error:
        refuse(f"Invalid value for 'ready': expected a boolean in an object ({error})")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        refuse(f"failed to parse the request JSON: {error}")
    rows = await service.repository.index()
    return _json([row for row in rows if not query.ready or row["state"] == "READY"])


async def _load(service: Service, head: Head, body: memoryview, model: str) -> Answer:
    parameters = _parameters(body)
    files = {}
    for key, value in parameters.items():
        if key.startswith("file:"):
            try:
                files[key.removeprefix("file:")] = msgspec.convert(value, bytes)
            except msgspec.ValidationError as error:
                refuse(f"failed to load {model!r}: {key!r} is no base64 ({error})")
    await service.repository.load(model, str(parameters.get("config", "")), files)
    return Answer()


async def _unload(service: Service, head: Head, body: memoryview, model: str) -> Answer:
    with_steps = _parameters(body).get("unload_dependents", False) is True
    await service.repository.unload(model, with_steps=with_steps)
    return Answer()


async def _regions(
    service: Service, head: Head, body: memoryview, kind: Kind, region: str = ""
) -> Answer:
    return _json([one.as_json() for one in service.regions.status(region, kind).values()])


async def _register(
    service: Service, head: Head, body: memoryview, kind: Kind, region: str
) -> Answer:
    request, where = _object(body), f"shared memory region {region!r}"
    if "byte_size" not in request:
        refuse(f"{where} has no byte_size")
    size = whole(request, "byte_size", where)
    if kind == "cuda":
        try:
            handle = msgspec.convert(request.get("raw_handle"), dict[Literal["b64"], bytes])["b64"]
        except (KeyError, msgspec.MsgspecError) as error:
            refuse(f"{where} has a raw_handle that is no object with `b64` in base64 ({error})")
        await service.regions.register_cuda(
            region, handle, whole(request, "device_id", where), size
        )
        return Answer()
    key = request.get("key")
    if not isinstance(key, str):
        refuse(f"{where} has the key {key!r}: give the name of a shared memory")
    service.regions.register(region, key, whole(request, "offset", where), size)
    return Answer()


async def _unregister(
    service: Service, head: Head, body: memoryview, kind: Kind, region: str = ""
) -> Answer:
    if kind == "cuda":
        await service.regions.unregister_cuda(region)
    else:
        service.regions.unregister(region)
    return Answer()


async def _trace(service: Service, head: Head, body: memoryview, model: str = "") -> Answer:
    changes = {}
    for name, value in _object(body).items():
        values = value if isinstance(value, list) else [value]
        changes[name] = None if value is None else tuple(map(str, values)) or None
    rows = service.trace_settings(model, changes)
    return _json({
        name: list(values) if name == "trace_level" else values[0] for name, values in rows.items()
    })  # fmt: skip


async def _logging(service: Service, head: Head, body: memoryview) -> Answer:
    return _json(service.log_settings(_object(body)))


async def _infer(
    service: Service, head: Head, body: memoryview, model: str, version: str = ""
) -> Answer:
    size = head.header_length
    trace = trace_of(head.headers.get("traceparent", ""))
    if size == 0:
        request, raw = _raw_request(service, body, model, version, trace), True
    else:
        if size is not None and size > len(body):
            refuse(f"the header {HEADER_LENGTH!r} is {size}; the body has {len(body)} bytes")
        raw, rest = False, len(body) if size is None else size
        parsed = parse_request(body[:rest])
        request = InferRequest(
            model, version, _inputs(service, parsed.inputs, body[rest:]), parsed.outputs,
            parsed.id, parsed.parameters, trace,
        )  # fmt: skip
    answer = encode_response(await service.infer(request), request, all_binary=raw)
    if trace:
        headers = (*answer.headers, ("traceparent", trace))
        return Answer(answer.parts, answer.status, headers)
    return answer


def _inputs(service: Service, tensors: Sequence[JsonTensor], binary: memoryview) -> list[Tensor]:
    """Return the inputs of a request. Raises Refusal."""
    inputs, at = [], 0
    for tensor in tensors:
        parameters, where = tensor.parameters, f"input {tensor.name!r}"
        if "shared_memory_region" in parameters:
            inputs.append(
                service.regions.input(tensor.name, tensor.datatype, tensor.shape, parameters)
            )
        elif "binary_data_size" in parameters:
            if tensor.data:
                refuse(f"{where} has both `data` and `binary_data_size`: give one of them")
            size = whole(parameters, "binary_data_size", where)
            if at + size > len(binary):
                refuse(
                    f"{where} has a binary_data_size of {size}; {len(binary) - at} bytes are left"
                    " in the body"
                )
            inputs.append(
                from_bytes(tensor.name, tensor.datatype, tensor.shape, binary[at : at + size])
            )
            at += size
        else:
            inputs.append(from_json(tensor))
    if at != len(binary):
        refuse(f"the inputs have {at} bytes of binary data; the body has {len(binary)}")
    return inputs


def _raw_request(
    service: Service, body: memoryview, name: str, version: str, trace: str
) -> InferRequest:
    """Return a request whose body is the bytes of the only input. Raises Refusal."""
    model = service.repository.find(name, version)
    if len(model.inputs) != 1:
        refuse(
            "Raw request must only have 1 input (found 1) to be deduced but got"
            f" {len(model.inputs)} inputs in {name!r} model configuration"
        )
    port = next(iter(model.inputs.values()))
    shape = [1, *port.shape()] if model.max_batch else port.shape()
    if shape.count(-1) > 1:
        refuse(
            f"The shape of the raw input {port.name!r} can not be deduced because there are more"
            f" than one variable-sized dimension: it is {shape}"
        )
    if port.datatype == BYTES:
        if any(size != 1 for size in shape):
            refuse(
                f"For BYTE datatype raw input {port.name!r}, the model must have input shape [1]:"
                f" it is {shape}"
            )
        tensor = from_values(port.name, BYTES, tuple(shape), [bytes(body)])
    else:
        if shape.count(-1) == 1:
            place = shape.index(-1)
            known = DATATYPES[port.datatype].numpy.itemsize
            known *= int(np.prod([size for size in shape if size != -1]))
            shape[place] = len(body) // known if known else 0
        tensor = from_bytes(port.name, port.datatype, tuple(shape), body)
    return InferRequest(name, version, [tensor], traceparent=trace)


def encode_response(response: InferResponse, request: InferRequest, *, all_binary: bool) -> Answer:
    """Return the answer with JSON first, then the binary outputs. Raises Refusal."""
    requested = {output.name: output for output in request.outputs}
    rows: list[_Row] = []
    parts: list[bytes | memoryview] = []
    values: dict[int, list[Any]] = {}
    for tensor in response.outputs:
        size = None
        if tensor.place is None:
            if all_binary or wants_binary(requested.get(tensor.name), request.parameters):
                parts.append(to_bytes(tensor))
                size = len(parts[-1])
            else:
                values[len(rows)] = to_values(tensor)
        rows.append((tensor.name, tensor.datatype, tensor.shape, tensor.place, size))
    model, version, ident = response.model, response.version, response.id
    if values or len(ident) > KEPT_ID:
        head = _response_json(model, version, ident, rows, values)
    else:
        head = _known_response_json(model, version, ident, tuple(rows))
    if not parts:
        return Answer((head,))
    headers = (
        ("Content-Type", "application/octet-stream"),
        ("Inference-Header-Content-Length", str(len(head))),
    )
    return Answer((head, *parts), headers=headers)


# Name, datatype, shape, place in shared memory, bytes of binary data.
_Row = tuple[str, str, tuple[int, ...], tuple[str, int, int] | None, int | None]


def _response_json(
    model: str, version: str, ident: str, rows: Sequence[_Row],
    values: Mapping[int, list[Any]] = MappingProxyType({}),
) -> bytes:  # fmt: skip
    """Return the JSON of an answer; `values`: the elements of the outputs that have them here."""
    outputs: list[dict[str, Any]] = []
    for number, (name, datatype, shape, place, size) in enumerate(rows):
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if place is not None:
            region, offset, written = place
            output["parameters"] = {
                "shared_memory_region": region, "shared_memory_byte_size": written,
                **({"shared_memory_offset": offset} if offset else {}),
            }  # fmt: skip
        elif size is not None:
            output["parameters"] = {"binary_data_size": size}
        else:
            output["data"] = values[number]
        outputs.append(output)
    body: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": outputs}
    if ident:
        body["id"] = ident
    return msgspec.json.encode(body)


_known_response_json = lru_cache(128)(_response_json)


def _object(body: memoryview) -> dict[str, Any]:
    """Return a JSON object; an empty body is an empty one. Raises Refusal."""
    result: dict[str, Any] = decode_json(_OBJECT, body) if body else {}
    return result


def _parameters(body: memoryview) -> dict[str, Any]:
    parameters = _object(body).get("parameters", {})
    if not isinstance(parameters, dict):
        refuse("`parameters` of the request is no object")
    return parameters


class _IndexRequest(msgspec.Struct):
    ready: bool = False


_OBJECT = msgspec.json.Decoder(dict[str, Any])
_INDEX = msgspec.json.Decoder(_IndexRequest)

_M = "/v2/models/(?P<model>[^/]+)"
_MV = _M + "(?:/versions/(?P<version>[^/]+))?"
_S = "/v2/(?P<kind>system|cuda)sharedmemory"
_SR = _S + "/region/(?P<region>[^/]+)"
ROUTES: tuple[tuple[str, re.Pattern[str], Handler], ...] = tuple(
    (method, re.compile(path + "/?"), handler)
    for method, path, handler in (
        ("POST", f"{_MV}/infer", _infer),
        ("GET", "/v2/health/live", _live),
        ("GET", "/v2/health/ready", _ready),
        ("GET", "/v2", _metadata),
        ("GET", "/v2/models/stats", _statistics),
        ("GET", f"{_MV}/ready", _model_ready),
        ("GET", f"{_MV}/config", _model_config),
        ("GET", f"{_MV}/stats", _statistics),
        ("GET", f"{_M}/trace/setting", _trace),
        ("POST", f"{_M}/trace/setting", _trace),
        ("GET", _MV, _model_metadata),
        ("POST", "/v2/repository/index", _index),
        ("POST", "/v2/repository/models/(?P<model>[^/]+)/load", _load),
        ("POST", "/v2/repository/models/(?P<model>[^/]+)/unload", _unload),
        ("GET", f"{_S}(?:/region/(?P<region>[^/]+))?/status", _regions),
        ("POST", f"{_SR}/register", _register),
        ("POST", f"{_S}(?:/region/(?P<region>[^/]+))?/unregister", _unregister),
        ("GET", "/v2/trace/setting", _trace),
        ("POST", "/v2/trace/setting", _trace),
        ("GET", "/v2/logging", _logging),
        ("POST", "/v2/logging", _logging),
    )
)


@lru_cache(128)
def route(method: str, path: str) -> tuple[Handler, Mapping[str, str]]:
    """Return what answers a path, and the names in it. Raises Refusal."""
    allowed = []
    for one, pattern, handler in ROUTES:
        if match := pattern.fullmatch(path):
            if method == one:
                names = {key: unquote(text or "") for key, text in match.groupdict().items()}
                return handler, names
            allowed.append(one)
    if allowed:
        refuse(f"{path[:200]} takes {' and '.join(allowed)}, not {method[:20]}", Status.NO_METHOD)
    raise Refusal(Status.NOT_FOUND, f"{path[:200]!r} is no path of this server")
