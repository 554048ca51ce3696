"""The agent's log: on a terminal with time and level, under systemd as journald reads it."""

import logging
import sys
from collections.abc import Mapping

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
JOURNAL = "%(name)s: %(message)s"  # journald has the time
# Level -> the priority of sd-daemon(3).
PRIORITIES: tuple[tuple[int, str], ...] = (
    (logging.ERROR, "<3>"),
    (logging.WARNING, "<4>"),
    (logging.INFO, "<6>"),
    (logging.NOTSET, "<7>"),
)


class JournalFormatter(logging.Formatter):
    """Writes the priority before each line, so that `journalctl -p warning` finds it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record, each of its lines with the priority."""
        priority = next(text for level, text in PRIORITIES if record.levelno >= level)
        return "\n".join(priority + line for line in super().format(record).splitlines())


def set_up_log(level: str, environment: Mapping[str, str]) -> None:
    """Log to stderr. JOURNAL_STREAM: systemd has connected stderr to journald."""
    handler = logging.StreamHandler(sys.stderr)
    in_journal = "JOURNAL_STREAM" in environment
    handler.setFormatter(JournalFormatter(JOURNAL) if in_journal else logging.Formatter(PLAIN))
    logging.basicConfig(level=level, handlers=[handler])
