"""The power mode of a board: what nvpmodel says, and setting it."""

import re
from dataclasses import dataclass

from device.board_files import power_modes
from device.choices import list_choices
from toolkit.errors import BoardError
from toolkit.fleet.boards.shell import Shell, UnreachableError

_CURRENT = re.compile(r"NV Power Mode:\s*(\S+)\s+(\d+)")


class PendingError(BoardError):
    """Something is left for the user; what comes after it may go on."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of nvpmodel by its name and number."""

    name: str
    number: str


def current_mode(shell: Shell) -> Mode | None:
    """Return the mode that a board is in; None: it has no nvpmodel that says one."""
    match = _CURRENT.search(shell.run("nvpmodel -q").text)
    return None if match is None else Mode(match[1], match[2])


def list_modes(shell: Shell) -> tuple[Mode, ...]:
    """Return the modes of /etc/nvpmodel.conf."""
    modes = power_modes(shell.run("cat /etc/nvpmodel.conf").text)
    return tuple(Mode(name, number) for number, name in modes.items())


def find_mode(shell: Shell, text: str) -> Mode:
    """Return a mode by its name or number; BoardError lists those that there are."""
    modes = list_modes(shell)
    for mode in modes:
        if text.casefold() in (mode.name.casefold(), mode.number):
            return mode
    known = list_choices(text, (mode.name for mode in modes))
    raise BoardError(f"{shell.name} has no power mode {text!r}: {known}")


def set_mode(shell: Shell, text: str, *, reboot: bool = False) -> Mode:
    """Set a mode and check it.

    Some modes are taken only with a reboot: nvpmodel asks whether to do that now, and is answered
    by `reboot`. Raises PendingError: it needs one that is not allowed; with it the board goes down.
    """
    mode = find_mode(shell, text)
    try:
        done = shell.as_root(f"echo {'yes' if reboot else 'no'} | nvpmodel -m {mode.number}")
    except UnreachableError:
        if not reboot:
            raise
        return mode  # it went down before it could answer
    needs_reboot = "reboot" in (done.text + done.stderr).casefold()
    if reboot and needs_reboot:
        return mode
    current = current_mode(shell)
    if current is not None and current.number == mode.number:
        return mode
    if needs_reboot:
        raise PendingError(
            f"{mode.name} needs a reboot of {shell.name}, which was not asked for: `tandem board "
            f"power-mode {mode.name} --reboot`"
        )
    raise BoardError(f"{shell.name}: nvpmodel does not take the mode {mode.name}: {done.last_line}")
