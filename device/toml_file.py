"""Reads TOML of others: every fault is a ValueError, whatever the text holds."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from device.errors import ConfigError

T = TypeVar("T")
_NUL = re.compile(rb"\\u0000|\\U00000000")


def decode_toml(
    data: bytes, kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None
) -> T:
    """Return the value of `kind` in a TOML file.

    Raises ValueError: it is not UTF-8 or not TOML, holds a wrong or unknown key, is nested too
    deep, or holds a NUL, which no path and no name can.
    """
    if _NUL.search(data):
        raise ValueError("a text holds the character NUL")
    try:
        return msgspec.toml.decode(data, type=kind, dec_hook=dec_hook)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def user_path(text: str) -> Path:
    """Return a path with ~ and ~name as folders. Raises ConfigError: there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{text!r}: the folder of that user is not known ({error}); write the whole path"
        ) from error
