"""Starts the ports over a repository, and ends them."""

import asyncio
import contextlib
import ctypes
import gc
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from device.errors import ConfigError, PipelineError
from device.install_advice import pip_install
from device.runtime.executors.protocol import ExecutorName
from pipelines.host_header import is_loopback
from pipelines.metrics import MetricsServer
from pipelines.serving.repository import Mode

if TYPE_CHECKING:
    from pipelines.serving.http import HttpServer
    from pipelines.serving.repository import Repository
    from pipelines.serving.service import Service

MIB = 1 << 20
KEPT_BYTES = 32 * MIB  # the most that malloc.h takes for the threshold of mmap
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
GC_THRESHOLDS = (700, 10, 10)  # Python's own; the command line's are for short commands
GRACE_S = 5.0  # what is being answered at the end may take so long


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a server is started with. A port of 0 is any free one; None: it is not opened."""

    repository: Path
    mode: Mode = "none"
    load: tuple[str, ...] = ()
    poll_s: float = 2.0
    host: str = "127.0.0.1"
    http_port: int | None = 8000
    grpc_port: int | None = 8001
    metrics_port: int | None = 8002
    profile: str | None = None
    executor: ExecutorName = "auto"
    max_request_mb: int = 64
    max_in_flight_mb: int = 512
    max_queue: int = 1024
    max_connections: int = 512
    shared_memory_prefix: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    token_file: Path | None = None
    otlp: str | None = None
    name: str = "tandem"


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a server listens, and why models are not ready."""

    http: int | None
    grpc: int | None
    metrics: int | None
    models: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)


@asynccontextmanager
async def serving(
    options: ServeOptions, models: "Repository | None" = None
) -> AsyncIterator[Ports]:
    """Serve a folder, or other models, inside the block. Raises TandemError."""
    try:
        import grpc  # noqa: F401

        from pipelines.serving.http import HttpServer
        from pipelines.serving.metrics import metrics_text
        from pipelines.serving.repository import Repository, scan
        from pipelines.serving.service import Service
        from pipelines.serving.shared_memory import Regions
        from pipelines.serving.spans import Spans
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs {error.name}: {pip_install('serve')}") from error
    token = _read(options.token_file).decode().strip() if options.token_file else ""
    if options.token_file and not token:
        raise ConfigError(f"the token file {options.token_file} is empty: write a token into it.")
    prefix = options.shared_memory_prefix
    if prefix is None and is_loopback(options.host):
        prefix = ""
    _keep_memory()
    async with AsyncExitStack() as stack:
        regions = Regions(prefix)
        stack.callback(regions.close)
        repository = models or Repository(
            partial(scan, options.repository),
            options.mode,
            profile=options.profile,
            executor=options.executor,
            max_queue=options.max_queue,
        )
        spans = stack.enter_context(Spans(options.otlp)) if options.otlp else None
        service = Service(
            repository, regions, token=token, spans=spans, name=options.name,
            max_request_bytes=options.max_request_mb * MIB,
            max_in_flight_bytes=max(options.max_in_flight_mb, options.max_request_mb) * MIB,
        )  # fmt: skip
        http = HttpServer(service, options.host, options.max_connections)
        stack.callback(http.close)
        stack.push_async_callback(repository.close)
        ports = Ports(
            await _listen_http(options, http, stack),
            await _listen_grpc(options, service, stack),
            _listen_metrics(options, lambda: metrics_text(service, len(http.connections)), stack),
        )
        await repository.load_all(options.load)
        service.ready = True
        if options.mode == "poll":
            task = asyncio.create_task(repository.poll(options.poll_s))
            stack.push_async_callback(_cancel, task)
        names = tuple(dict.fromkeys(model.name for model in repository.models))
        yield replace(ports, models=names, reasons=repository.reasons)
        service.ready = False


