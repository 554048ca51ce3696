"""`tandem serve`: answer inference requests of stock clients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.cli.command import FILE, FOLDER, argument, command, json_option, option, part
from toolkit.cli.options.choices import Executor
from toolkit.cli.options.model import executor_option


@dataclass(frozen=True, slots=True)
class PortOptions:
    """Where it listens."""

    host: str = option("Address to listen on.", default="127.0.0.1")
    http: int = option("Port of HTTP, 0 for a free one.", default=8000, min=0, max=65535)
    grpc: int = option("Port of gRPC, 0 for a free one.", default=8001, min=0, max=65535)
    metrics: int = option("Port of the metrics, 0 for a free one.", default=8002, min=0, max=65535)
    certificate: Path | None = option("TLS certificate, PEM.", type=FILE)
    key: Path | None = option("Its private key, PEM.", type=FILE)
    client_ca: Path | None = option("Take clients with a certificate of this CA alone.", type=FILE)
    token_file: Path | None = option("Ask clients for the token in this file.", type=FILE)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which models are loaded."""

    mode: Literal["none", "explicit", "poll"] = option(
        "Load all models at the start; by requests; or whenever files change.",
        "--model-control", default="none",
    )  # fmt: skip
    load: tuple[str, ...] = option(
        'With --model-control explicit: load it at the start, "*" for all.',
        "--load-model", metavar="NAME",
    )  # fmt: skip
    executor: Executor = executor_option()
    profile: str | None = option("This device's profile: other engines are refused.")


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """What clients may ask for."""

    request_mb: int = option("Largest request in MiB.", default=64, min=1, max=2047)
    in_flight_mb: int = option("Requests being answered, in MiB.", default=512, min=1)
    queue: int = option("Requests that wait for a model.", default=1024, min=1)
    connections: int = option("Open connections of each port.", default=512, min=1)
    shared_memory_prefix: str | None = option(
        "Shared memory of clients must have names that begin so.  [default: any name where only"
        " this machine is answered, else none]",
        metavar="PREFIX",
    )


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve the models of a folder by KServe v2, as Triton does, over HTTP and gRPC.

    DIR has engines (NAME.engine), or is a model repository: NAME/config.pbtxt with
    NAME/1/model.engine or NAME/1/model.onnx. It runs until Ctrl-C.

    Example: tandem serve models/
    """

    folder: Path = argument("DIR", type=FOLDER)
    ports: PortOptions = part("Ports")
    models: ModelOptions = part("Models")
    limits: LimitOptions = part("Limits")
    name: str = option(
        "Name in the server's metadata; some clients want `triton`.", default="tandem"
    )
    otlp: str | None = option(
        "Send spans of inferences to this OpenTelemetry collector.", metavar="URL"
    )
    as_json: bool = json_option("Print the ports and models as JSON when it is ready.")


serve = command(Serve, "serve:serve")  # fmt: skip
