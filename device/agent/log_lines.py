"""The newest lines of the agent and its pipeline, and which of them go to the broker.

They are kept in memory alone. Threads add them; the agent's one thread takes them. Nothing that is
a secret is kept.
"""

import logging
import re
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import msgspec

from device.protocol.documents import LogLine

MAX_LINES = 2000
MAX_TEXT = 1000  # characters of a line
BURST = 100  # lines that may go at once
LOOK_S = 0.25  # between two looks while lines are followed
HIDDEN = "***"
# What may hold a secret -> what is kept of it.
SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(\w://)[^/\s]+@"), rf"\1{HIDDEN}@"),  # up to the last @: passwords may have one
    (
        re.compile(
            # Also within a name, such as access_token; a value in quotes may have spaces.
            r"(?i)(password|passwd|passphrase|secret|token|api[_-]?key)([\"']?\s*[=:]\s*)"
            r"(\"(?:[^\"\\]|\\.)*\"|'[^']*'|\S+)"
        ),
        rf"\1\2{HIDDEN}",
    ),
    (re.compile(r"(?i)\b(bearer|basic) [A-Za-z0-9+/=._-]{8,}"), rf"\1 {HIDDEN}"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its number; `source`: agent or pipeline."""

    number: int
    source: str
    at: str
    level: str
    text: str


class LogLines:
    """The newest lines."""

    def __init__(self, secrets: Iterable[str | None] = ()) -> None:
        """`secrets`: words that are never kept."""
        self._secrets = tuple(word for word in secrets if word)
        self._lines: deque[Line] = deque(maxlen=MAX_LINES)
        self._lock = threading.Lock()
        self.count = 0  # of all lines so far

    def add(self, source: str, text: str, level: str = "info") -> None:
        """Keep a line; safe in any thread."""
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = redacted(text, self._secrets)[:MAX_TEXT]
        with self._lock:
            self.count += 1
            self._lines.append(Line(self.count, source, at, level, text))

    def after(self, number: int) -> list[Line]:
        """Return the lines after this one that are still kept."""
        with self._lock:
            return [line for line in self._lines if line.number > number]

    def last(self, count: int, source: str, max_bytes: int) -> list[Line]:
        """Return the last lines of a source ("all": of both), oldest first, of so many bytes in
        JSON."""
        lines: deque[Line] = deque()
        with self._lock:
            for line in reversed(self._lines):
                # In JSON, as it is sent: an unprintable character takes six bytes there.
                max_bytes -= len(msgspec.json.encode(line.text)) + len(line.at) + 64
                if len(lines) == count or max_bytes < 0:
                    break
                if source in ("all", line.source):
                    lines.appendleft(line)
        return list(lines)


class LogHandler(logging.Handler):
    """Keeps what the agent logs."""

    def __init__(self, lines: LogLines) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; what cannot be formatted is not."""
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            return
        self._lines.add("agent", text, record.levelname.lower())


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a line without secrets: known words, logins in addresses, values of such keys."""
    for word in secrets:
        text = text.replace(word, HIDDEN)
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


@dataclass(frozen=True, slots=True)
class Flow:
    """How many lines may go: a value; `room` is refilled as time goes by."""

    max_per_s: float
    room: float = BURST
    at_s: float = 0.0

    def refilled(self, now_s: float) -> "Flow":
        """Return the value at a later time."""
        room = self.room + max(0.0, now_s - self.at_s) * self.max_per_s
        return replace(self, room=min(float(BURST), room), at_s=now_s)

    def taken(self) -> "Flow | None":
        """Return the value after one line, None if there is no room."""
        return replace(self, room=self.room - 1.0) if self.room >= 1.0 else None


class LogStream:
    """The lines that go to the broker, while somebody follows them."""

    def __init__(self, lines: LogLines, *, always: bool, max_per_s: float) -> None:
        self._lines = lines
        self._always = always
        self._flow = Flow(max_per_s)
        self._until_s = float("-inf")
        self._sent = 0  # number of the last line that was looked at
        self._left_out = 0
        self._due_s = 0.0

    def follow(self, now_s: float, seconds: float) -> None:
        """Send the lines for so long; those of before, when nobody followed, are not sent."""
        if not self._is_on(now_s):
            self._sent = self._lines.count
        self._until_s = now_s + seconds

    def due_s(self, now_s: float) -> float | None:
        """Return when `take` has something to send."""
        if not self._is_on(now_s) or self._lines.count == self._sent:
            return None
        return self._due_s

    def take(self, now_s: float) -> list[tuple[str, LogLine]]:
        """Return the lines that are due, each with its source; more than may go are left out."""
        if not self._is_on(now_s) or now_s < self._due_s:
            return []
        self._due_s = now_s + LOOK_S
        self._flow = self._flow.refilled(now_s)
        rows = []
        for line in self._lines.after(self._sent):
            self._left_out += line.number - self._sent - 1  # not kept any more
            self._sent = line.number
            flow = self._flow.taken()
            if flow is None:
                self._left_out += 1
                continue
            self._flow = flow
            document = LogLine(
                at=line.at, level=line.level, text=line.text, left_out=self._left_out
            )
            self._left_out = 0
            rows.append((line.source, document))
        return rows

    def _is_on(self, now_s: float) -> bool:
        return self._always or now_s < self._until_s
