"""How long steps say how far they are."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with the name of a step and the share of it that is done, 0 to 1."""


def silent(step: str, share: float) -> None:
    """Discard progress."""
