"""A login shell at the end of a serial line: logs in, runs commands, sends files by ZMODEM."""

import contextlib
import re
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import serial

from toolkit.fleet.transports.transport import RefusedError, TransportError

READ_S = 0.05
PROMPT_S = 10.0  # a getty may start again before it says "login:"
LOGIN_S = 30.0  # a wrong password is answered late
COMMAND_S = 120.0
ALIVE_S = 10.0  # a shell that does nothing answers at once
SHELL_TRIES = 6
SETTLE_S = 1.0
SILENCE_S = 0.4
CANCEL = b"\x18" * 10 + b"\b" * 10  # ends a receiver of ZMODEM
_LOGIN = re.compile(rb"(login|username)\s*:\s*$", re.IGNORECASE)
_PASSWORD = re.compile(rb"password[^\n]*:\s*$", re.IGNORECASE)
Ask = Callable[[str, bool], str]  # a question, and whether the answer is hidden


class Shell:
    """One shell; `log_in` first. All raise TransportError: the line is gone, or nobody answers."""

    def __init__(self, device: str, baud: int, ask: Ask) -> None:
        """`ask` is asked for the user and the password, if the board wants them."""
        self.name = device
        self._baud = baud
        self._ask = ask
        self._seen = b""
        self._logged_in = False
        try:
            self._port = serial.Serial(
                device, baud, timeout=READ_S, write_timeout=30.0, exclusive=True
            )
        except (OSError, ValueError) as error:
            raise TransportError(f"{device} cannot be opened: {error}") from error

    def log_in(self, user: str) -> None:
        """Get to a shell that echoes nothing; log in if it asks. RefusedError: wrong password."""
        self._read_to_silence()  # a session before may be ending
        self._seen = b""
        self._write(b"\r")
        tries = 0
        until_s = time.monotonic() + PROMPT_S
        while time.monotonic() < until_s:
            self._read_to_silence()
            if _PASSWORD.search(self._seen) or _LOGIN.search(self._seen):
                secret = _PASSWORD.search(self._seen) is not None
                tries += secret
                if tries > 1:
                    raise RefusedError(f"{self.name} does not take this user and password")
                self._seen = b""
                text = self._ask(f"Password for {self.name}", True) if secret else user
                text = text or self._ask(f"User on {self.name}", False)
                self._write(text.encode() + b"\r")
                until_s = time.monotonic() + LOGIN_S
            elif self._seen.rstrip().endswith((b"$", b"#", b">", b"%")):
                break
        self._write(b"stty -echo; unset HISTFILE; PS1=; PS2=\r")
        try:
            self.run("true", ALIVE_S)
        except TransportError as error:
            raise TransportError(
                f"nobody answers on {self.name}: is a login shell there, and the rate right? An "
                "agent that serves SMP there needs no ?console="
            ) from error
        self._logged_in = True

    def run(self, command: str, timeout_s: float = COMMAND_S) -> tuple[int, list[str]]:
        """Run a command; return its exit status and its lines."""
        lines: list[str] = []
        for line in self.lines(command, timeout_s):
            if isinstance(line, int):
                return line, lines
            lines.append(line.decode(errors="replace"))
        raise TransportError(f"{self.name} does not answer any more")

    def lines(self, command: str, timeout_s: float = COMMAND_S) -> Iterator[bytes | int]:
        """Yield the lines of a command as they come, and at last its exit status."""
        mark = secrets.token_hex(8)
        first, second = mark[:8], mark[8:]  # joined by the shell: its echo is not taken for it
        self._seen = b""
        self._write(
            f"printf 'B%s%s\\n' {first} {second}; {command}; "
            f"printf '\\nE%s%s %d\\n' {first} {second} $?\r".encode()
        )
        begin, end = f"B{mark}".encode(), f"E{mark} ".encode()
        begun, until_s = False, time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            self._read()
            *whole, self._seen = self._seen.split(b"\n")
            for line in (line.strip(b"\r") for line in whole):
                if line.startswith(end):
                    yield int(line[len(end) :])
                    return
                if begun and line:
                    until_s = time.monotonic() + timeout_s
                    yield line
                begun = begun or line.endswith(begin)
        raise TransportError(f"{self.name} said nothing for {timeout_s:g} s")

    def interrupt(self) -> None:
        """End the command that runs, as Ctrl-C does."""
        self._write(b"\x03\r")
        time.sleep(READ_S)
        self._port.reset_input_buffer()

    def send(self, path: Path, folder: str, on_sent: Callable[[int], None]) -> None:
        """Send a file into a folder of the board by ZMODEM, from where an earlier try ended.

        `on_sent` gets the bytes that went onto the line by now.
        """
        program = shutil.which("sz")
        if program is None:
            raise RefusedError("sz is missing on this host: install lrzsz")
        # Restricted, as it is by default, rz removes what an interrupted transfer has left.
        self._write(f"cd {folder} && rz --binary --resume --quiet --unrestrict\r".encode())
        sender = subprocess.Popen(
            (program, "--binary", "--resume", "--quiet", str(path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        assert sender.stdin is not None
        assert sender.stdout is not None
        pump = threading.Thread(target=self._pump_answers, args=(sender,), daemon=True)
        pump.start()
        sent_bytes = 0
        try:
            while data := sender.stdout.read1(16_384):  # type: ignore[attr-defined]
                self._write(data)
                sent_bytes += len(data)
                on_sent(sent_bytes)
            status = sender.wait()
        except BaseException:
            self._give_up(sender, pump)
            raise
        finally:
            pump.join()  # ends with the sender
            sender.stdout.close()
            with contextlib.suppress(OSError):  # an answer that the sender did not take
                sender.stdin.close()
        if status:
            self._give_up(sender, pump)
            raise TransportError(
                f"ZMODEM to {self.name} was broken off: flash again, it goes on there"
            )
        self._await_shell()

    def close(self) -> None:
        """Log out and close the port."""
        if self._logged_in:
            with contextlib.suppress(OSError):  # it was unplugged
                self._port.write(b"exit\r")
        self._port.close()

    def _await_shell(self) -> None:
        """Ask until the shell answers: rz, which ends later, may have dropped what came before."""
        for _ in range(SHELL_TRIES - 1):
            with contextlib.suppress(TransportError):
                self.run("true", ALIVE_S)
                return
        self.run("true", ALIVE_S)

    def _give_up(self, sender: "subprocess.Popen[bytes]", pump: threading.Thread) -> None:
        """End both ends of a transfer, so that the shell takes commands again."""
        sender.kill()
        sender.wait()
        pump.join()
        with contextlib.suppress(TransportError):  # it was unplugged: the board's end times out
            self._write(CANCEL)
            time.sleep(SETTLE_S)  # it drops what comes before it has ended
            self.run("true", ALIVE_S)

    def _pump_answers(self, sender: "subprocess.Popen[bytes]") -> None:
        """Pass what the receiver says on, until the sender has ended."""
        assert sender.stdin is not None
        while sender.poll() is None:
            try:
                data = self._port.read(max(1, self._port.in_waiting))
                sender.stdin.write(data)
                sender.stdin.flush()
            except (OSError, TypeError):  # the sender has ended, or the cable is gone
                return

    def _read_to_silence(self) -> None:
        """Read until nothing more comes: a prompt is the last that a board says."""
        silent_s = time.monotonic()
        while time.monotonic() - silent_s < SILENCE_S:
            before = len(self._seen)
            self._read()
            if len(self._seen) > before:
                silent_s = time.monotonic()

    def _read(self) -> None:
        try:
            self._seen += self._port.read(max(1, self._port.in_waiting))
        except (OSError, TypeError) as error:
            raise TransportError(f"{self.name} was unplugged: {error}") from error

    def _write(self, data: bytes) -> None:
        try:
            self._port.write(data)
        except OSError as error:
            raise TransportError(f"{self.name} takes nothing any more: {error}") from error
