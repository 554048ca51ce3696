"""Times as they are shown."""

import datetime as dt


def utc(at_s: float) -> str:
    """Return a time in seconds since 1970 as RFC 3339, in seconds; empty for 0."""
    if at_s <= 0.0:
        return ""
    time = dt.datetime.fromtimestamp(int(at_s), dt.timezone.utc)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
