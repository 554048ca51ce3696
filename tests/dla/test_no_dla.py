"""Boards without a DLA: the engine, its export and all reports say that there is none, no more."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet

from device.engine.file import open_engine
from device.profile import list_profiles
from device.session import open_session
from toolkit.cli.actions.build import as_builtins
from toolkit.cli.commands.export import export
from toolkit.cli.commands.inspect import inspect
from toolkit.cli.commands.plan import plan
from toolkit.engine.build import BuildOptions, build_engine

WITHOUT = [profile.name for profile in list_profiles() if profile.dla is None]
# The sentences that say so, of the plan's verdict and of each node.
NONE_HERE = ("This profile has no DLA beside a GPU", "profile has no DLA")
ALWAYS = ("orin-nano-8gb", "agx-thor")


def test_the_boards_are_those_that_nvidia_names() -> None:
    assert {"orin-nano-8gb", "orin-nano-4gb", "agx-thor", "jetson-nano", "tx2"} <= set(WITHOUT)


@pytest.mark.parametrize(
    "profile",
    [pytest.param(p, marks=() if p in ALWAYS else pytest.mark.slow) for p in WITHOUT],
)
def test_nothing_is_for_the_accelerator(
    profile: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    engine = tmp_path / "m.engine"
    data = [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(4)]
    options = BuildOptions(data=data, precision="int8", kernels=False, accept_loss=True)
    result = build_engine(model, profile, engine, options)
    texts = {"report": result.report, "json": values_of(as_builtins(result))}
    with open_engine(engine) as opened:
        texts["manifest"] = values_of(msgspec.to_builtins(opened.manifest))
        texts["entries"] = " ".join(opened.entries)
        models = [opened.entry(name).tobytes() for name in opened.entries if ".onnx" in name]
    with open_session(engine) as session:
        texts["session"] = str(session.reports)
    for name, command, arguments in (
        ("inspect", inspect, [str(engine)]),
        ("inspect --json", inspect, [str(engine), "--json"]),
        ("plan", plan, [str(model), "--profile", profile, "--nodes"]),
        ("export", export, [str(engine), "--to", "trtexec", "-o", str(tmp_path / "out")]),
    ):
        shown = CliRunner().invoke(command, arguments)
        json_output = "--json" in arguments and shown.exit_code == 0
        texts[name] = values_of(json.loads(shown.output)) if json_output else shown.output
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            texts[str(path.relative_to(tmp_path))] = path.read_bytes().decode(errors="ignore")
    assert not [name for name, text in texts.items() if names_dla(text)], first(texts)
    assert not any(b"dla" in model.lower() for model in models)


def values_of(value: object) -> str:
    """All values of a document; its keys are the same for every board."""
    if isinstance(value, dict):
        return " ".join(map(values_of, value.values()))
    if isinstance(value, (list, tuple)):
        return " ".join(map(values_of, value))
    return str(value)


def names_dla(text: str) -> bool:
    return "dla" in without_sentences(text).lower()


def without_sentences(text: str) -> str:
    for sentence in NONE_HERE:
        text = text.replace(sentence, "")
    return text


def first(texts: dict[str, str]) -> list[str]:
    shown = {name: without_sentences(text) for name, text in texts.items()}
    return [
        f"{name}: ...{text[max(0, at - 80) : at + 60]!r}"
        for name, text in shown.items()
        if (at := text.lower().find("dla")) >= 0
    ]
