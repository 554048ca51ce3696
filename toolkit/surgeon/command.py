"""Runs the command that says whether a model fails."""

import os
import re
import shlex
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import SurgeonError

PLACEHOLDER = "{model}"
TAIL = 300  # characters of a command's output in messages


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended. `status` negative: by that signal; None: it ran out of time."""

    failed: bool
    status: int | None
    output: str

    @property
    def text(self) -> str:
        """The end in words."""
        if self.status is None:
            return "it ran out of time"
        how = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        tail = " ".join(self.output.split())[-TAIL:]
        return f"{how}: {tail}" if tail else how


@dataclass(frozen=True, slots=True)
class Check:
    """A command that fails on a model: it exits with a status other than 0, or by a signal.

    `command` gets the path of the model for `{model}`, or as its last word. `pattern`: a regular
    expression that the output of a failure holds, so that other failures do not count. A command
    that runs longer than `timeout_s` has not failed.
    """

    command: str
    pattern: str | None = None
    timeout_s: float | None = None

    def run(self, model: Path) -> Outcome:
        """Run the command on a model. Raises SurgeonError: there is no such program or command."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise SurgeonError(
                f"--check {self.command!r} is no command: {error}; quote it as a shell's"
            ) from error
        if not words:
            raise SurgeonError("--check is empty; give a command that fails on the model")
        path = str(model)
        if any(PLACEHOLDER in word for word in words):
            words = [word.replace(PLACEHOLDER, path) for word in words]
        else:
            words.append(path)
        with tempfile.TemporaryFile() as output:
            status = self._status(words, output.fileno())
            output.seek(0)
            text = output.read().decode(errors="replace")
        failed = status is not None and status != 0
        if failed and self.pattern is not None:
            failed = re.search(self.pattern, text) is not None
        return Outcome(failed, status, text)

    def _status(self, words: list[str], output: int) -> int | None:
        try:
            # A session of its own: what the command starts ends with it.
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise SurgeonError(
                f"cannot run {words[0]!r} of --check: {error.strerror}; a shell's syntax needs "
                "sh -c '...'"
            ) from error
        try:
            return process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # all of it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
