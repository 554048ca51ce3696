"""What long commands say while they work, where no bar is shown."""

import re
import time

import click
import pytest
from click.testing import CliRunner

from toolkit.cli import progress
from toolkit.cli.log import add_log_options


def progress_text(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], shares: dict[str, float]
) -> str:
    """What a command of two steps prints on standard error; a line each 0.05 s."""
    monkeypatch.setattr(progress, "LINE_S", 0.05)

    @click.command()
    def work() -> None:
        with progress.progress_bar("model.onnx", shares) as report:
            report("calibrate", 0.0)
            report("calibrate", 0.25)
            time.sleep(0.2)  # as a step that says nothing
            report("compile", 0.0)
            time.sleep(0.2)
        click.echo("{}")

    add_log_options(work)
    result = CliRunner().invoke(work, arguments)
    assert result.stdout == "{}\n"
    return result.stderr


def test_without_a_terminal_a_line_tells_step_share_and_seconds_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = progress_text(monkeypatch, [], {}).splitlines()
    assert len(lines) >= 4
    assert re.fullmatch(r"model\.onnx: calibrate, 25 % of this step, about \d+ s left", lines[0])
    assert re.fullmatch(r"model\.onnx: compile, \d+ s so far", lines[-1])


def test_quiet_commands_print_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress_text(monkeypatch, ["-q"], {}) == ""


def test_verbose_commands_say_what_each_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    text = progress_text(monkeypatch, ["-v"], {})
    assert re.search(r"calibrate took 0\.[2-9] s, 0\.\d s of processor time", text)
    assert re.search(r"compile took 0\.[2-9] s, 0\.\d s of processor time", text)
    assert "25 % of this step" in text


def test_steps_with_known_shares_are_shown_as_they_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = progress_text(monkeypatch, [], {"calibrate": 0.8, "compile": 0.2}).splitlines()
    assert re.fullmatch(r"model\.onnx: calibrate, 20 %, about \d+ s left", lines[0])
    assert "model.onnx: calibrate, 0 s" in lines
    assert lines[-1] == "model.onnx: compile, 0 s"


@pytest.mark.parametrize("shares", [{}, {"calibrate": 1.0}])
def test_a_line_before_the_first_step_has_no_step(shares: dict[str, float]) -> None:
    assert progress._Steps("plan", shares).line() == "plan, 0 s so far"
