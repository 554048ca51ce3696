"""Errors of `tandem board` and `tandem flash` with `--json`, also before a board is opened."""

import json
from pathlib import Path

import pytest
from cli_fixtures import invoke

from device.install_advice import pip_install
from toolkit.cli import failures

# words -> exit status, what the error says
ERRORS = {
    ("board", "info", "usb://x"): (2, "is no address of a board"),
    ("board", "info", "ssh://u:secret@host"): (2, "takes no password"),
    ("board", "info", "serial:///dev/ttyX?baud=fast"): (2, "is no rate"),
    ("board", "info", "serial:///nowhere/ttyX"): (1, "cannot be opened"),
    ("board", "info", "--colour"): (2, "No such option"),
    ("board", "reboot", "dir:///media/usb"): (2, "this goes over SSH alone"),
    ("board", "logs", "dir:///media/usb"): (2, "this goes over SSH alone"),
    ("board", "power-mode", "--to", "ssh://host?x=1"): (2, "has no option 'x'"),
    ("board", "init", "ssh://host"): (1, "a board without --fleet takes no release"),
    ("board", "init", "ssh://host", "--fleet", "nosuch"): (2, "'nosuch' does not exist"),
    ("board", "init", "ssh://host", "--dev", "--packages", "nosuch"): (2, "folder of wheels"),
    ("board", "provision", "--csv", "nosuch.csv", "--out", "o.csv"): (2, "'nosuch.csv' does not"),
    ("board", "provision", "--csv", "in.csv", "--out", "o.csv", "--dev"): (
        1,
        "has the column 'colour'",
    ),
    ("board", "nosuch"): (2, "No such command 'nosuch'"),
    ("flash", "nosuch.bundle"): (2, "'nosuch.bundle' does not exist"),
    ("flash", "in.csv", "--to", "usb://x"): (2, "is no address of a board"),
    ("flash", "in.csv", "--to", "mqtt://127.0.0.1:1/b"): (1, "is not a bundle"),
    ("flash",): (2, "name the BUNDLE"),
}


@pytest.mark.parametrize(("words", "error"), ERRORS.items())
def test_an_error_is_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], error: tuple[int, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text("colour\nred\n")
    status, text = error
    done = invoke(*words, "--json")
    assert (done.exit_code, done.stderr) == (status, ""), done.output
    assert text in json.loads(done.stdout)["error"]


def test_without_json_an_error_is_a_text() -> None:
    done = invoke("board", "info", "usb://x")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Error: usb://x is no address of a board" in done.stderr
    # Behind -- there are no options.
    assert "Error: " in invoke("board", "info", "--", "--json").stderr


def test_a_package_that_is_missing_is_said_as_json_and_a_mistake_of_ours_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> None:
        def info(_way: str) -> None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr("toolkit.cli.actions.board.care.parse_address", info)

    fail("serial.tools")
    done = invoke("board", "info", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (
        1,
        {
            "error": "this needs the package 'serial.tools', which is not installed; "
            + pip_install("serial")
        },
    )
    fail("toolkit.nosuch")
    done = invoke("board", "info", "--json")
    assert isinstance(done.exception, ModuleNotFoundError)
    assert failures.failure_of(done.exception) is None


def test_json_of_the_list_is_refused_where_a_profile_is_shown() -> None:
    done = invoke("profiles", "--json", "show", "orin-nano-8gb")
    assert (done.exit_code, "tandem profiles show NAME --json" in done.output) == (2, True)
