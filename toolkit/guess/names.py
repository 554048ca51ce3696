"""Class names in a model's metadata. They are text of a stranger: nothing of them is run."""

import ast
import json
from collections.abc import Mapping

MAX_CHARACTERS = 1_000_000
MAX_CLASSES = 100_000


def class_names(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the classes of `names` (a Python dict or list, or JSON) or `character` (one a line).

    Empty if there are none, or if they cannot be read: numbers with gaps, or text that is too long.
    """
    if "names" in metadata:
        return _numbered(_literal(metadata["names"]))
    if "character" in metadata:
        lines = metadata["character"].split("\n")
        return tuple(lines[:-1] if lines[-1] == "" else lines)
    return ()


def numbers_of(text: str) -> tuple[int, ...]:
    """Return the numbers of "[640, 640]"; empty if it is nothing of the kind."""
    value = _literal(text)
    if isinstance(value, int):
        return (value,)
    if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
        return tuple(value)
    return ()


def _literal(text: str) -> object:
    """Return a Python or JSON literal, or None."""
    if len(text) > MAX_CHARACTERS:
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            value: object = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return value
    return None


def _numbered(value: object) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not 0 < len(value) <= MAX_CLASSES:
        return ()
    try:
        names = {int(number): str(name) for number, name in value.items()}
    except (ValueError, TypeError):
        return ()
    if set(names) != set(range(len(value))):
        return ()
    return tuple(" ".join(names[number].split()) or str(number) for number in range(len(names)))