@contextmanager
def _collecting_often() -> Iterator[None]:
    """Collect garbage often inside the block: each request of asyncio and grpcio leaves reference
    cycles, which grow the process until they are collected. What start-up made is never searched
    again, so that a collection is short."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _keep_memory() -> None:
    """Let malloc keep what requests give back: to map and clear the pages of tensors anew for each
    costs as much as to read them."""
    with contextlib.suppress(AttributeError):  # of glibc alone; the numbers are those of malloc.h
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, 2 * KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES)


async def _listen_http(
    options: ServeOptions, http: "HttpServer", stack: AsyncExitStack
) -> int | None:
    from pipelines.serving.http import Connection

    if options.http_port is None:
        return None
    try:
        listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(http), options.host, options.http_port, ssl=_tls(options)
        )
    except OSError as error:
        raise _taken("HTTP", options.host, options.http_port, error) from error
    stack.callback(listener.close)
    port: int = listener.sockets[0].getsockname()[1]
    return port


async def _listen_grpc(
    options: ServeOptions, service: "Service", stack: AsyncExitStack
) -> int | None:
    from pipelines.serving import grpc as grpc_port

    if options.grpc_port is None:
        return None
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        server, port = await grpc_port.start(
            service,
            f"{host}:{options.grpc_port}",
            max_concurrent=options.max_queue,
            max_connections=options.max_connections,
            credentials=_credentials(options),
        )
    except RuntimeError as error:
        raise _taken("gRPC", options.host, options.grpc_port, error) from error
    stack.push_async_callback(server.stop, GRACE_S)
    return port


def _listen_metrics(
    options: ServeOptions, text: Callable[[], str], stack: AsyncExitStack
) -> int | None:
    if options.metrics_port is None:
        return None
    try:
        metrics = MetricsServer((options.host, options.metrics_port), text)
    except OSError as error:
        raise _taken("metrics", options.host, options.metrics_port, error) from error
    metrics.start()
    stack.callback(metrics.close)
    return metrics.port


def check_reach(options: ServeOptions) -> None:
    """Raise ConfigError: other machines could reach a server that asks for nothing."""
    if not is_loopback(options.host) and options.token_file is None and options.client_ca is None:
        raise ConfigError(
            f"the host {options.host!r} can be reached by other machines: give a token file, or a"
            " CA of clients with certificate and key, or serve on 127.0.0.1."
        )


def _tls(options: ServeOptions) -> ssl.SSLContext | None:
    if options.certificate is None or options.key is None:
        if options.certificate or options.key or options.client_ca:
            raise ConfigError("TLS needs both a certificate and its key: give the two files.")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.certificate, options.key)
        if options.client_ca is not None:
            context.load_verify_locations(options.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(
            f"the certificate {options.certificate} and its key cannot be used: {error}."
        ) from error
    return context


def _credentials(options: ServeOptions) -> object | None:
    if _tls(options) is None or options.certificate is None or options.key is None:
        return None
    import grpc

    ca = _read(options.client_ca) if options.client_ca else None
    pair = (_read(options.key), _read(options.certificate))
    credentials: object = grpc.ssl_server_credentials([pair], ca, ca is not None)
    return credentials


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path.") from error


def _taken(what: str, host: str, port: int, error: Exception) -> PipelineError:
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return PipelineError(
        f"the server cannot listen on {host}:{port} for {what} ({reason}): give another host or"
        " port."
    )


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def run(server: Coroutine[Any, Any, None]) -> None:
    """Run a server in uvloop, which takes less CPU time, or in asyncio if there is none that loads
    and has `run` (0.18)."""
    try:
        from uvloop import run as run_in_uvloop
    except ImportError:
        asyncio.run(server)
    else:
        run_in_uvloop(server)


async def serve(
    options: ServeOptions, stop: asyncio.Event, on_ready: Callable[[Ports], None]
) -> None:
    """Serve until `stop` is set. Raises TandemError."""
    check_reach(options)
    async with serving(options) as ports:
        with _collecting_often():
            on_ready(ports)
            await stop.wait()
