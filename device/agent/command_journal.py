"""The last command that a device has taken: what is not newer is a replay.

It is on the disk before anything is done: a command is executed once or never, whatever happens.
"""

import logging
from pathlib import Path

import msgspec

from device.errors import StateError
from device.files import read_regular, replace_file

LOG = logging.getLogger("tandem.agent")
JOURNAL = "commands.json"  # in the state folder
MAX_BYTES = 64 * 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """The counter of the last command, with its place; `boot`: the boot in which it was taken."""

    counter: int = 0
    op: str = ""
    id: str = ""
    boot: str = ""


class CommandJournal:
    """The journal of one state folder."""

    def __init__(self, state_dir: Path) -> None:
        """Read it. One that is damaged counts as none: then only `expires` tells old commands."""
        self._path = state_dir / JOURNAL
        self.taken = Taken()
        try:
            self.taken = msgspec.json.decode(read_regular(self._path, MAX_BYTES), type=Taken)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            LOG.error("%s cannot be read and begins anew: %s", self._path, error)

    def note(self, counter: int, op: str, command_id: str) -> None:
        """Bring a command onto the disk before it is executed; StateError if that is not
        possible."""
        taken = Taken(counter=counter, op=op, id=command_id, boot=boot_id())
        try:
            replace_file(self._path, msgspec.json.encode(taken), 0o600)
        except OSError as error:
            raise StateError(
                f"{self._path} cannot be written ({error.strerror}): no command is executed before "
                "the disk has recorded it; make room"
            ) from error
        self.taken = taken


def boot_id() -> str:
    """Return what tells this boot of the board from others, "" if it is not known."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
