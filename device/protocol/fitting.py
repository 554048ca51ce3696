"""Cuts a document to the limits of its fields, with a mark, so that its reader takes it.

An agent gathers sentences from many places, of which one may be long: a report that says less is
better than one that nobody reads. The limits are those of the types in `device.protocol.documents`.
"""

from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as types

D = TypeVar("D", bound=msgspec.Struct)
MARK = "..."


def fit(document: D) -> D:
    """Return the document with each text, list and mapping at its limit at most."""
    changed = {}
    for name, kind in _fields(type(document)):
        value = getattr(document, name)
        fitted = _fit(value, kind)
        if fitted is not value:
            changed[name] = fitted
    return msgspec.structs.replace(document, **changed) if changed else document


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, types.Type], ...]:
    """Return the fields of a document that may be over a limit."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    sized = (types.StrType, types.VarTupleType, types.DictType, types.StructType, types.UnionType)
    return tuple((field.name, field.type) for field in info.fields if isinstance(field.type, sized))


def _fit(value: Any, kind: types.Type) -> Any:  # noqa: ANN401  (a field of any document)
    if isinstance(value, msgspec.Struct):
        return fit(value)
    if isinstance(value, str):
        limit = kind.max_length if isinstance(kind, types.StrType) else None
        is_long = limit is not None and len(value) > limit
        return f"{value[: limit - len(MARK)]}{MARK}" if is_long and limit is not None else value
    if isinstance(value, tuple) and isinstance(kind, types.VarTupleType):
        return _fit_list(value, kind)
    if isinstance(value, dict) and isinstance(kind, types.DictType):
        return _fit_mapping(value, kind)
    return value


def _fit_list(values: tuple[Any, ...], kind: types.VarTupleType) -> tuple[Any, ...]:
    limit = len(values) if kind.max_length is None else kind.max_length
    fitted = tuple(_fit(value, kind.item_type) for value in values[:limit])
    if len(values) > limit:
        return (*fitted[:-1], f"{MARK} and {len(values) - limit + 1} more")
    return values if fitted == values else fitted


def _fit_mapping(values: dict[Any, Any], kind: types.DictType) -> dict[Any, Any]:
    limit = len(values) if kind.max_length is None else kind.max_length
    rows = sorted(values.items())
    left_out = len(rows) - limit + 1 if len(rows) > limit else 0
    fitted = {
        _fit(key, kind.key_type): _fit(value, kind.value_type)
        for key, value in rows[: len(rows) - left_out]
    }
    if left_out:
        fitted[MARK] = f"{left_out} more"
    return values if fitted == values else fitted
