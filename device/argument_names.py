"""Messages of the library name its arguments: texts are written for the command line."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from device.errors import TandemError


@dataclass(frozen=True, slots=True)
class ArgumentName:
    """What the library calls an option. `option` is an expression for it and its value, if one
    follows; `words` are what stands for it: a template of `re`, or made of the match."""

    option: str
    words: str | Callable[[re.Match[str]], str]


def with_arguments(text: str, rows: Sequence[ArgumentName]) -> str:
    """Return a text in which the arguments of a function stand for the options of a command."""
    for row in rows:
        text = re.sub(row.option, row.words, text)
    return text


@contextmanager
def naming_arguments(rows: Sequence[ArgumentName]) -> Iterator[None]:
    """Let errors name the arguments of a function of the library."""
    try:
        yield
    except TandemError as error:
        error.args = tuple(
            with_arguments(part, rows) if isinstance(part, str) else part for part in error.args
        )
        raise
