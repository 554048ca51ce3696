"""Tells systemd that the agent is up and alive (sd_notify(3)), where it runs as a service of it.

Messages go as datagrams to the socket that NOTIFY_SOCKET names; a name that begins with "@" is in
the abstract namespace. WATCHDOG_USEC, where it is set, says how often systemd wants to hear of us.
"""

import contextlib
import os
import socket
from collections.abc import Mapping

READY, STOPPING, WATCHDOG = "READY=1", "STOPPING=1", "WATCHDOG=1"


class Notifier:
    """Sends states to systemd; does nothing where there is none."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        period = environment.get("WATCHDOG_USEC", "")
        pid = environment.get("WATCHDOG_PID", "") or str(os.getpid())
        watched = bool(self._address) and period.isdecimal() and pid == str(os.getpid())
        # Half of what systemd allows, as sd_watchdog_enabled(3) recommends.
        self._period_s = int(period) / 2e6 if watched else 0.0
        self._due_s = 0.0

    def send(self, state: str) -> None:
        """Send a state, such as READY."""
        if not self._address:
            return
        # An agent works without systemd, too: a socket that is gone is no reason to end.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.connect(self._address)
            end.send(state.encode())

    def alive(self, now_s: float) -> None:
        """Say that the loop turns, as often as systemd wants to hear it."""
        if self._period_s and now_s >= self._due_s:
            self._due_s = now_s + self._period_s
            self.send(WATCHDOG)
