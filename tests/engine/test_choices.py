"""An error about an unknown name lists the names there are: the nearest first, then sorted."""

import re
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from engine_fixtures import single_network, write_network
from hypothesis import given
from hypothesis import strategies as st

from calibration.threshold import METHODS, method_named
from device.choices import list_choices
from device.errors import TandemError
from device.profile import PROFILES, find_jetpack, load_jetpacks, load_profile
from device.runtime.session import open_session
from pipelines.config import SourceConfig, load_pipeline
from pipelines.sinks.table import SINKS
from pipelines.sources.batching import read_frames
from pipelines.sources.table import SOURCES
from pipelines.sources.uri import parse_camera
from pipelines.stages.decoders.table import ROWS
from toolkit.build import BuildOptions, build_engine
from toolkit.cli.main import COMMANDS, tandem
from toolkit.engine.target import choose_target
from toolkit.partition.planning.objectives import GOALS, goal_named

MODEL = Path(__file__).parents[2] / "configs" / "models" / "robot-objects.onnx"
PIPELINE = """
name = "p"
[source]
uri = "x"
frames = "{frames}"
[preprocess]
width = 64
height = 64
[decode]
kind = "{decoder}"
scores = "s"
[[sinks]]
kind = "{sink}"
"""


@pytest.mark.parametrize(
    ("written", "choices", "listed"),
    [
        ("minmx", ("percentile", "mse", "minmax"), "minmax, mse, percentile"),
        ("ENTROPY", ("auto", "entropy"), "entropy, auto"),
        ("zzz", ("b", "a", "c", "a"), "a, b, c"),
        ("orin-nx", ("orin-nx-8gb", "orin", "laptop"), "orin-nx-8gb, orin, laptop"),
        ("", ("b", "a"), "a, b"),
        ("x", (), "none"),
    ],
)
def test_the_nearest_comes_first(written: str, choices: tuple[str, ...], listed: str) -> None:
    assert list_choices(written, choices) == listed


@given(st.text(max_size=12), st.sets(st.from_regex(r"[a-z0-9.-]{1,8}", fullmatch=True)))
def test_every_choice_is_listed_once(written: str, choices: set[str]) -> None:
    listed = list_choices(written, choices)
    assert sorted(listed.split(", ")) == (sorted(choices) or ["none"])
    assert list_choices(written, sorted(choices, reverse=True)) == listed


def wrong_key(folder: Path, **words: str) -> None:
    path = folder / "pipeline.toml"
    path.write_text(
        PIPELINE.format(**{"frames": "every", "decoder": "classification", "sink": "mqtt", **words})
    )
    load_pipeline(path)


def profiles() -> set[str]:
    return {path.stem for path in PROFILES.glob("*.toml")}


# What a user asks for -> the nearest choice, all choices.
CASES: dict[str, tuple[Callable[[Path], object], str, set[str]]] = {
    "profile": (lambda _: load_profile("orin-nx-8"), "orin-nx-8gb", profiles()),
    "power mode": (
        lambda _: load_profile("orin-nx-16gb").power_mode("maxm"),
        "MAXN",
        {mode.name for mode in load_profile("orin-nx-16gb").power_modes},
    ),
    "JetPack": (
        lambda _: find_jetpack("6.2.9"),
        "6.2.1",
        {jetpack.version for jetpack in load_jetpacks()},
    ),
    "JetPack of a profile": (
        lambda _: choose_target("orin-nx-16gb", "6.9"),
        "6.0",
        set(load_profile("orin-nx-16gb").jetpacks),
    ),
    "method": (lambda _: method_named("entropi"), "entropy", set(METHODS)),
    "objective": (lambda _: goal_named("latenzy"), "latency", set(GOALS)),
    "precision": (
        lambda folder: build_engine(
            MODEL,
            "laptop",
            folder / "e",
            BuildOptions(precision="int4"),  # type: ignore[arg-type]  # as from an untyped caller
        ),
        "int8",
        {"fp32", "fp16", "int8", "best", "bf16", "fp8"},
    ),
    "decoder": (
        lambda folder: wrong_key(folder, decoder="clasification"),
        "classification",
        {row.kind for row in ROWS},
    ),
    "sink": (
        lambda folder: wrong_key(folder, sink="vidio"),
        "video",
        {msgspec.inspect.type_info(kind).tag for kind in SINKS},
    ),
    "frames": (
        lambda folder: wrong_key(folder, frames="evry"),
        "every",
        {"bounded", "every", "latest"},
    ),
    "source": (
        lambda _: read_frames(SourceConfig(uri="v4l:///dev/video0")).__enter__(),
        "v4l2://",
        {f"{scheme}://" for scheme in SOURCES},
    ),
    "camera option": (
        lambda _: parse_camera("v4l2:///dev/video0?heigth=4"),
        "height",
        {"width", "height", "fps", "format"},
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_an_error_lists_the_choices(tmp_path: Path, what: str) -> None:
    ask, nearest, choices = CASES[what]
    with pytest.raises(TandemError) as info:
        ask(tmp_path)
    message = re.sub(r"[ (]its modes \(", " ", str(info.value))
    listed = re.search(r"(?:one of|it takes:) (.*?)(?:, or the path.*)?\)?\.?$", message)
    assert listed, info.value
    names = listed[1].split(", ")
    assert names[0] == nearest
    assert set(names) == choices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dla": "exakt"}, "dla 'exakt': use one of exact, fast, portable"),
        ({"scales": "idael"}, "scales 'idael': use one of ideal, hardware"),
    ],
)
def test_a_session_lists_how_dla_segments_may_run(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    engine = write_network(tmp_path / "e", single_network())
    with pytest.raises(TandemError, match=message):
        open_session(engine, **options)  # type: ignore[arg-type]  # as from an untyped caller


def choice_options() -> list[tuple[str, str, click.Choice]]:  # type: ignore[type-arg]  # click 8.1
    context = click.Context(tandem)
    return [
        (name, parameter.opts[0], parameter.type)
        for name in COMMANDS
        if (command := tandem.get_command(context, name)) is not None
        for parameter in command.params
        if isinstance(parameter, click.Option) and isinstance(parameter.type, click.Choice)
    ]


@pytest.mark.parametrize(("command", "option", "kind"), choice_options())
def test_an_option_with_a_wrong_choice_lists_them(
    command: str, option: str, kind: "click.Choice[str]"
) -> None:
    result = CliRunner().invoke(tandem, [command, option, "nonsense"])
    assert result.exit_code == 2
    for choice in kind.choices:
        assert repr(choice) in result.output
