"""Texts without what names a person, a network or a machine.

A report holds facts that the steps choose; only its free texts (reasons, problems, the last line of
a log) can carry more, so they pass through here.
"""

import getpass
import os
import re
import socket
from pathlib import Path

from device.selftest.report import MAX_TEXT

# What is replaced, in this order.
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}\b"), "(MAC)"),
    # A version of TensorRT has four parts, too.
    (re.compile(r"(?<!TensorRT )(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\w.])"), "(address)"),
    (re.compile(r"(?<![\w.:])(?=[0-9A-Fa-f]*:[0-9A-Fa-f]*:)[0-9A-Fa-f:]{6,}(?!\w)"), "(address)"),
    (re.compile(r"(?<![\w.])/(?:home|root|media|mnt|tmp|var/tmp)(?:/[^\s'\":;,)]*)?"), "(path)"),
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b"), "(mail)"),
    (re.compile(r"\b\d{12,}\b"), "(number)"),
)
_SHORTEST_NAME = 3  # letters; a shorter host or user name would hit parts of other words


def scrub(text: str) -> str:
    """Return a text with names, addresses and paths replaced, at most `MAX_TEXT` characters."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    for name, replacement in _own_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", replacement, text, flags=re.IGNORECASE)
    return text[:MAX_TEXT]


def _own_names() -> list[tuple[str, str]]:
    """The names of this machine and its user, long ones first."""
    home = str(Path.home())
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = ""
    host = socket.gethostname()
    rows = [(home, "(path)"), (host, "(host)"), (host.partition(".")[0], "(host)"),
            (user, "(user)"), (os.environ.get("SUDO_USER", ""), "(user)")]  # fmt: skip
    private = [
        (name, what) for name, what in rows if len(name) >= _SHORTEST_NAME and name != "root"
    ]
    return sorted(private, key=lambda row: -len(row[0]))
