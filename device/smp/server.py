"""Threads that serve SMP on a tty and on a UDP port. A line that fails is opened again."""

import contextlib
import logging
import os
import select
import socket
import termios
import threading
import time
import tty
from collections.abc import Callable
from pathlib import Path

from device.errors import ConfigError
from device.smp.framing import FRAMINGS, Framing, FramingName
from device.smp.message import MAX_MESSAGE

LOG = logging.getLogger("tandem.agent")
SILENCE_S = 0.5  # a message that is broken off for so long is forgotten
REOPEN_S = 0.5
WRITE_S = 5.0  # a client that reads nothing for so long loses the answer
DATAGRAM_BYTES = 1472  # what an Ethernet frame of 1,500 bytes carries in UDP over IPv4
MAX_PENDING_BYTES = 8 * MAX_MESSAGE  # of answers that a line has not taken
_READ_BYTES = 256 * 1024
_NOT_READ = "SMP: an answer of %d bytes is not read: it is dropped"
Handle = Callable[[bytes, object, int], bytes | None]


class TtyServer:
    """Serves one tty in a thread."""

    def __init__(
        self, device: str, handle: Handle, *, framing: FramingName, baud: int, buffer_bytes: int
    ) -> None:
        self._device = device
        self._handle = handle
        self._framing = FRAMINGS[framing]()
        self._baud, self._buffer_bytes = baud, buffer_bytes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smp-tty", daemon=True)
        speed_of(baud)

    def start(self) -> None:
        """Serve from now on, also a tty that appears later."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what was asked for is answered before."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        problem = ""
        while not self._ended.is_set():
            try:
                file = open_tty(self._device, self._baud)
            except (OSError, termios.error) as error:
                if problem != (problem := str(error)):
                    LOG.warning("%s cannot be opened: %s; it is tried again", self._device, error)
                self._ended.wait(REOPEN_S)
                continue
            problem = ""
            try:
                serve_file(file, self._framing, self._handle, self._ended, self._buffer_bytes)
            except OSError as error:
                LOG.info("%s was closed: %s", self._device, error.strerror)
                self._ended.wait(REOPEN_S)
            finally:
                os.close(file)


class UdpServer:
    """Serves one UDP port in a thread; a datagram is a message."""

    def __init__(self, address: str, port: int, handle: Handle) -> None:
        """Raises ConfigError: the address cannot be used."""
        self._handle = handle
        self._ended = threading.Event()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"[smp] udp: {address}:{port} cannot be used: {error.strerror}; name an address of "
                "this board and a free port"
            ) from error
        self._thread = threading.Thread(target=self._run, name="smp-udp", daemon=True)

    @property
    def port(self) -> int:
        """The port."""
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the port."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            if not select.select([self._socket], [], [], SILENCE_S)[0]:
                continue
            with contextlib.suppress(OSError):  # a client that is gone
                message, peer = self._socket.recvfrom(MAX_MESSAGE)
                reply = self._handle(message, peer, DATAGRAM_BYTES)
                if reply is not None:
                    self._socket.sendto(reply, peer)


def serve_file(
    file: int,
    framing: Framing,
    handle: Handle,
    ended: threading.Event,
    buffer_bytes: int = MAX_MESSAGE,
) -> None:
    """Answer what comes on an open line, until `ended`. Raises OSError: the line is gone.

    It reads on while its answers are not read: a client that writes may wait for just that.
    """
    os.set_blocking(file, False)
    framing.reset()
    peer, answers = object(), _Answers(file)  # each opening is another client
    while not ended.is_set():
        watched = [file] if answers.pending else []
        readable, writable, _ = select.select([file], watched, [], SILENCE_S)
        if watched:
            answers.write()
        if not readable:
            if not writable:
                framing.reset()
            continue
        data = os.read(file, _READ_BYTES)
        if not data:
            raise OSError(0, "the line was closed")
        for message in framing.feed(data):
            reply = handle(message, peer, buffer_bytes)
            if reply is not None:
                answers.add(framing.encode(reply))
    write_all(file, bytes(answers.pending))


class _Answers:
    """Answers that a line has not taken yet. Those that nobody reads are dropped."""

    def __init__(self, file: int) -> None:
        self.pending = bytearray()
        self._file = file
        self._progress_s = 0.0

    def add(self, data: bytes) -> None:
        if len(self.pending) + len(data) > MAX_PENDING_BYTES:
            LOG.warning(_NOT_READ, len(data))
            return
        if not self.pending:
            self._progress_s = time.monotonic()
        self.pending += data
        self.write()

    def write(self) -> None:
        """Write what the line takes now."""
        with contextlib.suppress(BlockingIOError):
            del self.pending[: os.write(self._file, self.pending)]
            self._progress_s = time.monotonic()
        if time.monotonic() > self._progress_s + WRITE_S:
            LOG.warning(_NOT_READ, len(self.pending))
            termios.tcflush(self._file, termios.TCOFLUSH)
            self.pending.clear()


def write_all(file: int, data: bytes) -> None:
    """Write to a line that takes what it can. An answer that nobody reads is dropped."""
    rest, until_s = memoryview(data), time.monotonic() + WRITE_S
    while rest:
        remaining_s = until_s - time.monotonic()
        if remaining_s <= 0 or not select.select([], [file], [], remaining_s)[1]:
            LOG.warning(_NOT_READ, len(data))
            termios.tcflush(file, termios.TCOFLUSH)
            return
        with contextlib.suppress(BlockingIOError):
            rest = rest[os.write(file, rest) :]


def open_tty(device: str, baud: int) -> int:
    """Open a tty raw: no echo, no line editing. Raises OSError or termios.error."""
    file = os.open(Path(device), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        tty.setraw(file, termios.TCSANOW)  # what a client has sent already counts
        settings = termios.tcgetattr(file)
        settings[2] |= termios.CLOCAL | termios.CREAD
        settings[4] = settings[5] = speed_of(baud)
        termios.tcsetattr(file, termios.TCSANOW, settings)
    except BaseException:
        os.close(file)
        raise
    return file


def speed_of(baud: int) -> int:
    """Return termios' number of a rate; ConfigError if it has none."""
    speed = getattr(termios, f"B{baud}", None)
    if not isinstance(speed, int):
        raise ConfigError(
            f"[smp] baud = {baud} is no rate of this system's ttys: take 115200, 921600 or 3000000"
        )
    return speed


def default_buffer(device: str, baud: int) -> int:
    """Return the largest request, in bytes: whole ones on USB and ptys, half a second on a UART.

    A stock client waits about two seconds for an answer.
    """
    if Path(device).name.startswith(("ttyGS", "ttyACM")) or device.startswith("/dev/pts/"):
        return MAX_MESSAGE
    return max(512, min(MAX_MESSAGE, baud // 20))
