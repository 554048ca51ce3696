"""Run the server of a fleet."""

import signal
import threading
from types import FrameType

from toolkit.cli.commands.fleet import Serve
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.server.metrics import parse_listen
from toolkit.fleet.server.serve import FleetServer


def serve(options: Serve) -> None:
    """Serve until a signal stops it. Raises TandemError."""
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    metrics = None if options.metrics is None else parse_listen(options.metrics)
    fleet = load_fleet(options.folder)
    FleetServer(fleet, metrics=metrics, otlp=options.otlp, replace=options.replace).serve(stopped)
