"""The gRPC port. Raw tensors are found in the request's bytes and stay there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from pipelines.serving.codec import from_bytes, from_values, to_bytes
from pipelines.serving.messages import METHODS, SERVICE, message
from pipelines.serving.protocol import (
    KEPT_ID,
    InferRequest,
    InferResponse,
    Parameter,
    Refusal,
    RequestedOutput,
    Tensor,
    check_datatype,
    refuse,
    trace_of,
)
from pipelines.serving.service import Service, refusal_of
from pipelines.serving.shared_memory import Kind

RAW_INPUT = 7  # field of ModelInferRequest
RAW_OUTPUT = bytes([6 << 3 | 2])  # tag of the field of ModelInferResponse
MAX_STREAMED = 64  # requests of one stream that are being answered
KEPT_BYTES = 2048  # of a request without its raw tensors: clients send the same again and again

Context = Any


def split_raw(data: bytes) -> tuple[bytes, list[memoryview]]:
    """Return a ModelInferRequest without its raw tensors, and these as views.

    Raises Refusal: it is no message.
    """
    view, at, rest, raw = memoryview(data), 0, [], []
    try:
        while at < len(data):
            start = at
            tag, at = data[at], at + 1
            if tag > 0x7F:
                tag, at = _varint(data, start)
            kind = tag & 7
            if kind == 2:
                size, at = data[at], at + 1
                if size > 0x7F:
                    size, at = _varint(data, at - 1)
                at += size
            elif kind == 0:
                _, at = _varint(data, at)
            elif kind in {1, 5}:
                at += 8 if kind == 1 else 4
            else:
                refuse(f"the request is no ModelInferRequest: wire type {kind} at byte {start}")
            if at > len(data):
                refuse(f"the request is no ModelInferRequest: it ends in the field at byte {start}")
            if tag == RAW_INPUT << 3 | 2:
                raw.append(view[at - size : at])
            else:
                rest.append(view[start:at])
    except IndexError:
        refuse(f"the request is no ModelInferRequest: it ends at byte {len(data)} in a number")
    return b"".join(rest), raw


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            refuse(f"the request is no ModelInferRequest: a number of more than 64 bits at {at}")


def _to_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A ModelInferRequest without its raw tensors; `inputs` are (name, datatype, shape, parameters,
    the message where it has typed `contents`)."""

    model: str
    version: str
    id: str
    parameters: Mapping[str, Parameter]
    inputs: Sequence[tuple[str, str, tuple[int, ...], Mapping[str, Parameter], Any]]
    outputs: Sequence[RequestedOutput]


def parse_head(content: bytes) -> RequestHead:
    """Return the head in a message. Raises Refusal."""
    try:
        request = message("ModelInferRequest").FromString(content)
    except DecodeError as error:
        refuse(f"the request is no ModelInferRequest: {error}")
    return RequestHead(
        request.model_name, request.model_version, request.id, _parameters(request.parameters),
        [
            (
                tensor.name, tensor.datatype, tuple(tensor.shape), _parameters(tensor.parameters),
                tensor if tensor.HasField("contents") else None,
            )
            for tensor in request.inputs
        ],
        [RequestedOutput(row.name, _parameters(row.parameters)) for row in request.outputs],
    )  # fmt: skip


_known_head = lru_cache(128)(parse_head)


def parse_request(data: bytes, service: Service, trace: str) -> InferRequest:
    """Return the request of a ModelInferRequest. Raises Refusal."""
    rest, raw = split_raw(data)
    head = (_known_head if len(rest) <= KEPT_BYTES else parse_head)(rest)
    inputs, used = [], 0
    for name, datatype, shape, parameters, typed in head.inputs:
        if typed is not None and raw:
            refuse(
                f"input {name!r} has `contents`, and the request has raw_input_contents: give"
                " one of them"
            )
        if "shared_memory_region" in parameters:
            inputs.append(service.regions.input(name, datatype, shape, parameters))
        elif typed is not None:
            inputs.append(_typed(typed, shape))
        elif used < len(raw):
            inputs.append(from_bytes(name, datatype, shape, raw[used]))
            used += 1
        else:
            refuse(
                f"input {name!r} has no data: {len(raw)} raw_input_contents are given, and no"
                " `contents`"
            )
    if used != len(raw):
        refuse(f"the request has {len(raw)} raw_input_contents for {used} inputs")
    return InferRequest(
        head.model, head.version, inputs, head.outputs, head.id, head.parameters, trace
    )


def _typed(one: Any, shape: tuple[int, ...]) -> Tensor:  # noqa: ANN401
    field = check_datatype(one.name, one.datatype).contents
    if not field:
        refuse(f"input {one.name!r} of {one.datatype} has no typed contents: send it raw")
    fields = [row.name for row, _ in one.contents.ListFields()]
    if fields not in ([], [field]):
        refuse(f"input {one.name!r} of {one.datatype} has {', '.join(fields)}; give {field} alone")
    return from_values(one.name, one.datatype, shape, getattr(one.contents, field))


