"""Reads TOML of others: every fault is a ValueError, whatever the text holds."""

import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from device.choices import list_choices
from device.errors import ConfigError

T = TypeVar("T")
_TIMES = (datetime.datetime, datetime.date, datetime.time)  # which TOML has
_NUL = re.compile(rb"\\u0000|\\U00000000")
_LISTS = (inspect.ListType, inspect.VarTupleType)
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
        raise ValueError(_explain(kind, tree, str(error))) from error


def user_path(text: str) -> Path:
    """Return a path with ~ and ~name as folders. Raises ConfigError: there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{text!r}: the folder of that user is not known ({error}); write the whole path"
        ) from error


def _explain(kind: type, tree: object, message: str) -> str:
    """Return msgspec's words ("Object contains unknown field `x` - at `$.source`") as ours.

    `tree`: the values that are no `kind`.
    """
    reason, _, where = message.partition(" - at ")
    key = where.strip("`").removeprefix("$").removeprefix(".")
    table = f"[{key}]" if key else "the top level"
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", reason)
    if unknown:
        keys = _allowed_keys(kind, tree, key)
        advice = f"use one of {list_choices(unknown[1], keys)}" if keys else "remove it"
        return f"unknown key {unknown[1]!r} in {table}: {advice}"
    value = re.fullmatch(r"Invalid (?:enum )?value '(.*)'", reason)
    allowed = _allowed_values(kind, tree, key) if value else ()
    if value and allowed:
        return f"{key} is {value[1]!r}: use one of {list_choices(value[1], allowed)}"
    missing = re.fullmatch(r"Object missing required field `(.*)`", reason)
    if missing:
        return f"{table} has no {missing[1]!r}: add it"
    return f"{key or 'the top level'} is wrong: {reason[:1].lower()}{reason[1:]}"


def _allowed_keys(kind: type, tree: object, key: str) -> tuple[str, ...]:
    """Return the keys of the table at a path such as `sinks[1]`, empty if they are not known."""
    here = _type_at(kind, tree, key)
    if not isinstance(here, inspect.StructType):
        return ()
    names = tuple(field.encode_name for field in here.fields)
    return (here.tag_field, *names) if here.tag_field else names


def _allowed_values(kind: type, tree: object, key: str) -> tuple[str, ...]:
    """Return the values of a literal, or the tags of a union, at a path such as `decode.kind`."""
    here = _type_at(kind, tree, key)
    if isinstance(here, inspect.UnionType):
        tags = (getattr(table, "tag", None) for table in here.types)
        return tuple(str(tag) for tag in tags if tag is not None)
    return tuple(map(str, here.values)) if isinstance(here, inspect.LiteralType) else ()


def _type_at(kind: type, tree: object, key: str) -> inspect.Type | None:
    """Return the type at a path, walking types and data at once; the union for its tag."""
    here, place = _chosen(inspect.type_info(kind), tree), tree
    for step in re.findall(r"[^.\[\]]+", key):
        if isinstance(here, inspect.DictType):  # of its keys msgspec names none
            here, place = _chosen(here.value_type, None), None
        if isinstance(here, inspect.UnionType):
            return here  # its tag is what is wrong
        if isinstance(here, _LISTS) and step.isdigit():
            inner, index = here.item_type, int(step)
            place = place[index] if isinstance(place, list) and index < len(place) else None
        elif isinstance(here, inspect.StructType):
            types = [field.type for field in here.fields if field.encode_name == step]
            if not types:
                return None
            inner, place = types[0], place.get(step) if isinstance(place, dict) else None
        else:
            return None
        here = _chosen(inner, place)
    return _chosen(here.value_type, None) if isinstance(here, inspect.DictType) else here


def _chosen(here: inspect.Type, value: object) -> inspect.Type:
    """Return the table of a union that a value is meant for; the union where none is."""
    if not isinstance(here, inspect.UnionType):
        return here
    types = [one for one in here.types if not isinstance(one, inspect.NoneType)]
    if len(types) == 1:
        return types[0]
    tag: Any = value.get("kind") if isinstance(value, dict) else None
    return next((one for one in types if getattr(one, "tag", None) == tag), here)
