"""How long runs over samples, or trials, say how far they are."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with how many are done, and how many are expected or allowed."""
