"""Keys of msgspec structs as rows of a page: name, type and default, as the pages write them."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect as mi

ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.+) \|$", re.MULTILINE)
WORDS = {mi.StrType: "text", mi.BoolType: "boolean", mi.IntType: "integer", mi.FloatType: "number",
         mi.NoneType: "none", mi.AnyType: "any"}  # fmt: skip


def rows_of(kind: type[msgspec.Struct], titles: Mapping[type, str]) -> dict[str, tuple[str, str]]:
    """Return (type, default) of each key, the tag first; `titles`: how the page calls structs."""
    info: Any = mi.type_info(kind)
    tag = {info.tag_field: (f'`"{info.tag}"`', "required")} if info.tag_field else {}
    return tag | {
        field.encode_name: (_type(field.type, titles), _default(field)) for field in info.fields
    }


def rows_in(section: str) -> dict[str, tuple[str, str]]:
    """Return (type, default) of each row of the tables in a section."""
    return {name: (type_, default) for name, type_, default, _ in ROW.findall(section)}


def sections(page: str) -> dict[str, str]:
    """Return the text below each heading, by its words."""
    parts = re.split(r"^#+ (.*)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _default(field: Any) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return "empty"
    if field.default in (None, msgspec.NODEFAULT):  # it may be left out
        return "none"
    if isinstance(field.default, msgspec.Struct):
        return "its defaults"
    value = field.default
    return f"`{msgspec.json.encode(value).decode()}`" if value != () else "empty"


def _type(info: Any, titles: Mapping[type, str]) -> str:  # noqa: PLR0911
    if isinstance(info, mi.Metadata):
        return _type(info.type, titles)
    if isinstance(info, mi.LiteralType):
        return ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in info.values)
    if isinstance(info, mi.UnionType):
        return " or ".join(dict.fromkeys(_type(one, titles) for one in info.types))
    if isinstance(info, mi.StructType):
        return titles[info.cls]
    if isinstance(info, mi.VarTupleType):
        return f"list of {_type(info.item_type, titles)}"
    if isinstance(info, mi.TupleType):
        return f"{len(info.item_types)} x {_type(info.item_types[0], titles)}"
    if isinstance(info, mi.DictType):
        return f"{_type(info.value_type, titles)} by name"
    return WORDS[type(info)] + _limits(info)


def _limits(info: Any) -> str:
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    limits = [f"{sign} {getattr(info, name):g}" if abs(getattr(info, name)) < 1e5
              else f"{sign} {getattr(info, name)}"
              for name, sign in signs if getattr(info, name, None) is not None]  # fmt: skip
    return " " + ", ".join(limits) if limits else ""