def _parameters(rows: Any) -> dict[str, Parameter]:  # noqa: ANN401
    result = {}
    for key in rows:
        choice = rows[key].WhichOneof("choice")
        if choice is None:
            refuse(f"the parameter {key!r} has no value")
        result[key] = getattr(rows[key], choice)
    return result


def encode_response(response: InferResponse) -> bytes:
    """Return the bytes of a ModelInferResponse."""
    outputs = tuple([(row.name, row.datatype, row.shape, row.place) for row in response.outputs])
    head = _known_response_head if len(response.id) <= KEPT_ID else _response_head
    parts: list[bytes | memoryview] = [head(response.model, response.version, response.id, outputs)]
    for tensor in response.outputs:
        data = memoryview(b"") if tensor.place is not None else to_bytes(tensor)
        parts += [RAW_OUTPUT, _to_varint(len(data)), data]
    return b"".join(parts)


def _response_head(
    model: str, version: str, ident: str,
    outputs: Sequence[tuple[str, str, tuple[int, ...], tuple[str, int, int] | None]],
) -> bytes:  # fmt: skip
    """Return a ModelInferResponse without its raw tensors."""
    header = message("ModelInferResponse")(model_name=model, model_version=version, id=ident)
    for name, datatype, shape, place in outputs:
        row = header.outputs.add(name=name, datatype=datatype, shape=shape)
        if place is not None:
            region, offset, size = place
            row.parameters["shared_memory_region"].string_param = region
            row.parameters["shared_memory_byte_size"].int64_param = size
            if offset:
                row.parameters["shared_memory_offset"].int64_param = offset
    content: bytes = header.SerializeToString()
    return content


_known_response_head = lru_cache(128)(_response_head)


async def _load(service: Service, request: Any) -> Mapping[str, Any]:  # noqa: ANN401
    parameters = _parameters(request.parameters)
    files = {
        key.removeprefix("file:"): row.bytes_param
        for key, row in request.parameters.items()
        if key.startswith("file:")
    }
    await service.repository.load(request.model_name, str(parameters.get("config", "")), files)
    return {}


async def _unload(service: Service, request: Any) -> Mapping[str, Any]:  # noqa: ANN401
    with_steps = _parameters(request.parameters).get("unload_dependents") is True
    await service.repository.unload(request.model_name, with_steps=with_steps)
    return {}


def _model_ready(service: Service, request: Any) -> Mapping[str, Any]:  # noqa: ANN401
    try:
        service.repository.find(request.name, request.version)
    except Refusal:
        return {"live": False}
    return {"live": True}


def _model_config(service: Service, request: Any) -> Any:  # noqa: ANN401
    config = service.repository.find(request.name, request.version).config
    return message("ModelConfigResponse")(config=config)


async def _index(service: Service, request: Any) -> Mapping[str, Any]:  # noqa: ANN401
    rows = await service.repository.index()
    return {"models": [row for row in rows if not request.ready or row["state"] == "READY"]}


def _regions(service: Service, request: Any, kind: Kind = "system") -> Mapping[str, Any]:  # noqa: ANN401
    regions = service.regions.status(request.name, kind)
    return {"regions": {name: region.as_json() for name, region in regions.items()}}


def _register(service: Service, request: Any) -> Mapping[str, Any]:  # noqa: ANN401
    service.regions.register(request.name, request.key, request.offset, request.byte_size)
    return {}


def _unregister(service: Service, request: Any) -> Mapping[str, Any]:  # noqa: ANN401
    service.regions.unregister(request.name)
    return {}


async def _register_cuda(service: Service, request: Any) -> Mapping[str, Any]:  # noqa: ANN401
    await service.regions.register_cuda(
        request.name, request.raw_handle, request.device_id, request.byte_size
    )
    return {}


async def _unregister_cuda(service: Service, request: Any) -> Mapping[str, Any]:  # noqa: ANN401
    await service.regions.unregister_cuda(request.name)
    return {}


def _trace(service: Service, request: Any) -> Mapping[str, Any]:  # noqa: ANN401
    rows = {name: tuple(row.value) or None for name, row in request.settings.items()}
    settings = service.trace_settings(request.model_name, rows)
    return {"settings": {name: {"value": list(values)} for name, values in settings.items()}}


def _logging(service: Service, request: Any) -> Mapping[str, Any]:  # noqa: ANN401
    settings = service.log_settings(_parameters(request.settings))
    kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    return {"settings": {name: {kinds[type(one)]: one} for name, one in settings.items()}}


# What answers each method of `METHODS`: the fields of its answer, or the message itself.
HANDLERS: Mapping[str, Callable[[Service, Any], Any]] = {
    "ServerLive": lambda service, _: {"live": True},
    "ServerReady": lambda service, _: {"live": service.ready},
    "ModelReady": _model_ready,
    "ServerMetadata": lambda service, _: service.server_metadata(),
    "ModelMetadata": lambda service, r: service.model_metadata(r.name, r.version),
    "ModelConfig": _model_config,
    "ModelStatistics": lambda service, r: service.statistics(r.name, r.version),
    "RepositoryIndex": _index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
    "SystemSharedMemoryStatus": _regions,
    "SystemSharedMemoryRegister": _register,
    "SystemSharedMemoryUnregister": _unregister,
    "CudaSharedMemoryStatus": partial(_regions, kind="cuda"),
    "CudaSharedMemoryRegister": _register_cuda,
    "CudaSharedMemoryUnregister": _unregister_cuda,
    "TraceSetting": _trace,
    "LogSettings": _logging,
}
OPEN_METHODS = frozenset({"ServerLive", "ServerReady"})  # asked by probes, without a token


