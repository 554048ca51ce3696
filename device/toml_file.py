"""Reads TOML of others: every fault is a ValueError, whatever the text holds."""

import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from device.errors import ConfigError
from device.toml_errors import explain

T = TypeVar("T")
_TIMES = (datetime.datetime, datetime.date, datetime.time)  # which TOML has
_NUL = re.compile(rb"\\u0000|\\U00000000")


Hook = Callable[[type, Any], Any]


def decode_toml(data: bytes, kind: type[T], dec_hook: Hook | None = None) -> T:
    """Return the value of `kind` in a TOML file; raises as `parse_toml` and `convert`."""
    return convert(parse_toml(data), kind, dec_hook)


def parse_toml(data: bytes) -> object:
    """Return the tables of a TOML file.

    Raises ValueError: it is not UTF-8 or not TOML, is nested too deep, or holds a NUL, which no
    path and no name can.
    """
    if _NUL.search(data):
        raise ValueError("a text holds the character NUL")
    try:
        return msgspec.toml.decode(data)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def convert(tree: object, kind: type[T], dec_hook: Hook | None = None) -> T:
    """Return the tables of a file as a `kind`. Raises ValueError: a key is wrong or unknown."""
    try:
        return msgspec.convert(tree, kind, builtin_types=_TIMES, str_keys=True, dec_hook=dec_hook)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except msgspec.ValidationError as error:
        raise ValueError(explain(kind, tree, str(error))) from error


def user_path(text: str) -> Path:
    """Return a path with ~ and ~name as folders. Raises ConfigError: there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{text!r}: the folder of that user is not known ({error}); write the whole path"
        ) from error
