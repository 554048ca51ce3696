"""Keeps what ends with time fresh while a fleet's server runs: signatures and certificates."""

import logging
import math
import threading
import time

from device.errors import TandemError
from toolkit.fleet.authority import Authority
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.folder import IDENTITY, broker_files
from toolkit.fleet.trust.certificates import renew_due
from toolkit.fleet.trust.publish import is_signed
from toolkit.fleet.trust.repository import FleetRepository

LOG = logging.getLogger("tandem.fleet")
LOOK_S = 600.0
WARN_S = 24 * 3600.0


class Refresher:
    """Signs timestamp and snapshot again where half of their time is over, and renews the fleet's
    revocation list and own certificates. What a person has to renew is said once a day."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stopped = threading.Event()
        self._warned_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="refresher", daemon=True)

    def start(self) -> None:
        """Begin; a bench has nothing to sign."""
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopped.is_set():
            for step in (self._sign, self._renew, self._warn):
                try:
                    step()
                except (TandemError, OSError) as error:  # an operator mends it; there is time
                    LOG.error("%s", error)
            self._stopped.wait(LOOK_S)

    def _sign(self) -> None:
        folder = self._fleet.folder
        if is_signed(folder) and FleetRepository(folder).refresh(due_only=True):
            LOG.info("signed the timestamp again")

    def _renew(self) -> None:
        identity = self._fleet.folder / IDENTITY
        if (identity / "ca.key").exists():
            for name in renew_due(Authority(identity), broker_files(self._fleet.folder)):
                LOG.info("renewed %s", name)

    def _warn(self) -> None:
        from toolkit.fleet.server.expiry import read_expiry, sentence, urgency, utc_now

        if time.monotonic() - self._warned_s < WARN_S:
            return
        self._warned_s, now = time.monotonic(), utc_now()
        for row in read_expiry(self._fleet.folder):
            state = urgency(row, now)
            if state != "fine":
                LOG.log(logging.WARNING if state == "soon" else logging.ERROR, sentence(row, now))
