"""`tandem fleet serve`: the server of a fleet."""

import signal
import threading
from pathlib import Path
from types import FrameType

import click

from toolkit.cli.options.fleet import fleet_option


@click.command(epilog="Example: tandem fleet serve --fleet fleet/")
@fleet_option
def serve(folder: Path) -> None:
    """Watch all devices, carry rollouts out and serve what devices fetch, until it is stopped.

    It may be killed at any moment: what it decides is in the store before it is sent. A second
    server on the same store stands by.
    """
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.server.serve import FleetServer

    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    FleetServer(load_fleet(folder)).serve(stopped)
