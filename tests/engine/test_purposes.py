"""What an engine's bytes are for; a bundle leaves behind what its board does not need."""

import json
from pathlib import Path

import cuda_double
import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import classification_of_convnet, small_convnet

from device.engine.file import open_engine
from device.engine.purposes import bytes_by_purpose, entries_read, without_portable
from device.errors import SessionError
from device.session import open_session
from device.update.bundle import extract_bundle
from toolkit.cli.commands.bundle import bundle
from toolkit.cli.commands.inspect import inspect
from toolkit.engine.build import BuildOptions, build_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network in FP16 with kernels for a board's GPU, and its portable form in FP32."""
    folder = tmp_path_factory.mktemp("engine")
    model = small_convnet(folder / "m.onnx", np.random.default_rng(3))
    with cuda_double.interpreted_cubins():  # nobody runs them
        build_engine(model, "orin-nano-8gb", folder / "m.engine", BuildOptions(precision="fp16"))
    return folder / "m.engine"


def pack(engine: Path, folder: Path, *options: str) -> tuple[Path, str]:
    pipeline = classification_of_convnet(folder)
    command = [str(engine), "--pipeline", str(pipeline), "--labels", str(folder / "labels.txt")]
    shown = CliRunner().invoke(bundle, [*command, "-o", str(folder / "b"), *options])
    assert shown.exit_code == 0, shown.output
    extract_bundle(folder / "b", folder / "out")
    return folder / "out" / "model.engine", shown.output


def test_every_byte_of_the_entries_has_a_purpose(engine: Path) -> None:
    with open_engine(engine) as opened:
        purposes = bytes_by_purpose(opened.manifest, opened.entries)
        total = sum(entry.stop - entry.start for entry in opened.entries.values())
        assert set(entries_read(opened.manifest)) == set(opened.entries)
    assert sum(purposes.values()) == total
    assert all(purposes[name] > 0 for name in ("GPU kernels", "weights of GPU kernels"))


def test_inspect_shows_bytes_by_purpose(engine: Path) -> None:
    text = CliRunner().invoke(inspect, [str(engine)]).output
    assert "MB: " in text
    assert "weights of GPU kernels" in text
    values = json.loads(CliRunner().invoke(inspect, [str(engine), "--json"]).output)
    with open_engine(engine) as opened:
        assert values["bytes"] == bytes_by_purpose(opened.manifest, opened.entries)


def test_a_bundle_leaves_the_portable_form_of_gpu_segments_behind(
    engine: Path, tmp_path: Path
) -> None:
    packed, text = pack(engine, tmp_path)
    assert "left out the GPU segments' form for any CPU" in text
    with open_engine(packed) as slim, open_engine(engine) as whole:
        assert slim.manifest == without_portable(whole.manifest)
        for name in slim.entries:
            assert np.array_equal(slim.entry(name), whole.entry(name))
        assert set(slim.entries) < set(whole.entries)
    assert packed.stat().st_size < engine.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "b", "labels.txt", "out", "pipeline.toml",
    ]  # fmt: skip


def test_the_same_engine_gives_the_same_slim_bundle(engine: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        pack(engine, tmp_path / name)
    assert (tmp_path / "first/b").read_bytes() == (tmp_path / "second/b").read_bytes()


def test_an_option_keeps_the_portable_form(engine: Path, tmp_path: Path) -> None:
    packed, text = pack(engine, tmp_path, "--portable")
    assert "left out" not in text
    assert packed.read_bytes() == engine.read_bytes()


def test_an_engine_for_a_cpu_stays_whole(tmp_path: Path, rng: np.random.Generator) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    build_engine(model, "laptop", tmp_path / "m.engine")
    (tmp_path / "pack").mkdir()
    packed, _ = pack(tmp_path / "m.engine", tmp_path / "pack")
    assert packed.read_bytes() == (tmp_path / "m.engine").read_bytes()


def test_elsewhere_a_slim_engine_says_what_it_lacks(engine: Path, tmp_path: Path) -> None:
    packed, _ = pack(engine, tmp_path)
    with pytest.raises(
        SessionError, match=r"cuda: .*no portable form, .*`tandem bundle --portable`"
    ):
        open_session(packed)
