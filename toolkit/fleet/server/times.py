"""Times as they are shown."""

import datetime as dt


def utc(at_s: float) -> str:
    """Return a time in seconds since 1970 as RFC 3339, in seconds; empty for 0."""
    if at_s <= 0.0:
        return ""
    time = dt.datetime.fromtimestamp(int(at_s), dt.timezone.utc)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def age_text(age_s: float | None) -> str:
    """Return how long ago something was, in one unit."""
    if age_s is None:
        return "never"
    for seconds, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit} ago"
    return f"{age_s:.0f} s ago"
