"""Looking after a board: its log, a reboot that is waited for."""

import shlex
import time
from collections.abc import Callable

from device.control.upload_request import BoardFacts
from toolkit.errors import BoardError
from toolkit.fleet.boards.service import UNIT_NAME
from toolkit.fleet.boards.shell import Shell, UnreachableError
from toolkit.fleet.transports.transport import TransportError

BOOT_ID = "/proc/sys/kernel/random/boot_id"
LOOK_S = 2.0
JOURNAL_GROUPS = frozenset({"root", "adm", "systemd-journal"})


def log_script(*, lines: int, follow: bool, as_json: bool, since: str, level: str) -> str:
    """Return the command that prints the agent's log on the board."""
    words = ["journalctl", "-u", UNIT_NAME, "-n", str(lines), "--no-pager"]
    words += ["-o", "json" if as_json else "short-iso"]
    words += ["-f"] if follow else []
    words += ["--since", since] if since else []
    words += ["-p", level] if level else []
    return f"exec {shlex.join(words)}"


def reboot_board(shell: Shell) -> str:
    """Start a board again; return the id of the boot that ends."""
    boot = shell.must(f"cat {BOOT_ID}", what="read the id of this boot").text
    shell.must("true", root=True, what="start the board again")
    try:
        done = shell.as_root("systemctl reboot")
    except UnreachableError:  # it went down before it could answer
        return boot
    if done.status != 0:
        raise BoardError(f"{shell.name}: cannot start the board again: {done.last_line}")
    shell.forget_connection()
    return boot


def may_read_journal(shell: Shell) -> bool:
    """Whether the login reads the journal without sudo."""
    return not JOURNAL_GROUPS.isdisjoint(shell.run("id -Gn").text.split())


def wait_for_boot(
    shell: Shell, boot: str, facts: Callable[[], BoardFacts | None], timeout_s: float
) -> float:
    """Wait until a board runs another boot and its agent answers; return the seconds.

    BoardError: it does not within `timeout_s`, with what was last heard.
    """
    begun_s, heard = time.monotonic(), "nothing was heard"
    while (waited_s := time.monotonic() - begun_s) < timeout_s:
        try:
            done = shell.run(f"cat {BOOT_ID}")
            if done.status == 0 and done.text != boot:
                facts()
                return waited_s
            heard = "it has not gone down yet"
        except (BoardError, TransportError) as error:
            heard = str(error)
        time.sleep(LOOK_S)
    raise BoardError(f"{shell.name} is not back after {timeout_s:g} s: {heard}")
