"""Sinks write only what the run made; a release only in its own folder, up to its quota."""

import json
import logging
import os
import shutil
import subprocess
from pathlib import Path

import cv2
import msgspec
import pytest
from board_fixtures import colour_bundle
from click.testing import CliRunner, Result
from sink_fixtures import result
from video_fixtures import LABELS, gray_frame, python_m_pipelines, scene

from device.errors import BundleError, ConfigError, PipelineError
from device.protocol.messages import Failure, decode_message
from device.update.bundle import PIPELINE, extract_bundle
from pipelines.model_config import ONLY
from pipelines.open_models import ModelFiles
from pipelines.sink_config import JsonlSink, SinkConfig, VideoSink
from pipelines.sinks.files import OutputFiles, check_below_folder, folder_bytes, release_folder
from pipelines.sinks.table import SinkContext, open_sink
from pipelines.sinks.video import VideoFileWriter
from toolkit.cli.commands.run import run as run_command
from toolkit.fleet.bundles.create import pack_bundle

NOTES = "what the user wrote\n"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked release; its source is named at each start."""
    folder = tmp_path_factory.mktemp("release")
    bundle = colour_bundle(folder / "in")
    extract_bundle(bundle, folder / "bundle")
    return folder / "bundle"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(6):
        cv2.imwrite(str(folder / f"{i}.png"), scene(i, 0))
    return folder


def tandem_run(release: Path, pictures: Path, *arguments: object) -> Result:
    words = [str(word) for word in (release, "--source", pictures, "--json", *arguments)]
    return CliRunner().invoke(run_command, words)


# --- a person's run


@pytest.mark.parametrize("option", ["--video", "--jsonl"])
def test_run_does_not_touch_a_file_of_the_user(
    release: Path, pictures: Path, tmp_path: Path, option: str
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(NOTES)
    done = tandem_run(release, pictures, option, notes)
    assert done.exit_code != 0
    assert isinstance(done.exception, PipelineError)
    assert f"does not overwrite {notes}" in str(done.exception)
    assert "--overwrite" in str(done.exception)
    assert notes.read_text() == NOTES
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "pictures"]


def test_run_that_may_overwrite_replaces_the_file(
    release: Path, pictures: Path, tmp_path: Path
) -> None:
    lines, video = tmp_path / "seen.jsonl", tmp_path / "seen.mp4"
    for path in (lines, video):
        path.write_text(NOTES)
    done = tandem_run(release, pictures, "--jsonl", lines, "--video", video, "--overwrite")
    assert done.exit_code == 0, done.output
    assert len([json.loads(line) for line in lines.read_text().splitlines()]) == 6
    assert cv2.VideoCapture(str(video)).get(cv2.CAP_PROP_FRAME_COUNT) == 6


def test_a_file_of_the_command_line_replaces_that_of_the_pipeline(
    release: Path, pictures: Path, tmp_path: Path
) -> None:
    configured, given = tmp_path / "own.jsonl", tmp_path / "given.jsonl"
    configured.write_text(NOTES)
    pipeline = tmp_path / "pipeline.toml"
    sink = f'[[sinks]]\nkind = "jsonl"\npath = "{configured}"\nformat = "ros2"\n'
    pipeline.write_text(f"{(release / PIPELINE).read_text()}\n{sink}")
    done = tandem_run(release, pictures, "--pipeline", pipeline, "--jsonl", given)
    assert done.exit_code == 0, done.output
    assert configured.read_text() == NOTES
    lines = [json.loads(line) for line in given.read_text().splitlines()]
    assert len(lines) == 6
    assert "header" in lines[0]  # the format of the sink that it replaces


def test_one_file_for_two_sinks_is_refused(release: Path, pictures: Path, tmp_path: Path) -> None:
    both = tmp_path / "seen.mp4"
    done = tandem_run(release, pictures, "--video", both, "--jsonl", both)
    assert isinstance(done.exception, ConfigError)
    assert f"two [[sinks]] have the file '{both}': give each its own" in str(done.exception)
    assert not both.exists()


def test_video_of_another_suffix_leaves_the_user_files_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(NOTES)
    writer = VideoFileWriter(notes, 10.0, OutputFiles(overwrite=True))
    writer.write(gray_frame(80))
    writer.close()
    assert notes.read_text() == NOTES
    assert writer.path != notes
    assert writer.path.stat().st_size > 0


def test_video_that_would_become_a_file_of_the_user_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "seen.mp4").write_text(NOTES)
    writer = VideoFileWriter(tmp_path / "seen.xyz", 10.0)
    writer.write(gray_frame(80))
    writer.close()
    assert (tmp_path / "seen.mp4").read_text() == NOTES
    assert writer.failed == 1
    assert "does not overwrite" in caplog.text
    assert os.listdir(tmp_path) == ["seen.mp4"]


@pytest.mark.parametrize("sink", [JsonlSink(path="{}"), VideoSink(path="{}.mp4")])
def test_run_that_fails_before_its_first_frame_can_be_repeated(
    tmp_path: Path, sink: SinkConfig
) -> None:
    """The empty file of the first run is gone; `/dev/null`, which no run makes, is not."""
    assert isinstance(sink, JsonlSink | VideoSink)
    config = msgspec.structs.replace(sink, path=sink.path.format(tmp_path / "seen"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), open_sink(config, SinkContext(LABELS)):
            raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    with open_sink(msgspec.structs.replace(sink, path="/dev/null"), SinkContext(LABELS)):
        pass
    assert Path("/dev/null").exists()


def test_link_of_the_user_is_not_written_through(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(NOTES)
    (tmp_path / "seen.jsonl").symlink_to(notes)
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nowhere")
    for name in ("seen.jsonl", "dangling.jsonl"):
        with pytest.raises(PipelineError):
            open_sink(JsonlSink(path=str(tmp_path / name)), SinkContext(LABELS))
    assert notes.read_text() == NOTES
    assert not (tmp_path / "nowhere").exists()


def test_lines_go_to_a_pipe_of_the_user(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(("cat", pipe), stdout=subprocess.PIPE) as reader:
        with open_sink(JsonlSink(path=str(pipe)), SinkContext(LABELS)) as sink:
            sink.write(result(3))
        text, _ = reader.communicate(timeout=60)
    assert json.loads(text)["seq"] == 3
    assert pipe.is_fifo()


@pytest.mark.parametrize("sink", [JsonlSink(path="a\0b"), VideoSink(path="a\0b")])
@pytest.mark.parametrize("folder", [None, Path("data")])
def test_path_with_a_zero_byte_is_refused(sink: SinkConfig, folder: Path | None) -> None:
    with pytest.raises(PipelineError, match="remove the zero byte"):
        open_sink(sink, SinkContext(LABELS, files=OutputFiles(folder)))


# --- a release


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("seen.jsonl", True),
        ("2026/seen.jsonl", True),
        ("..seen", True),
        ("/etc/passwd", False),
        ("../slots.0", False),
        ("a/../../slots.0", False),
        ("..", False),
        ("", False),
        (".", False),
    ],
)
def test_paths_of_a_release_stay_below_its_folder(path: str, inside: bool) -> None:
    if inside:
        check_below_folder(path, "jsonl")
    else:
        with pytest.raises(PipelineError, match="only in its own data folder"):
            check_below_folder(path, "jsonl")


def run_release(release: Path, data: Path, source: Path, sinks: str, *options: object) -> list[str]:
    """Run a release as the agent does; return what it said when it failed."""
    folder = data.parent / "slot"
    shutil.copytree(release, folder, dirs_exist_ok=True)
    with (folder / "pipeline.toml").open("a") as file:
        file.write(sinks)
    process = python_m_pipelines(
        "--bundle", folder, "--profile", "laptop", "--data", data, *options,
        TANDEM_SOURCE=str(source),
    )  # fmt: skip
    out, err = process.communicate(timeout=60)
    messages = [decode_message(line) for line in out.splitlines()]
    assert "Traceback" not in err.decode()
    return [message.message for message in messages if isinstance(message, Failure)]


def test_release_that_writes_elsewhere_fails_its_trial(
    release: Path, pictures: Path, tmp_path: Path
) -> None:
    target = tmp_path / "notes.txt"
    target.write_text(NOTES)
    for path in (target, "../../notes.txt"):
        sinks = f'[[sinks]]\nkind = "jsonl"\npath = "{path}"\n'
        (message,) = run_release(release, tmp_path / "data", pictures, sinks)
        assert "a release writes only in its own data folder" in message
    assert target.read_text() == NOTES


def test_release_without_files_needs_no_folder(
    release: Path, pictures: Path, tmp_path: Path
) -> None:
    """It runs on a full disk, and on one that has become read-only."""
    (tmp_path / "data").write_text("a file where the folder would be")
    assert run_release(release, tmp_path / "data", pictures, "") == []


@pytest.mark.slow
def test_releases_have_folders_of_their_own_and_go_on_after_a_restart(
    release: Path, pictures: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    sinks = (
        '[[sinks]]\nkind = "jsonl"\npath = "seen/all.jsonl"\n'
        '[[sinks]]\nkind = "video"\npath = "seen.mp4"\n'
    )
    for _ in range(2):
        assert run_release(release, data, pictures, sinks) == []
    (folder,) = data.iterdir()
    assert len((folder / "seen" / "all.jsonl").read_text().splitlines()) == 12
    assert sorted(path.name for path in folder.glob("*.mp4")) == ["seen-1.mp4", "seen.mp4"]
    second = f'{sinks}[[sinks]]\nkind = "jsonl"\npath = "more.jsonl"\n'
    assert run_release(release, data, pictures, second) == []
    assert len(list(data.iterdir())) == 2


def test_folders_of_the_last_two_releases_are_kept(tmp_path: Path) -> None:
    for name in ("one", "two", "three", "two", "four"):
        folder = release_folder(tmp_path / "data", name)
        (folder / "seen.jsonl").write_text(name)
        os.utime(folder, ns=(len(name), os.stat(folder).st_mtime_ns))
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["four", "two"]


def test_a_half_written_video_of_an_earlier_start_does_not_fill_the_quota(tmp_path: Path) -> None:
    folder = release_folder(tmp_path, "one")
    (folder / "in").mkdir()
    (folder / "in" / ".seen.mp4.123.part").write_bytes(bytes(5000))
    (folder / "seen.part").write_bytes(bytes(10))  # a name of the release's own
    assert folder_bytes(release_folder(tmp_path, "one")) == 10


@pytest.mark.parametrize(
    ("sink", "quota"),
    [(JsonlSink(path="seen.jsonl"), 20_000), (VideoSink(path="seen.mp4"), 200_000)],
)
def test_sinks_stop_at_the_quota_and_say_so_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sink: SinkConfig,
    quota: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipelines.sinks.files.COUNT_S", 0.0)
    caplog.set_level(logging.ERROR)
    files = OutputFiles(tmp_path, quota_bytes=quota)
    with open_sink(sink, SinkContext(LABELS, files=files)) as opened:
        for seq in range(400):
            opened.write(result(seq, noise(seq)))
            if sum(opened.dropped.values()) > 10:
                break
        (cause,) = opened.dropped
        assert cause in ("jsonl_quota", "video_quota")
    assert caplog.text.count("raise data_mb in agent.toml") == 1
    used = folder_bytes(tmp_path)
    # The file grows by 256 KiB, and the encoder still holds some frames when it is told to end.
    assert 0.5 * quota < used <= (quota if cause == "jsonl_quota" else 2 * quota)
    if isinstance(sink, VideoSink):
        video = cv2.VideoCapture(str(tmp_path / "seen.mp4"))
        assert video.get(cv2.CAP_PROP_FRAME_COUNT) > 0  # it was finished, not cut off


def noise(seed: int) -> "cv2.typing.MatLike":
    import numpy as np

    return np.random.default_rng(seed).integers(0, 255, (60, 80, 3), np.uint8)


def test_bundle_whose_sinks_write_elsewhere_is_not_packed(release: Path, tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline.toml"
    text = (release / "pipeline.toml").read_text()
    pipeline.write_text(f'{text}[[sinks]]\nkind = "video"\npath = "/home/me/seen.mp4"\n')
    with pytest.raises(BundleError, match="only in its own data folder on the board"):
        pack_bundle(
            tmp_path / "out.bundle",
            pipeline=pipeline,
            files={ONLY: ModelFiles(release / "model.engine", release / "labels.txt")},
            name="n",
            version="1",
        )
    assert not (tmp_path / "out.bundle").exists()