async def _abort(context: Context, error: Exception, name: str) -> None:
    refusal = refusal_of(error, name)
    code = grpc.StatusCode[refusal.status.value[1]]
    await context.abort(code, str(refusal)[:2000])  # trailers have a limit of 8 KB


def _metadata(context: Context) -> Mapping[str, str]:
    """Return the texts among the headers of a request; the first of a name counts."""
    rows = context.invocation_metadata() or ()
    return {key: value for key, value in reversed(rows) if isinstance(value, str)}


def _unary(service: Service, name: str) -> grpc.RpcMethodHandler:
    request_kind, answer_kind = map(message, METHODS[name])
    handler = HANDLERS[name]

    async def answer(data: bytes, context: Context) -> bytes:
        try:
            if name not in OPEN_METHODS:
                service.authorize(_metadata(context).get("authorization", ""))
            try:
                request = request_kind.FromString(data)
            except DecodeError as error:
                refuse(f"the request of {name} is not one: {error}")
            result = handler(service, request)
            if isinstance(result, Awaitable):
                result = await result
            if isinstance(result, Mapping):
                result = json_format.ParseDict(dict(result), answer_kind())
            content: bytes = result.SerializeToString()
            return content
        except Exception as error:
            await _abort(context, error, name)
            raise

    return grpc.unary_unary_rpc_method_handler(answer)


def _infer(service: Service) -> grpc.RpcMethodHandler:
    async def answer(data: bytes, context: Context) -> bytes:
        try:
            headers = _metadata(context)
            service.authorize(headers.get("authorization", ""))
            trace = trace_of(headers.get("traceparent", ""))
            if trace:
                context.set_trailing_metadata((("traceparent", trace),))
            service.hold(len(data))
            try:
                return encode_response(await service.infer(parse_request(data, service, trace)))
            finally:
                service.release(len(data))
        except Exception as error:
            await _abort(context, error, "ModelInfer")
            raise

    return grpc.unary_unary_rpc_method_handler(answer)


def _stream(service: Service) -> grpc.RpcMethodHandler:
    """Answers of a stream come in the order of its requests, refusals as `error_message`."""

    async def answer(requests: AsyncIterator[bytes], context: Context) -> None:
        try:
            service.authorize(_metadata(context).get("authorization", ""))
        except Refusal as refusal:
            await _abort(context, refusal, "ModelStreamInfer")
        trace = trace_of(_metadata(context).get("traceparent", ""))
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(MAX_STREAMED)

        async def write() -> None:
            while (task := await answers.get()) is not None:
                await context.write(await task)

        writer = asyncio.create_task(write())
        try:
            async for data in requests:
                await answers.put(asyncio.create_task(_streamed(service, data, trace)))
            await answers.put(None)
            await writer
        finally:
            writer.cancel()
            while not answers.empty():
                task = answers.get_nowait()
                if task is not None:
                    task.cancel()

    return grpc.stream_stream_rpc_method_handler(answer)


async def _streamed(service: Service, data: bytes, trace: str) -> bytes:
    """Return a ModelStreamInferResponse."""
    kind, counted = message("ModelStreamInferResponse"), 0
    try:
        service.hold(len(data))
        counted = len(data)
        request = parse_request(data, service, trace)
        response = encode_response(await service.infer(request))
        if request.parameters.get("triton_enable_empty_final_response"):
            end = message("ModelInferResponse")()
            end.parameters["triton_final_response"].bool_param = True
            response += end.SerializeToString()
    except Exception as error:  # noqa: BLE001  (the client is to hear of it)
        refusal = refusal_of(error, "ModelStreamInfer")
        failed: bytes = kind(error_message=str(refusal)).SerializeToString()
        return failed
    finally:
        service.release(counted)
    return b"".join((bytes([2 << 3 | 2]), _to_varint(len(response)), response))


async def start(
    service: Service, address: str, *, max_concurrent: int, max_connections: int,
    credentials: grpc.ServerCredentials | None,
) -> tuple[Any, int]:  # fmt: skip
    """Listen on HOST:PORT; return the server and its port. Raises RuntimeError: it cannot."""
    server = grpc.aio.server(
        maximum_concurrent_rpcs=max_concurrent,
        options=(
            ("grpc.max_receive_message_length", service.max_request_bytes),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.max_ping_strikes", 0),  # clients may ask often whether it lives
            ("grpc.keepalive_permit_without_calls", 1),
        ),
    )
    handlers = {name: _unary(service, name) for name in METHODS}
    handlers |= {"ModelInfer": _infer(service), "ModelStreamInfer": _stream(service)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    return server, port
