"""Shares and limits as they are written: `90%`, `10%`, `3`."""

import re

from toolkit.errors import RolloutError
from toolkit.fleet.rollout.values import Limit

_PERCENT = re.compile(r"(\d+(\.\d+)?)\s*%\Z")


def parse_share(text: str) -> float:
    """Return a share from 0 to 1 for a text from 0% to 100%."""
    match = _PERCENT.match(text.strip())
    if match is None or float(match[1]) > 100.0:
        raise RolloutError(f"{text!r} is no share: write 0% to 100%, for example 90%")
    return float(match[1]) / 100.0


def parse_limit(text: str) -> Limit:
    """Return the limit in a text: N% of each group, or N devices of the rollout."""
    if text.strip().isascii() and text.strip().isdigit():
        return Limit(count=int(text))
    try:
        return Limit(percent=100.0 * parse_share(text))
    except RolloutError as error:
        raise RolloutError(
            f"{text!r} is no limit of failures: write 10% of each group, or 3 devices in all"
        ) from error
