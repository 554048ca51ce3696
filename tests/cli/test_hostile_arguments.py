"""Paths, addresses and config files that no one means: one sentence each, for every command."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from device.agent.config import load_agent_config
from device.errors import TandemError
from device.profile import load_profile
from pipelines.config import SourceConfig, load_pipeline
from pipelines.sources.batching import read_frames
from toolkit.cli.main import COMMANDS, tandem
from toolkit.cli.options.choices import USB
from toolkit.partition.costs.measured import load_measured
from toolkit.partition.planning.workload import load_workload

DEEP = "a = " + "[" * 20_000 + "]" * 20_000
LOADERS = {
    "agent.toml": load_agent_config,
    "profile.toml": load_profile,
    "pipeline.toml": load_pipeline,
    "measured.toml": load_measured,
    "measured.json": load_measured,
    "workload.toml": load_workload,
}
TEXTS = {
    "deep": DEEP.encode(),
    "deep tables": ("[" + ".".join("a" * 3000) + "]\nb = 1").encode(),
    "deep inline tables": ("a = " + "{b = " * 5000 + "1" + "}" * 5000).encode(),
    "a NUL in a text": b'name = "\\u0000"\npath = "\\U00000000"',
    "a NUL": b'name = "\0"',
    "no UTF-8": b'name = "\xff\xfe"',
    "a long number": b"a = " + b"9" * 10_000,
    "nothing": b"",
    "a surrogate": b'name = "\\ud800"',
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", LOADERS)
def test_a_config_file_that_no_one_means_is_refused_by_name(
    tmp_path: Path, name: str, text: str
) -> None:
    path = tmp_path / name
    path.write_bytes(TEXTS[text])
    with pytest.raises(TandemError) as info:
        LOADERS[name](path)
    assert str(path) in str(info.value)
    assert len(str(info.value).splitlines()) == 1


AGENT = 'device = "a"\nprofile = "{profile}"\nstate_dir = "{state}"\n[broker]\nhost = "b"\n'


@pytest.mark.parametrize(
    ("profile", "state"),
    [("laptop", "~nosuch/x"), ("~nosuch/x.toml", "state"), ("laptop", "\\u0000")],
)
def test_paths_of_an_agent_that_mean_nothing(tmp_path: Path, profile: str, state: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(AGENT.format(profile=profile, state=state))
    with pytest.raises(TandemError):
        load_agent_config(path)
    done = subprocess.run(
        [sys.executable, "-m", "device.agent", "--config", path],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


ADDRESSES = (
    *("~nosuch/x", "~nosuch", "v4l2://[", "v4l2://[::1/dev/video0", "v4l2:///dev/\0", "\0", "a\0b"),
    *("rtsp://[", "rtsp://\0", "file://~nosuch/x", "://", "v4l2://", "", "v4l2:///dev/x?width=²"),
)


@pytest.mark.parametrize("uri", ADDRESSES)
def test_a_source_that_means_nothing_is_refused(uri: str) -> None:
    with pytest.raises(TandemError), read_frames(SourceConfig(uri=uri)):
        pass


def arguments_of(command: click.Command, value: str) -> list[list[str]]:
    """Command lines with the value in the place of each argument and each option that takes one."""
    needed = [value for one in command.params if isinstance(one, click.Argument)]
    for option in command.params:
        if option.default == USB:  # where no board is, ssh tries for 10 s
            needed += [option.opts[0], "ssh://127.0.0.1:1"]
    lines = [needed]
    for option in command.params:
        if isinstance(option, click.Option) and isinstance(option.type, click.Path):
            lines.append([*needed, option.opts[0], value])
    return lines


def commands() -> Sequence[tuple[str, ...]]:
    """Every command, subcommands included, by its words."""
    names: list[tuple[str, ...]] = []
    for name in COMMANDS:
        command = tandem.get_command(click.Context(tandem), name)
        below = sorted(command.commands) if isinstance(command, click.Group) else [""]
        names += [(name, *([one] if one else [])) for one in below]
    return names


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_refuses_a_path_of_nobody(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolkit.fleet.boards.discovery.FINDERS", ())  # boards answer in seconds
    command: click.Command = tandem
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)  # type: ignore[assignment]
    if words[0] in ("demo", "doctor"):  # they take no path that must exist, and run for long
        return
    for value in ("~nosuch/x", "v4l2://[x", "a\0b"):
        for line in arguments_of(command, value):
            result = CliRunner().invoke(tandem, [*words, *line])
            expected = (SystemExit, TandemError, type(None))
            assert isinstance(result.exception, expected), (line, result.exception)
