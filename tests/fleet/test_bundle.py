"""Bundles: deterministic, readable by any tar, and safe to unpack whatever they hold."""

import hashlib
import os
import re
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
from bundle_fixtures import HEADS, engine_of
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mqtt_fixtures import make_bundle

from device.engine.manifest import TensorInfo
from device.errors import BundleError, PipelineError
from device.update.bundle import (
    ENGINE,
    INFO,
    LABELS,
    PIPELINE,
    REQUIRED,
    BundleInfo,
    check_bundle,
    extract_bundle,
    hash_folder,
    read_bundle_info,
    verify_folder,
    write_bundle,
)
from pipelines.config import PreprocessConfig
from pipelines.decode_config import Classification, DecodeConfig
from pipelines.stages.decoder_check import check_outputs
from pipelines.stages.decoders.table import DECODERS
from toolkit.cli.commands.bundle import bundle as bundle_command


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle"), engine_bytes=3000)


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    first = make_bundle(tmp_path / "a")
    os.utime(tmp_path / "a" / "e", (1, 1))
    second = make_bundle(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_the_bytes_are_those_that_were_agreed(good: Path) -> None:
    # A golden value: bundles of one version must not change with Python or the platform.
    digest = hashlib.sha256(good.read_bytes()).hexdigest()
    assert digest == "48d664595155fb0ac27622f3d7ed76ec8ac15ef41b507c07ead21ec4470142eb"


def test_any_tar_can_list_it(good: Path) -> None:
    with tarfile.open(good, "r:") as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == [INFO, ENGINE, PIPELINE, LABELS]
        assert {(m.mode, m.uid, m.gid, m.mtime, m.isreg()) for m in members} == {
            (0o644, 0, 0, 0, True)
        }
        labels = tar.extractfile(LABELS)
        assert labels is not None
        assert labels.read() == b"person\n"


def test_what_goes_in_comes_out(good: Path, tmp_path: Path) -> None:
    info = extract_bundle(good, tmp_path / "out")
    assert info == read_bundle_info(good) == verify_folder(tmp_path / "out")
    assert (info.name, info.version, info.profile) == ("good", "1", "test-board")
    assert (tmp_path / "out" / ENGINE).read_bytes() == (good.parent / "e").read_bytes()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([INFO, *REQUIRED])
    whole = good.read_bytes()
    sha256 = hashlib.sha256(whole).hexdigest()
    assert hash_folder(tmp_path / "out") == (info, sha256, len(whole))
    checked, offset = check_bundle(good)
    assert checked == info
    assert whole[offset:].startswith((good.parent / "e").read_bytes())


def test_a_failed_write_leaves_the_old_bundle_and_no_rubbish(tmp_path: Path) -> None:
    old = make_bundle(tmp_path)
    before = old.read_bytes()
    with pytest.raises(BundleError, match="cannot write"):
        write_bundle(
            old,
            engine=tmp_path / "missing",
            pipeline=tmp_path / "p",
            labels=tmp_path / "l",
            name="n",
            version="1",
            profile="p",
        )
    assert old.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_every_truncation_is_refused(good: Path, tmp_path: Path) -> None:
    whole = good.read_bytes()
    cut = tmp_path / "cut"
    for length in range(0, len(whole), 211):
        cut.write_bytes(whole[:length])
        with pytest.raises(BundleError):
            read_bundle_info(cut)
        with pytest.raises(BundleError):
            extract_bundle(cut, tmp_path / f"out{length}")


def test_bytes_after_the_end_are_refused(good: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    longer.write_bytes(good.read_bytes() + bytes(512))
    with pytest.raises(BundleError, match="cut off or damaged"):
        read_bundle_info(longer)


def test_every_changed_byte_after_bundle_json_is_refused(good: Path, tmp_path: Path) -> None:
    """Headers, members and fillings: flipping any byte is noticed when unpacking."""
    whole = bytearray(good.read_bytes())
    changed = tmp_path / "changed"
    for place in range(1024, len(whole), 67):
        whole[place] ^= 0x20
        changed.write_bytes(whole)
        with pytest.raises(BundleError):
            extract_bundle(changed, tmp_path / f"out{place}")
        with pytest.raises(BundleError):
            check_bundle(changed)
        whole[place] ^= 0x20


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "model.engine\0x", "bundle.json"])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_foreign_members_are_refused(good: Path, tmp_path: Path, name: str, kind: bytes) -> None:
    whole = bytearray(good.read_bytes())
    entry = tarfile.TarInfo(name.replace("\0", ""))
    entry.type, entry.size, entry.linkname = kind, 3000, "/etc/passwd"
    second = 1024  # after the header and the block of bundle.json
    assert whole[second : second + len(ENGINE)] == ENGINE.encode()
    whole[second : second + 512] = entry.tobuf(tarfile.USTAR_FORMAT)
    hostile = tmp_path / "hostile"
    hostile.write_bytes(whole)
    with pytest.raises(BundleError, match=r"header of model\.engine"):
        extract_bundle(hostile, tmp_path / "inside" / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hostile", "inside"]


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_mutated_bundles_raise_nothing_but_bundle_errors(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, min(len(whole), 2600)))
        length = data.draw(st.integers(0, 600))
        whole[start : start + length] = data.draw(st.binary(max_size=600))
    folder = tmp_path_factory.mktemp("fuzz")
    path = folder / "mutated"
    path.write_bytes(whole)
    try:
        info = extract_bundle(path, folder / "out")
    except BundleError:
        with pytest.raises(BundleError):
            check_bundle(path)
        return
    # What is left to change: the words in bundle.json (the hash of the whole file covers them).
    assert info.files == read_bundle_info(good).files
    assert verify_folder(folder / "out") == info == check_bundle(path)[0]


