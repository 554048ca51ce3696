"""Lines on which a board answers SMP: a serial port, or UDP. Messages go in and come out whole."""

import select
import socket
import time
from typing import Protocol

import serial

from device.smp.framing import ConsoleFraming, Framing, FramingName, RawFraming
from device.smp.message import ANSWERS
from toolkit.fleet.transports.transport import TransportError

READ_S = 0.05  # a serial port is looked at so often while nothing comes
WRITE_S = 30.0
UDP_PORT = 1337


class Line(Protocol):
    """One line to a board. All raise TransportError: it is gone."""

    name: str
    bytes_per_s: float | None

    def open(self) -> None:
        """Open it, anew if it is open."""

    def write(self, message: bytes) -> None:
        """Send a message."""

    def read(self, timeout_s: float) -> list[bytes]:
        """Return the messages that have come, none after a time without one."""

    def close(self) -> None:
        """Close it."""


class SerialLine:
    """A serial port; `bytes_per_s` is what its rate allows, start and stop bits included."""

    def __init__(self, device: str, baud: int, framing: FramingName) -> None:
        self.name = device
        self.bytes_per_s: float | None = baud / 10
        self._baud = baud
        self._framing: Framing = RawFraming(ANSWERS) if framing == "raw" else ConsoleFraming()
        self._port: serial.Serial | None = None

    def open(self) -> None:
        """Open the port for this program alone."""
        self.close()
        self._framing.reset()
        try:
            self._port = serial.Serial(
                self.name, self._baud, timeout=READ_S, write_timeout=WRITE_S, exclusive=True
            )
            self._port.reset_input_buffer()
        except (OSError, ValueError) as error:
            raise TransportError(_cannot_open(self.name, error)) from error

    def write(self, message: bytes) -> None:
        """Send a message."""
        try:
            self._opened().write(self._framing.encode(message))
        except OSError as error:
            raise TransportError(f"{self.name} takes nothing any more: {error}") from error

    def read(self, timeout_s: float) -> list[bytes]:
        """Return the messages that have come, none after a time without one."""
        port, until_s = self._opened(), time.monotonic() + timeout_s
        try:
            while True:
                data = port.read(max(1, port.in_waiting))
                messages = self._framing.feed(data) if data else []
                if messages or time.monotonic() >= until_s:
                    return messages
        except (OSError, TypeError) as error:  # TypeError: of pyserial, where it was closed
            raise TransportError(f"{self.name} was unplugged: {error}") from error

    def close(self) -> None:
        """Close the port."""
        if self._port is not None:
            self._port.close()
            self._port = None

    def _opened(self) -> serial.Serial:
        if self._port is None:
            raise TransportError(f"{self.name} is closed")
        return self._port


class UdpLine:
    """A port for datagrams; each is a message."""

    bytes_per_s: float | None = None

    def __init__(self, host: str, port: int | None) -> None:
        self._address = host, UDP_PORT if port is None else port
        self.name = f"{host}:{self._address[1]}"
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Take a port of this host. Whether somebody answers shows later."""
        self.close()
        try:
            family, _, _, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_DGRAM)[0]
            self._socket = socket.socket(family, socket.SOCK_DGRAM)
            self._socket.connect(address)
        except OSError as error:
            raise TransportError(f"{self.name} cannot be reached: {error.strerror}") from error

    def write(self, message: bytes) -> None:
        """Send a message."""
        try:
            self._opened().send(message)
        except ConnectionRefusedError:
            pass  # of an earlier datagram; an agent that starts again comes back
        except OSError as error:
            raise TransportError(f"{self.name} cannot be reached: {error.strerror}") from error

    def read(self, timeout_s: float) -> list[bytes]:
        """Return the message that has come, none after a time without one."""
        channel = self._opened()
        if not select.select([channel], [], [], timeout_s)[0]:
            return []
        try:
            return [channel.recv(65_535)]
        except ConnectionRefusedError:
            time.sleep(READ_S)
            return []
        except OSError as error:
            raise TransportError(f"{self.name} cannot be reached: {error.strerror}") from error

    def close(self) -> None:
        """Give the port back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _opened(self) -> socket.socket:
        if self._socket is None:
            raise TransportError(f"{self.name} is closed")
        return self._socket


def _cannot_open(name: str, error: Exception) -> str:
    """Return the sentence on a port that is not there, or not for us."""
    text = str(error)
    if "Permission" in text:
        return f"{name} may not be opened: join its group, `sudo usermod -aG dialout $USER`"
    if "lock" in text or "temporarily unavailable" in text:
        return f"{name} is in use: close the terminal program, or the other flash, that holds it"
    return f"{name} cannot be opened: is the cable plugged in? ({text})"
