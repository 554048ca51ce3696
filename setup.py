"""Builds the wheel, which installs one name: `tandem`.

A checkout has five packages at its top. In site-packages these names are other people's, too, and
pip overwrites files without a word. So the wheel has them below `tandem`, whose `__init__.py` is
`tandem.py`, and whatever names them is rewritten. An editable install is the checkout as it is.
"""

import ast
import io
import re
import shutil
import tokenize
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

NAME = "tandem"
PACKAGES = ("calibration", "configs", "device", "pipelines", "toolkit")
_ANY = "|".join(PACKAGES)
_FROM = re.compile(rf"^([ \t]*)from ((?:{_ANY})(?:\.\w+)*) import\b", re.M)
_IMPORT_AS = re.compile(rf"^([ \t]*)import ((?:{_ANY})(?:\.\w+)*) as\b", re.M)
_IMPORT = re.compile(rf"^([ \t]*)import ({_ANY})(?=[ \t]*(?:$|#))", re.M)
_DOTTED = re.compile(rf"(?<![\w./-])({_ANY})\.(\w+)")
_MAY_IMPORT = re.compile(rf"\b(?:import|from)\b(?:\\\n|[^\n])*?(?<![\w.])(?:{_ANY})\b")
_FIELDS = re.compile(r"(\{[^{}]*\})")
_F_STRING = re.compile(r"[rR]?[fF]")
_TEXTS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def move_packages(tree: Path) -> None:
    """Move the packages of a tree below one name, and rewrite what names them.

    Raises ValueError: a file imports a package in a form that is not known.
    """
    package = tree / NAME
    shutil.rmtree(package, ignore_errors=True)
    modules = modules_of(tree / name for name in PACKAGES)
    package.mkdir()
    (tree / f"{NAME}.py").rename(package / "__init__.py")
    (package / "py.typed").touch()
    for stub in (tree / f"{NAME}-stubs").glob("*.pyi"):
        if stub.stem != "__init__":  # of modules that tandem.py makes; it carries its own types
            stub.rename(package / stub.name)
    shutil.rmtree(tree / f"{NAME}-stubs", ignore_errors=True)
    for name in PACKAGES:
        (tree / name).rename(package / name)
    rewrite((*package.rglob("*.py"), *package.glob("*.pyi")), modules)


def modules_of(packages: Iterable[Path]) -> set[str]:
    """Return the modules of packages, with one dot."""
    files = [path for package in packages for path in package.iterdir()]
    return {
        f"{path.parent.name}.{path.stem}" for path in files if path.suffix == ".py" or path.is_dir()
    }


def rewrite(files: Iterable[Path], modules: set[str]) -> None:
    """Rewrite imports and names of modules in Python files; `modules`: those with one dot."""
    for path in files:
        text = path.read_text(encoding="utf-8")
        moved = moved_strings(moved_imports(text), modules)
        if moved != text:
            path.write_text(moved, encoding="utf-8")
        if not _MAY_IMPORT.search(moved):  # most files: to parse them all takes seconds
            continue
        for node in ast.walk(ast.parse(moved)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.partition(".")[0] in PACKAGES and getattr(node, "level", 0) == 0:
                    raise ValueError(
                        f"{path}:{node.lineno}: `import {name}` cannot be moved below {NAME}: "
                        f"write `from PACKAGE import MODULE` or `import {name} as NAME`"
                    )


def moved_imports(text: str) -> str:
    """Rewrite import statements, those of examples in docstrings, too."""
    for pattern, replacement in (
        (_FROM, rf"\1from {NAME}.\2 import"),
        (_IMPORT_AS, rf"\1import {NAME}.\2 as"),
        (_IMPORT, rf"\1from {NAME} import \2"),
    ):
        text = pattern.sub(replacement, text)
    return text


def moved_strings(text: str, modules: set[str]) -> str:
    """Rewrite names of modules within strings, but not in the fields of f-strings."""
    if not any(f"{match[1]}.{match[2]}" in modules for match in _DOTTED.finditer(text)):
        return text
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    parts, end = list[str](), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _TEXTS:
            at = starts[token.start[0] - 1] + token.start[1]
            parts += text[end:at], ""
            end = starts[token.end[0] - 1] + token.end[1]
            parts[-1] = _moved(text[at:end], modules)
    return "".join((*parts, text[end:]))


def _moved(string: str, modules: set[str]) -> str:
    def below(match: "re.Match[str]") -> str:
        known = f"{match[1]}.{match[2]}" in modules
        return f"{NAME}.{match[0]}" if known else match[0]

    if not _F_STRING.match(string):
        return _DOTTED.sub(below, string)
    parts = _FIELDS.split(string)
    return "".join(part if at % 2 else _DOTTED.sub(below, part) for at, part in enumerate(parts))


class OneName(build_py):
    """`build_py`, after which the packages of a wheel stand below one name."""

    def run(self) -> None:
        """Build, and move."""
        super().run()
        if not self.editable_mode:
            move_packages(Path(self.build_lib))


class OneNameDistribution(Distribution):
    """A distribution that says what it installs (`top_level.txt`)."""

    def iter_distribution_names(self) -> Iterable[str]:
        """Yield the one name."""
        yield NAME


if __name__ == "__main__":
    setup(cmdclass={"build_py": OneName}, distclass=OneNameDistribution)