def test_a_changed_file_in_a_slot_is_named(good: Path, tmp_path: Path) -> None:
    extract_bundle(good, tmp_path / "out")
    (tmp_path / "out" / LABELS).write_text("cat\n")
    with pytest.raises(BundleError, match=r"labels\.txt is not the file that bundle\.json names"):
        verify_folder(tmp_path / "out")


def test_a_missing_bundle_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"cannot read .*nowhere: No such file"):
        read_bundle_info(tmp_path / "nowhere")


def test_the_command_shows_an_example() -> None:
    result = CliRunner().invoke(bundle_command, ["--help"])
    assert result.exit_code == 0
    assert "Examples: tandem bundle" in result.output


GRID = 'kind = "ltrb_grid"\nboxes = "{}"\nscores = "{}"\nstrides = [8, 16, 32]'
CLASSES = 'kind = "classification"\nscores = "{}"'


def pack(folder: Path, engine: Path, decode: str, labels: int, size: int = 64) -> Result:
    """Run `tandem bundle` with a pipeline of this [decode] table, and so many labels."""
    pipeline, names = folder / "pipeline.toml", folder / "labels.txt"
    pipeline.write_text(
        'name = "p"\n[source]\nuri = "v4l2:///dev/video0"\n'
        f"[preprocess]\nwidth = {size}\nheight = {size}\n[decode]\n{decode}\n"
    )
    names.write_text("".join(f"class {n}\n" for n in range(labels)))
    arguments = [str(engine), "--pipeline", str(pipeline), "--labels", str(names)]
    return CliRunner().invoke(bundle_command, [*arguments, "-o", str(folder / "out.bundle")])


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_of(tmp_path_factory.mktemp("heads"), HEADS)


@pytest.mark.parametrize("decode", [GRID.format("boxes", "scores"), CLASSES.format("classes")])
def test_files_that_fit_are_packed(heads: Path, tmp_path: Path, decode: str) -> None:
    result = pack(tmp_path, heads, decode, labels=3)
    assert result.exit_code == 0, result.output
    assert verify_folder_of(tmp_path / "out.bundle", tmp_path).profile == "laptop"


