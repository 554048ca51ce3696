"""The names that `import tandem` and tandem.h promise, with their parameters: one line for each.

    python -m scripts.public_api --write

tests/golden/public_api.txt is what was promised last; a line that is lost or changed there breaks
programs of users (docs/compatibility.md).
"""

import argparse
import dataclasses
import enum
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import tandem

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests/golden/public_api.txt"
HEADER = ROOT / "device/native/include/tandem.h"
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_DECLARATION = re.compile(r"^(?:TANDEM_API|typedef)\b(?:[^;{]|\{[^}]*\})*;", re.MULTILINE)


def main() -> None:
    """Print the public names, or write them to the golden file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    text = public_api()
    if parser.parse_args().write:
        FILE.write_text(text)
    else:
        sys.stdout.write(text)


def public_api() -> str:
    """Return the names of `tandem` and its modules, with what they take, and the C declarations."""
    header = _COMMENT.sub("", HEADER.read_text())
    declarations = (" ".join(text.split()) for text in _DECLARATION.findall(header))
    return "".join(f"{line}\n" for line in (*_lines("tandem", tandem), *declarations))


def _lines(prefix: str, owner: object) -> Iterator[str]:
    for name in sorted(getattr(owner, "__all__", ())):
        value = getattr(owner, name)
        path = f"{prefix}.{name}"
        if isinstance(value, types.ModuleType):
            yield from _lines(path, value)
        elif isinstance(value, type):
            yield from _class_lines(path, value)
        elif callable(value):
            yield f"{path}{_parameters(value)}"
        else:
            yield path


def _class_lines(path: str, kind: type) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield f"{path}: {', '.join(kind.__members__)}"
        return
    fields = getattr(kind, "__struct_fields__", None) or (
        tuple(field.name for field in dataclasses.fields(kind))
        if dataclasses.is_dataclass(kind)
        else ()
    )
    yield f"{path}{_parameters(kind)}"
    for name in sorted({name for name in dir(kind) if not name.startswith("_")} | set(fields)):
        member = inspect.getattr_static(kind, name, None)
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        is_method = inspect.isfunction(function)
        yield f"{path}.{name}{_parameters(function) if is_method else ''}"


def _parameters(function: object) -> str:
    """Return the parameters without their types: names, kinds, and whether they have defaults."""
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    bare = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.default if parameter.default is parameter.empty else ...,
        )
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare)).replace("Ellipsis", "...")


if __name__ == "__main__":
    main()
