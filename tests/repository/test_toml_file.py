"""What is wrong in a TOML file is said with its key, its table and what may be there."""

import contextlib
import re
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.toml_file import decode_toml


class Near(msgspec.Struct, tag_field="kind", tag="near", forbid_unknown_fields=True):
    metres: int = 0


class Far(msgspec.Struct, tag_field="kind", tag="far", forbid_unknown_fields=True):
    miles: int = 0


class Row(msgspec.Struct, forbid_unknown_fields=True):
    side: Literal["left", "right"] = "left"
    place: Near | Far = msgspec.field(default_factory=Near)
    count: int = 0


class File(msgspec.Struct, forbid_unknown_fields=True):
    row: Row | None = None
    rows: tuple[Row, ...] = ()
    named: dict[str, Row] = {}
    later: Row | msgspec.UnsetType = msgspec.UNSET
    pair: tuple[int, Row] | None = None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("colunm = 1", "unknown key 'colunm' in the top level: use one of later, named, pair, row"),
        ("row.sied = 1", "unknown key 'sied' in [row]: use one of side, count, place"),
        ("later.sied = 1", "unknown key 'sied' in [later]: use one of side, count, place"),
        ("[[rows]]\n[[rows]]\nx = 1", "unknown key 'x' in [rows[1]]: use one of"),
        ("named.a.sied = 1", "unknown key 'sied' in [named[...]]: use one of side, count, place"),
        ('row.side = "top"', "row.side is 'top': use one of left, right"),
        ('[[rows]]\nside = "top"', "rows[0].side is 'top': use one of left, right"),
        ('named.a.side = "top"', "named[...].side is 'top': use one of left, right"),
        ('row.place.kind = "fra"', "row.place.kind is 'fra': use one of far, near"),
        ('row.place = {kind = "far", metres = 1}', "in [row.place]: use one of kind, miles"),
        ("row.place = {metres = 1}", "[row.place] has no 'kind': add it"),
        ('named.a.place = {kind = "far", x = 1}', "unknown key 'x' in [named[...].place]: remove"),
        ("row.count = 1.5", "row.count is wrong: expected `int`, got `float`"),
        ("pair = [1, {x = 1}]", "unknown key 'x' in [pair[1]]: remove it"),
        ("row = 1", "row is wrong: expected `object | null`, got `int`"),
        ("row = {", "Invalid initial character"),
        ('row = "\\u0000"', "a text holds the character NUL"),
    ],
)
def test_a_fault_is_named_with_its_place(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        decode_toml(text.encode(), File)


KEYS = st.sampled_from(["row", "rows", "named", "later", "pair", "side", "place", "kind", "x"])
VALUES = st.recursive(
    st.one_of(st.integers(0, 9), st.sampled_from(["left", "near", "far", "?"]), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_file_is_taken_or_a_value_error(tables: dict[str, object]) -> None:
    with contextlib.suppress(ValueError):  # any other error fails
        decode_toml(msgspec.toml.encode(tables), File)
