"""The texts of the product that advise a command, each with the module that says it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent


PACKAGES = ("toolkit", "calibration", "device", "pipelines")


OPTION = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")


@dataclass(frozen=True)
class Text:
    """A literal of a module that mentions options; what an f-string fills in is `{}`."""

    module: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}"


def texts(path: Path) -> Iterator[Text]:
    """Every literal with an option and another word, without docstrings and parts of f-strings."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # docstrings
            skipped |= {id(node.value)}
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        else:
            continue
        if OPTION.search(text) and " " in text.strip():
            yield Text(name.removesuffix(".__init__"), node.lineno, text)


TEXTS = [
    text
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    for text in texts(path)
]


@cache
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, "configs")
