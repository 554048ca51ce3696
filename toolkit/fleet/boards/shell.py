"""Commands on a board over the system's ssh: as the user of the login, and as root by sudo."""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device.start.stdout import result_descriptor
from toolkit.errors import BoardError
from toolkit.fleet.transports.addresses import Address
from toolkit.fleet.transports.ssh import OPTIONS, advice_for, destination_of, ssh_arguments

SSH_FAILED = 255  # what ssh itself exits with
PASSWORD_TRIES = 3
# Jetsons keep nvpmodel there, which the PATH of a login without a terminal may lack.
_PATH = "PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin; export PATH\n"
# From a login, and its password that sudo has just refused (None at first), to a password.
AskPassword = Callable[[str, str | None], str]


class UnreachableError(BoardError):
    """ssh made no connection, or lost it."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    status: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        """What it printed, without spaces around it."""
        return self.stdout.decode(errors="replace").strip()

    @property
    def last_line(self) -> str:
        """What it said last, for a sentence."""
        lines = (self.stderr.strip() or self.text).splitlines()
        return lines[-1].strip() if lines else f"exit status {self.status}"


class Shell:
    """Runs commands on one board over one connection, which is kept; `close` it.

    `ask_password` is called when sudo wants a password, and again while sudo does not take it, up
    to PASSWORD_TRIES times. It is kept in memory and goes to sudo's standard input alone.
    """

    def __init__(self, address: Address, ask_password: AskPassword) -> None:
        self.name = destination_of(address)
        self.address = address
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-ssh-"))
        self._ssh = ("ssh", *OPTIONS, *self._shared(), *ssh_arguments(address), self.name)
        self._ask_password = ask_password
        self._password: bytes | None = None
        self._sudo: tuple[str, ...] | None = None

    def run(self, script: str, stdin: bytes = b"") -> Done:
        """Run a script of the board's sh; UnreachableError if it cannot be reached."""
        return self._run(f"exec sh -c {shlex.quote(_PATH + script)}", stdin)

    def as_root(self, script: str, stdin: bytes = b"") -> Done:
        """Run a script as root. BoardError: the login may not become root."""
        sudo = self._become_root()
        line = shlex.join((*sudo, "sh", "-c", _PATH + script))
        first = b"" if self._password is None else self._password + b"\n"
        return self._run(f"exec {line}", first + stdin)

    def must(self, script: str, stdin: bytes = b"", *, root: bool = False, what: str) -> Done:
        """Run a script that has to succeed; BoardError says `what` could not be done, and why."""
        done = (self.as_root if root else self.run)(script, stdin)
        if done.status != 0:
            raise BoardError(f"{self.name}: cannot {what}: {done.last_line}")
        return done

    def follow(self, script: str, *, root: bool = False) -> int:
        """Run a script whose output goes to ours as it comes; return its exit status."""
        sudo = self._become_root() if root else ()
        line = shlex.join((*sudo, "sh", "-c", _PATH + script))
        first = b"" if self._password is None or not root else self._password + b"\n"
        child = subprocess.Popen(
            (*self._ssh, f"exec {line}"), stdin=subprocess.PIPE, stdout=result_descriptor()
        )
        try:
            assert child.stdin is not None
            child.stdin.write(first)
            child.stdin.flush()
            return child.wait()
        finally:
            child.terminate()
            child.wait()

    def forget_connection(self) -> None:
        """End the kept connection: the board went down, or groups have changed."""
        subprocess.run((*self._ssh, "-O", "exit"), capture_output=True, check=False)

    def close(self) -> None:
        """End the connection."""
        self.forget_connection()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._password = None

    def _shared(self) -> tuple[str, ...]:
        control = ("-o", "ControlMaster=auto", "-o", f"ControlPath={self._folder}/%C")
        return (*control, "-o", "ControlPersist=60")

    def _run(self, line: str, stdin: bytes) -> Done:
        try:
            done = subprocess.run((*self._ssh, line), input=stdin, capture_output=True, check=False)
        except OSError as error:
            raise BoardError(f"cannot start ssh: {error.strerror}") from error
        result = Done(done.returncode, done.stdout, done.stderr.decode(errors="replace"))
        if result.status == SSH_FAILED:
            raise UnreachableError(_unreachable(self.name, self.address, result))
        return result

    def _become_root(self) -> tuple[str, ...]:
        """Return the command before a command of root; asks for the password if sudo does."""
        if self._sudo is not None:
            return self._sudo
        look = self.run("id -u; id -un; command -v sudo >/dev/null && echo sudo")
        number, user, *sudo = look.text.splitlines() or ["", ""]
        if number == "0":
            self._sudo = ()
        elif not sudo:
            raise BoardError(
                f"{self.name} has no sudo, and {user} is not root: log in as root, or install sudo"
            )
        elif self.run("sudo -k -n true").status == 0:
            self._sudo = ("sudo", "-k", "-n")
        else:
            self._password = self._checked_password(user)
            # -k: a password that sudo remembers would leave ours on the standard input.
            self._sudo = ("sudo", "-k", "-S", "-p", "")
        return self._sudo

    def _checked_password(self, user: str) -> bytes:
        last_line, password = "", None
        for _ in range(PASSWORD_TRIES):
            password = self._ask_password(f"{user} on {self.name}", password)
            done = self.run("sudo -k -S -p '' true", password.encode() + b"\n")
            if done.status == 0:
                return password.encode()
            last_line = done.last_line
        raise BoardError(
            f"{self.name}: sudo does not take the password of {user} ({last_line}): it needs one "
            "of an administrator of the board"
        )


def _unreachable(name: str, address: Address, done: Done) -> str:
    """Return why ssh made no connection, and what to do."""
    advice = advice_for(address, done.stderr)
    return f"{name} cannot be reached: {done.last_line}" + (f"; {advice}" if advice else "")


def interactive(address: Address) -> tuple[str, ...]:
    """Return the command of a login with a terminal, which may ask questions."""
    return ("ssh", "-t", *ssh_arguments(address), destination_of(address))


def replace_process(command: tuple[str, ...]) -> None:
    """Become another command; BoardError if there is none."""
    try:
        os.dup2(result_descriptor(), 1)
        os.execvp(command[0], command)
    except OSError as error:
        raise BoardError(f"cannot start {command[0]}: {error.strerror}") from error
