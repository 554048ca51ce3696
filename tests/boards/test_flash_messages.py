"""docs/flashing.md has every message of `tandem flash` and `tandem board`, and no other."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/flashing.md", "docs/flash_serial.md", "docs/flash_cable.md")
RAISED_IN = ("toolkit/fleet/transports", "toolkit/fleet/boards", "toolkit/cli/actions/board")
SAID_IN = (*RAISED_IN, "toolkit/cli/actions", "device", "toolkit/fleet")
OF_DEPLOY = "deploy.py"  # its refusals are those of `tandem deploy`
# What only passes on what another part said, whose own row is the one to read.
PASSED_ON = {"...", "...: ...", "...; ...", "... refused ...: ..."}
# The text of a program that is not ours: `test_the_page_has_every_cause_of_ssh` has those of ssh.
OF_SSH = re.compile(
    r"verification failed|IDENTIFICATION|Permission denied|Connection refused|timed out|No route|"
    r"resolve hostname|not found|No such file"
)


def text_of(node: ast.expr | None) -> str | None:
    """A text in the code, with ... for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values)
        return "".join(parts)
    return None


def trees(folders: tuple[str, ...], but: str = "") -> Iterator[ast.AST]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name != but:
                yield ast.parse(path.read_text())


@cache
def raised() -> set[str]:
    """The messages of all errors, and what `Shell.must` says that it cannot do."""
    messages = set()
    for tree in trees(RAISED_IN, OF_DEPLOY):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if re.search(r"(Error|UsageError)$", name) and node.args:
                messages.add(text_of(node.args[0]) or "...")
            messages |= {
                f"...: cannot {text_of(word.value)}" for word in node.keywords if word.arg == "what"
            }
    return messages - PASSED_ON - {"...: cannot ...: ...", "...: cannot None"}


@cache
def texts() -> frozenset[str]:
    """Every text of the code that could say a message."""
    texts = {
        text_of(node)
        for tree in trees(SAID_IN)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
    }
    return frozenset(text for text in texts if text) | raised()


@cache
def fragments() -> list[str]:
    """The first cells of the tables of messages, each between its backticks."""
    results = []
    for page in PAGES:
        text = (ROOT / page).read_text().partition("## Messages")[2].partition("\n## ")[0]
        for line in text.splitlines():
            if line.startswith("| `"):
                results += re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", line)[1])
    return results


def said_with(fragment: str, message: str) -> bool:
    """Whether a message holds a fragment, in which ... stands for any words."""
    return (
        re.search(".*".join(re.escape(part) for part in fragment.split("...")), message) is not None
    )


def test_there_are_messages() -> None:
    assert len(raised()) > 60
    assert len(fragments()) > 60


@pytest.mark.parametrize("message", sorted(raised()))
def test_every_message_has_a_row(message: str) -> None:
    assert any(said_with(fragment, message) for fragment in fragments()), message


@pytest.mark.parametrize("fragment", sorted({f for f in fragments() if not OF_SSH.search(f)}))
def test_every_row_is_of_a_message(fragment: str) -> None:
    assert any(said_with(fragment, text) for text in texts()), fragment
