"""A command of a dataclass: what its fields are on the command line, and what its action gets."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import click
import pytest
from click.testing import CliRunner, Result

from toolkit.cli.command import argument, command, option, part


def _parse_sizes(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(map(int, (text or "").split("x"))) if text else ()
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not 3x4") from error


@dataclass(frozen=True, slots=True)
class Limits:
    """Nested options."""

    gain: float | None = option("Least gain.", min=0, min_open=True)
    nodes: tuple[str, ...] = option("A node.", "--node", metavar="NODE")


@dataclass(frozen=True, slots=True)
class Example:
    """Do something with a MODEL.

    More of it.

    Example: tandem example
    model.onnx
    """

    model: Path = argument()  # noqa: RUF009
    count: int = option("How many.", "-n", "--count", group="First", min=1, default=2)
    mode: Literal["fast", "exact"] | None = option("How.")
    sizes: tuple[int, ...] = option("Sizes.", parse=_parse_sizes)
    limits: Limits = part("Limits")  # noqa: RUF009
    no_check: bool = option(None)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """The values that the action has got."""
    values: list[Example] = []
    module = ModuleType("example")
    module.act = values.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toolkit.cli.actions.example", module)
    return values


def run(*words: str) -> Result:
    return CliRunner().invoke(command(Example, "example:act", name="example"), words)


def test_an_action_gets_one_frozen_value(taken: list[Example]) -> None:
    assert run("m.onnx").exit_code == 0
    words = ("-n", "3", "--mode", "fast", "--sizes", "3x4", "--no-check")
    assert run("m.onnx", *words, "--node", "a", "--node", "b", "--gain=0.5").exit_code == 0
    assert taken == [
        Example(Path("m.onnx"), 2, None, (), Limits(None, ()), no_check=False),
        Example(Path("m.onnx"), 3, "fast", (3, 4), Limits(0.5, ("a", "b")), no_check=True),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing argument 'MODEL'"),
        (("m", "--count", "0"), "Invalid value for '-n' / '--count'"),
        (("m", "--mode", "slow"), "'exact'"),
        (("m", "--gain=0"), "Invalid value for '--gain': 0.0 is not in the range x>0"),
        (("m", "--gain=-1"), "Invalid value for '--gain'"),
        (("m", "--gain", "nan"), "is not a finite number"),
        (("m", "--sizes", "3y4"), "Invalid value for '--sizes': '3y4' is not 3x4"),
    ],
)
def test_a_value_that_does_not_fit_is_a_usage_error(
    taken: list[Example], words: tuple[str, ...], message: str
) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert message in done.output
    assert not taken


def test_the_docstring_is_the_help_and_options_stand_in_groups() -> None:
    shown = run("--help").output
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == ["First", "Limits", "Options"]
    assert re.search(r"Limits:\n +--gain.*\n +--node NODE +A node", shown)
    assert "Example: tandem example model.onnx" in shown
    assert shown.index("More of it.") < shown.index("First:")
