"""A connection of a browser or a program, with limits of time: whoever sends nothing, sends slowly
or does not read is let go."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from toolkit.fleet.web.access import is_loopback

REQUEST_S = 20.0  # for a request with its body, and for the first one of a connection
SEND_S = 60.0  # for who does not read what is sent
END_S = 4.0  # for answers where the site stops, below the seconds that the server then waits
MAX_OF_ADDRESS = 400  # connections; this machine's own may be a proxy's
MAX_CONNECTIONS = 800
_HERE = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)  # no more of the request is waited for


class BoundedConnection(H11Protocol):
    """uvicorn has a limit for connections between two requests alone."""

    _request: asyncio.TimerHandle | None = None
    _send: asyncio.TimerHandle | None = None
    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called with a new connection."""
        super().connection_made(transport)
        host = self.client[0] if self.client else "localhost"
        clients = (getattr(connection, "client", None) for connection in self.connections)
        same = sum(client is not None and client[0] == host for client in clients)
        if same > MAX_OF_ADDRESS and not is_loopback(host):
            transport.abort()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called where it has ended."""
        self._request, self._send = _cancel(self._request), _cancel(self._send)
        self._end = _cancel(self._end)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Called where the site stops."""
        super().shutdown()
        self._end = self.loop.call_later(END_S, self.transport.abort)

    def handle_events(self) -> None:
        """Called with each piece of a request."""
        super().handle_events()
        self._await_request()

    def pause_writing(self) -> None:
        """Called where more is to be sent than is read."""
        super().pause_writing()
        self._send = self._send or self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Called where it is read again."""
        self._send = _cancel(self._send)
        super().resume_writing()

    def _await_request(self) -> None:
        if self.conn.their_state in _HERE:
            self._request = _cancel(self._request)
        elif self._request is None and not self.transport.is_closing():
            self._request = self.loop.call_later(REQUEST_S, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer; return that there is none."""
    if timer is not None:
        timer.cancel()
    return None
