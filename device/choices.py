"""The choices that an error message lists."""

from collections.abc import Iterable
from difflib import SequenceMatcher

NEAR = 0.6  # similarity from which a choice may be a slip of what was written


def list_choices(written: str, choices: Iterable[str]) -> str:
    """Return the choices, comma separated: those similar to `written` first, nearest first, then
    the others, sorted. "none" if there are none."""

    def order(choice: str) -> tuple[float, str]:
        ratio = SequenceMatcher(None, written.casefold(), choice.casefold()).ratio()
        return (-ratio if ratio >= NEAR else 0.0, choice)

    return ", ".join(sorted(set(choices), key=order)) or "none"