def verify_folder_of(bundle: Path, folder: Path) -> BundleInfo:
    extract_bundle(bundle, folder / "out")
    return verify_folder(folder / "out")


YOLOV8 = {"output0": [1, 84, 8400]}
SEGMENTATION = {"out": [1, 21, 64, 64]}


@pytest.mark.parametrize(
    ("outputs", "decode", "labels", "size", "message"),
    [
        (
            HEADS,
            GRID.format("boxes", "scores"),
            4,
            64,
            r"the engine knows 3 classes but labels.txt names 4",
        ),
        (HEADS, CLASSES.format("classes"), 2, 64, r"knows 3 classes but labels.txt names 2"),
        (
            HEADS,
            GRID.format("boxs", "scores"),
            3,
            64,
            r"boxes = 'boxs', which is no output .* use one of boxes, ",
        ),
        (HEADS, CLASSES.format("classes"), 3, 96, r"input 'images' is float32 \[1, 3, 64, 64\]"),
        (
            YOLOV8,
            GRID.format("output0", "output0"),
            80,
            640,
            r"'ltrb_grid' takes boxes \[1, 4, 8400\] \(rank 3, .*'output0' float32 \[1, 84, 8400\] "
            r"\(rank 3\)",
        ),
        (
            YOLOV8,
            CLASSES.format("output0"),
            84,
            640,
            r"takes scores \[1, classes\] \(rank 2, .*\[1, 84, 8400\] \(rank 3\).*"
            r"Decoders for such shapes, with other labels than these 84: .*`tandem model guess`",
        ),
        (
            SEGMENTATION,
            CLASSES.format("out"),
            21,
            64,
            r"'out' float32 \[1, 21, 64, 64\] \(rank 4\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    heads: Path,
    tmp_path: Path,
    outputs: dict[str, list[int]],
    decode: str,
    labels: int,
    size: int,
    message: str,
) -> None:
    input_size = 640 if outputs is YOLOV8 else 64
    engine = heads if outputs is HEADS else engine_of(tmp_path, outputs, input_size)
    result = pack(tmp_path, engine, decode, labels, size)
    assert isinstance(result.exception, BundleError), result.output
    assert re.search(message, str(result.exception)), result.exception
    assert str(engine) in str(result.exception)
    assert not list(tmp_path.glob("*.bundle"))


def test_a_dynamic_size_is_held_against_its_range(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, {"classes": [1, 3]}, size="side")
    assert pack(tmp_path, engine, CLASSES.format("classes"), 3, size=96).exit_code == 0
    (tmp_path / "out.bundle").unlink()
    beyond = pack(tmp_path, engine, CLASSES.format("classes"), 3, size=97)
    assert "takes 32 to 96 for 'side' where [preprocess] gives 97" in str(beyond.exception)
    assert not (tmp_path / "out.bundle").exists()


@pytest.mark.parametrize(
    ("dtype", "shape", "fits"),
    [
        ("float32", (1, 3), True),
        ("float16", (1, 3), True),
        ("int64", (1, 3), False),
        ("float32", ("batch", 3), True),
        ("float32", (1, None), True),
        ("float32", (2, 3), False),
        ("float32", (3,), False),
        ("float32", (1, 3, 1, 1), True),
        ("float32", (1, 3, 1, 2), False),
    ],
)
def test_scores_of_a_classification(
    dtype: str, shape: tuple[int | str | None, ...], fits: bool
) -> None:
    size = PreprocessConfig(width=64, height=64)
    outputs = [TensorInfo(name="p", dtype=dtype, shape=shape)]
    with nullcontext() if fits else pytest.raises(PipelineError, match="takes scores"):
        check_outputs(Classification(scores="p"), size, outputs, ("a", "b", "c"))


def test_every_decoder_is_a_row() -> None:
    assert set(DECODERS) == set(get_args(DecodeConfig))
    assert len({row.kind for row in DECODERS.values()}) == len(DECODERS)
