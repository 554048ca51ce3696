"""Keeps the signatures of a fleet's repository fresh while its server runs."""

import logging
import threading

from device.errors import TandemError
from toolkit.fleet.admission import is_signed
from toolkit.fleet.fleet_folder import Fleet

LOG = logging.getLogger("tandem.fleet")
LOOK_S = 600.0


class Refresher:
    """Signs timestamp and snapshot again where half of their time is over."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="refresher", daemon=True)

    def start(self) -> None:
        """Begin; a fleet without keys has nothing to sign."""
        if is_signed(self._fleet.folder):
            self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        from toolkit.fleet.repository import FleetRepository

        while not self._stopped.is_set():
            try:
                if FleetRepository(self._fleet.folder).refresh(due_only=True):
                    LOG.info("signed the timestamp again")
            except (TandemError, OSError) as error:  # an operator mends it; devices still have time
                LOG.error("cannot sign the timestamp again: %s", error)
            self._stopped.wait(LOOK_S)
