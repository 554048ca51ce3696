"""A build that was done before is taken from the cache, and only where nothing has changed."""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet

import configs
from toolkit.cache import KINDS, entries, entry_path, key_of, read_entry, write_entry
from toolkit.cli.actions import cached_build
from toolkit.cli.actions.cached_build import Built
from toolkit.cli.command import parsed
from toolkit.cli.commands.build import Build as BuildOptions
from toolkit.cli.main import tandem as command_line
from toolkit.quantize.ranges import shards

Build = Callable[..., str]


@pytest.fixture
def build(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds m.onnx with samples; returns what is printed, "was built before" if it was."""
    monkeypatch.delenv("TANDEM_REBUILD")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("toolkit.gpu.segments.has_compiler", lambda: False)
    monkeypatch.chdir(tmp_path)
    small_convnet(tmp_path / "m.onnx", rng)
    np.save(tmp_path / "d.npy", rng.normal(size=(8, 3, 32, 32)).astype(np.float32))

    def run(*words: str, data: bool = True) -> str:
        samples = ["--data", "d.npy", "--method", "minmax"] if data else []
        words = ("-v", "build", "m.onnx", *samples, "--accept-loss" if data else "-v", *words)
        done = CliRunner().invoke(command_line, words)
        assert done.exit_code == 0, done.output
        return done.output

    return run


def test_a_second_build_is_the_first_one(build: Build, tmp_path: Path) -> None:
    first = build("-o", "a.engine", "--save-table", "a.json")
    second = build("-o", "b.engine", "--save-table", "b.json")
    assert "was built before" not in first
    assert "b.engine was built before" in second
    assert (tmp_path / "a.engine").read_bytes() == (tmp_path / "b.engine").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    report = re.compile(r"^(?!INFO|engine: ).+$", re.M)
    assert report.findall(first) == report.findall(second)
    assert "engine: b.engine (from the cache, " in second
    assert "from the cache" not in first
    assert '"engine": "c.engine"' in build("-o", "c.engine", "--json")


@pytest.mark.parametrize("option", ["-o", "--save-table"])
@pytest.mark.parametrize("built_before", [False, True])
def test_no_file_of_a_build_takes_the_place_of_its_model(
    build: Build, tmp_path: Path, option: str, built_before: bool
) -> None:
    if built_before:
        build("-o", "a.engine", "--save-table", "a.json")
    model = (tmp_path / "m.onnx").read_bytes()
    words = ["build", "m.onnx", "--data", "d.npy", "--method", "minmax", "--accept-loss"]
    done = CliRunner().invoke(command_line, [*words, option, "m.onnx"])
    assert "m.onnx is the model itself; write to another file" in str(done.exception)
    assert (tmp_path / "m.onnx").read_bytes() == model


@pytest.mark.parametrize("option", ["-o", "--cache", "--html"])
def test_no_file_of_a_calibration_takes_the_place_of_its_model(
    build: Build, tmp_path: Path, option: str
) -> None:
    model = (tmp_path / "m.onnx").read_bytes()
    words = ["calibrate", "m.onnx", "--data", "d.npy", option, "m.onnx"]
    done = CliRunner().invoke(command_line, words)
    assert "m.onnx is the model itself" in str(done.exception)
    assert (tmp_path / "m.onnx").read_bytes() == model


def test_the_cache_keeps_to_its_limit(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    assert list((tmp_path / "cache/engines").rglob("*/*"))
    monkeypatch.setattr(cached_build, "MAX_CACHE_BYTES", 0)
    build("--samples", "7")
    assert not list((tmp_path / "cache/engines").rglob("*/*"))


def change_model(folder: Path) -> None:
    small_convnet(folder / "m.onnx", np.random.default_rng(7))


def change_data(folder: Path) -> None:
    np.save(folder / "d.npy", np.load(folder / "d.npy") + np.float32(0.5))


@pytest.mark.parametrize("change", [change_model, change_data])
def test_what_has_changed_is_built_again(
    build: Build, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    build()
    change(tmp_path)
    assert "was built before" not in build()


def test_other_options_and_versions_are_built_again(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    assert "was built before" in build()
    assert "was built before" not in build("--samples", "7")
    assert "was built before" not in build("--profile", "orin-nano-8gb")
    assert "was built before" not in build("--precision", "fp32", data=False)
    monkeypatch.setattr(cached_build, "code_version", lambda: "2")
    assert "was built before" not in build()


def flip(path: Path, chance: random.Random) -> None:
    """Change one byte of a file, at random."""
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= chance.randrange(1, 256)
    path.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_of_an_entry_is_found_wherever_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    chance, key = random.Random(kind), key_of(kind)
    content, path = chance.randbytes(200), entry_path(kind, key)
    cuts = (lambda data: b"", lambda data: data[:-1], lambda data: data + b"\0")
    for number in range(120):
        assert write_entry(kind, key, content)
        if number < len(cuts):
            path.write_bytes(cuts[number](path.read_bytes()))
        else:
            flip(path, chance)
        caplog.clear()
        assert read_entry(kind, key) is None
        assert f"{path} of the cache is damaged and is made again" in caplog.text
        assert not path.exists()


def test_damaged_shards_and_engines_are_said_and_the_same_engine_is_built_again(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MIN_SAMPLES", 4)
    np.save(tmp_path / "d.npy", np.load(tmp_path / "d.npy").repeat(5, axis=0))
    chance = random.Random(1)
    words = ("--workers", "1", "--save-table", "t.json", "-o")
    build(*words, "a.engine")
    table = (tmp_path / "t.json").read_bytes()
    damaged = list(entries())
    assert {entry.kind for entry in damaged} == set(KINDS) - {"kernels"}  # no compiler here
    for entry in damaged:
        flip(entry.path, chance)
    assert "was built before" not in build(*words, "b.engine")
    read = [entry for entry in damaged if entry.kind != "graphs"]  # these are written anew
    assert all(f"{entry.path} of the cache is damaged" in caplog.text for entry in read)
    assert (tmp_path / "a.engine").read_bytes() == (tmp_path / "b.engine").read_bytes()
    assert (tmp_path / "t.json").read_bytes() == table
    assert "was built before" in build(*words, "c.engine")
    assert {entry.path for entry in entries()} == {entry.path for entry in damaged}


def test_options_that_contradict_each_other_are_refused_also_if_it_was_built(build: Build) -> None:
    build("--precision", "fp32", data=False)
    words = ["build", "m.onnx", "--precision", "fp32", "--method", "auto"]
    done = CliRunner().invoke(command_line, words)
    assert done.exit_code == 2
    assert "--method belongs to calibration" in done.output


@pytest.mark.parametrize(
    "option",
    [
        "--save-table t.json",
        "--budget margin:0.3",
        "--keep auto",
        "--equalise on",
        "--round-weights on",
        "--bias-correction on",
        "--keep-float relu",
        "--method minmax",
    ],
)
def test_int4_weights_have_no_use_for_options_of_ranges(option: str) -> None:
    given = option.split()
    words = ["build", "m.onnx", "--int4-weights", "32", "--data", "d", *given]
    done = CliRunner().invoke(command_line, words)
    assert done.exit_code == 2
    assert f"{given[0]} is about the ranges of INT8" in done.output


@pytest.mark.parametrize("option", ["html", "external data"])
def test_builds_that_the_key_does_not_cover_are_done_anew(
    build: Build, tmp_path: Path, option: str
) -> None:
    import onnx

    words = ("--html", "page.html") if option == "html" else ()
    if option == "external data":
        model = onnx.load(tmp_path / "m.onnx")
        onnx.save(
            model, tmp_path / "m.onnx", save_as_external_data=True, location="w", size_threshold=0
        )
    for _ in range(2):
        assert "was built before" not in build(*words)


def key(folder: Path, *words: str) -> str | None:
    with parsed(BuildOptions, [str(folder / "m.onnx"), *words]) as options:
        return cached_build.build_key(options)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("name", ["e.ONNX", "e.pb"])
def test_weights_outside_a_model_or_table_of_any_name_have_no_key(
    tmp_path: Path, name: str
) -> None:
    import onnx

    onnx.save(
        onnx.load(tmp_path / "m.onnx"), tmp_path / name,
        save_as_external_data=True, location="w", size_threshold=0,
    )  # fmt: skip
    assert key(tmp_path) is not None
    assert key(tmp_path, "--table", str(tmp_path / name)) is None
    with parsed(BuildOptions, [str(tmp_path / name)]) as options:
        assert cached_build.build_key(options) is None


@pytest.mark.usefixtures("build")
def test_files_named_without_a_suffix_are_read(tmp_path: Path) -> None:
    profile = tmp_path / "mine"
    shipped = (configs.ROOT / "profiles" / "laptop.toml").read_text()
    keys = set()
    for comment in "ab":
        profile.write_text(f"{shipped}# {comment}\n")
        keys.add(key(tmp_path, "--profile", str(profile)))
    assert len(keys) == 2
    words = ("--data", str(tmp_path / "d.npy"), "--preprocess")
    assert key(tmp_path, *words, "imagenet") is not None
    assert key(tmp_path, *words, str(profile)) is None


@pytest.mark.usefixtures("build")
def test_what_exports_a_model_is_part_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    monkeypatch.setenv("TANDEM_TENSORFLOW_PYTHON", str(python))
    keys = set()
    for name, version in (("m.pt2", "2.1"), ("m.pt2", "2.2"), ("m.keras", "1"), ("m.keras", "2")):
        (tmp_path / name).write_bytes(b"model")
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)
        monkeypatch.setattr(cached_build, "package_version", lambda _, version=version: version)
        monkeypatch.setattr(cached_build, "BUILDING", ())
        with parsed(BuildOptions, [str(tmp_path / name)]) as options:
            keys.add(cached_build.build_key(options))
    assert len(keys - {None}) == 4


@pytest.mark.usefixtures("build")
def test_another_cv2_calibrates_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--data", str(tmp_path / "d.npy"))
    first = key(tmp_path, *words)
    monkeypatch.setattr("pipelines.vision.cv2.getBuildInformation", lambda: "another")
    assert key(tmp_path, *words) != first


def test_a_model_that_changes_while_it_is_built_is_not_kept(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.cli.actions import build as build_action

    real = build_action.build_now

    def build_and_change(*arguments: Any) -> Built:
        built = real(*arguments)
        change_model(tmp_path)
        return built

    monkeypatch.setattr(build_action, "build_now", build_and_change)
    build("--precision", "fp32", data=False)
    assert not list((tmp_path / "cache/engines").rglob("*/*"))


@pytest.mark.usefixtures("build")
def test_of_a_folder_the_files_that_are_sampled_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.png").write_bytes(b"%d" % number)
    (folder / ".0.png").write_bytes(b"hidden")
    reads: list[str] = []
    real = cached_build.model_sha256

    def counted(path: Path) -> str:
        reads.append(path.name)
        return real(path)

    monkeypatch.setattr(cached_build, "model_sha256", counted)
    words = ("--data", str(folder), "--samples", "2")
    first = key(tmp_path, *words)
    assert [name for name in reads if name.endswith("png")] == ["0.png", "4.png"]
    (folder / "m.engine").write_bytes(b"an output in the same folder")
    assert key(tmp_path, *words) == first
    for name in ("4.png", "5.png"):
        before = key(tmp_path, *words)
        (folder / name).write_bytes(b"another")
        assert key(tmp_path, *words) != before


@pytest.mark.usefixtures("build")
def test_data_that_are_not_there_are_called_data() -> None:
    done = CliRunner().invoke(command_line, ["build", "m.onnx", "--data", "nodata"])
    assert "nodata: no such calibration data" in str(done.exception)


@pytest.mark.usefixtures("build")
def test_another_checkout_has_the_same_keys(tmp_path: Path) -> None:
    shutil.copy(configs.ROOT / "profiles" / "laptop.toml", tmp_path / "mine.toml")
    (tmp_path / "data").mkdir()
    shutil.move(tmp_path / "d.npy", tmp_path / "data")
    second = tmp_path / "other"
    shutil.copytree(tmp_path, second)
    keys = {
        key(at, "--data", str(at / "data"), "--profile", str(at / "mine.toml"))
        for at in (tmp_path, second)
    }
    assert len(keys) == 1
