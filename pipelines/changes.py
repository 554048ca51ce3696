"""What two versions of a pipeline.toml differ in, and whether a running pipeline can take it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from device.errors import ConfigError
from pipelines.config import PipelineConfig

# Keys that may change, and how they are called; the first row that fits a key holds. Keys of a
# table that is not there in one version are those of the other.
_DECODE = r"decode\.(score_threshold|iou_threshold|max_detections|threshold|unclip|top)"
_MODEL = r"every_nth|max_hz|classes|min_score|margin|max_crops|draw"
TAKEN = (
    r"zones\b.*",
    r"lines\b.*",
    r"sinks\b.*",
    r"load\b.*",
    r"roi\b.*",
    r"tracker\b(?!\.(lost_s|model)).*",
    r"source\.max_hz",
    r"sources\[\d+\]\.max_hz",
    _DECODE,
    rf"models\[\d+\]\.({_MODEL}|{_DECODE})",
)
# Why others may not, by the first word of the key.
REASONS = {
    "name": "every result carries it",
    "source": "cameras stay open",
    "sources": "cameras stay open",
    "batch": "engines are loaded at the start",
    "engine": "engines are loaded at the start",
    "labels": "engines are loaded at the start",
    "preprocess": "engines are loaded at the start",
    "decode": "of a decoder only thresholds can",
    "models": "engines are loaded at the start",
    "tracker": "sinks follow objects by it",
}
_TABLES = ("zones", "lines", "sinks")  # described as a whole, by name or kind

_MISSING = object()


def changes(before: PipelineConfig, after: PipelineConfig) -> tuple[str, ...]:
    """Return what changes, a sentence each. Raises ConfigError: a running pipeline cannot take
    one of the changes; the message names all that it cannot."""
    old, new = _tree(before), _tree(after)
    keys = list(_differences("", old, new))
    refused = [key for key in keys if not any(re.fullmatch(row, key) for row in TAKEN)]
    if before.lost_s != after.lost_s and "tracker.lost_s" not in refused:
        refused.append("tracker.lost_s")
    if not refused and before.followed.name != after.followed.name:
        refused.append("tracker.model")
    if refused:
        reasons = dict.fromkeys(REASONS[re.split(r"[.\[]", key)[0]] for key in refused)
        raise ConfigError(
            f"{', '.join(refused)} cannot change while the pipeline runs ({'; '.join(reasons)}):"
            " start it again for that."
        )
    values = [_value_change(key, old, new) for key in keys if not key.startswith(_TABLES)]
    tables = (_table_change(table, old, new) for table in _TABLES)
    return (*values, *(text for text in tables if text))


def _tree(config: PipelineConfig) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return tree


def _differences(place: str, old: object, new: object) -> Iterator[str]:
    """Yield the keys, such as `models[1].decode.top`, in which two trees differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            inner = f"{place}.{key}" if place else str(key)
            yield from _differences(inner, old.get(key, _MISSING), new.get(key, _MISSING))
    elif isinstance(old, tuple) and isinstance(new, tuple) and _are_tables(old, new):
        for i, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{place}[{i}]", *pair)
    elif old != new:
        yield place


def _are_tables(old: tuple[object, ...], new: tuple[object, ...]) -> bool:
    """Return whether two lists hold as many tables."""
    return len(old) == len(new) and all(isinstance(one, dict) for one in (*old, *new))


def _value_change(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return f"{key}: {_text(_at(old, key))} -> {_text(_at(new, key))}"


def _at(tree: object, key: str) -> object:
    for step in re.findall(r"[^.\[\]]+", key):
        if isinstance(tree, tuple):
            tree = tree[int(step)]
        elif isinstance(tree, dict):
            tree = tree.get(step, _MISSING)
    return tree


def _text(value: object) -> str:
    if value is _MISSING:
        return "none"
    if isinstance(value, dict):
        return "a table"
    return str(list(value) if isinstance(value, tuple) else value)


def _table_change(table: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return which rows of a list of tables are new, changed or gone; empty if none is."""
    key = "kind" if table == "sinks" else "name"
    before, after = list(old.get(table, ())), list(new.get(table, ()))
    same = [row for row in after if row in before]
    removed, added = ([row[key] for row in rows if row not in same] for rows in (before, after))
    words = []
    for name in dict.fromkeys((*removed, *added)):
        if name not in removed:
            words.append(f"{name} new")
        else:
            words.append(f"{name} {'changed' if name in added else 'gone'}")
    return f"{table}: {', '.join(words)}" if words else ""
