"""Serve a folder of models until a signal comes."""

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import asdict

from pipelines.runtime.switching import quick_turns
from pipelines.serving.server import Ports, ServeOptions, run
from pipelines.serving.server import serve as serve_until
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.commands.serve import Serve
from toolkit.cli.log import warn


def serve(options: Serve) -> None:
    """Print the ports when the models are ready, then serve. Raises TandemError."""
    ports, models, limits = options.ports, options.models, options.limits
    settings = ServeOptions(
        repository=options.folder,
        mode=models.mode,
        load=models.load,
        host=ports.host,
        http_port=ports.http,
        grpc_port=ports.grpc,
        metrics_port=ports.metrics,
        profile=models.profile,
        executor=models.executor,
        max_request_mb=limits.request_mb,
        max_in_flight_mb=limits.in_flight_mb,
        max_queue=limits.queue,
        max_connections=limits.connections,
        shared_memory_prefix=limits.shared_memory_prefix,
        certificate=ports.certificate,
        key=ports.key,
        client_ca=ports.client_ca,
        token_file=ports.token_file,
        otlp=options.otlp,
        name=options.name,
    )

    def on_ready(listening: Ports) -> None:
        for name, reason in listening.reasons.items():
            warn(f"{name} is not ready: {reason}")
        text = (
            f"serving {', '.join(listening.models) or 'no model yet'} on {ports.host}: HTTP"
            f" {listening.http}, gRPC {listening.grpc}, metrics {listening.metrics}"
        )
        print_result(asdict(listening), text, as_json=options.as_json)

    logging.getLogger("pipelines.serving").setLevel(logging.INFO)
    with quick_turns():
        run(_run(settings, on_ready))


async def _run(options: ServeOptions, on_ready: Callable[[Ports], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve_until(options, stop, on_ready)
