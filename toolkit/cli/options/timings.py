"""What is said of a timing cache; it needs no compiler, so that boards can say it."""

from pathlib import Path


def not_timed(cache: Path) -> str:
    """Return the note for a timing cache when no segment runs on a GPU."""
    return f"{cache} is unchanged: no segment runs on a GPU here, so no tactic was timed"
