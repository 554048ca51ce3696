"""camera.cpp, the example of libtandem, finds and follows what the Python pipeline does.

The camera is a double of the driver (v4l2_double.c), the video on standard input a real one.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import pytest
from docs_fixtures import ROOT
from engine_fixtures import single_network, write_network
from native_fixtures import NATIVE, compiled
from video_fixtures import require_program

import configs
from device.runtime.session import open_session
from pipelines.config import PreprocessConfig, load_pipeline
from pipelines.decode_config import LtrbGrid
from pipelines.results import Detections
from pipelines.stages.decode import decode
from pipelines.stages.preprocess import Preprocessor
from pipelines.stages.track import Tracker
from pipelines.stages.view import view_of
from pipelines.track_config import TrackerConfig
from toolkit.engine.build import BuildOptions, build_engine

FRAMES = 10
Command = Callable[..., list[str]]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Compile the example and build the shipped detector; return the words that run it."""
    folder = tmp_path_factory.mktemp("camera")
    library, program = compiled(tmp_path_factory).path, folder / "camera"
    words = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}/include"]
    words += [f"{NATIVE}/examples/camera.cpp", str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run([*words, "-o", str(program)], check=True)
    model = configs.ROOT / "models/robot-objects.onnx"
    build_engine(model, "laptop", folder / "e", BuildOptions(precision="fp32"))
    runtime = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))

    def command_of(source: str, width: int, height: int) -> list[str]:
        return [str(program), f"{folder}/e", source, str(width), str(height), str(runtime)]

    return command_of


def encoded_and_decoded(width: int, height: int) -> bytes:
    """H.264 of a camera that moves down a scene, as frames of NV12."""
    picture = cv2.imread(str(configs.ROOT / "scenes/heldout/000.jpg"))
    assert picture is not None
    picture = cv2.resize(picture, (width, width))
    frames = [picture[4 * i : 4 * i + height] for i in range(FRAMES)]
    ffmpeg, size = [require_program("ffmpeg"), "-v", "error"], ("-s", f"{width}x{height}")
    raw = ("-f", "rawvideo", "-pix_fmt")
    encoder = [*ffmpeg, *raw, "bgr24", *size, "-r", "30", "-i", "-"]
    encoder += ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-f", "h264", "-"]
    video = subprocess.run(
        encoder, input=b"".join(map(bytes, frames)), capture_output=True, check=True
    ).stdout
    decoder = [*ffmpeg, "-i", "-", *raw, "nv12", "-"]
    return subprocess.run(decoder, input=video, capture_output=True, check=True).stdout


def of_python(
    engine: str, pictures: np.ndarray, times_s: list[float]
) -> list[list[dict[str, Any]]]:
    """The objects of NV12 pictures [frames, rows, width] by the shipped pipeline's stages."""
    config = load_pipeline(configs.ROOT / "pipelines/robot-objects.toml")
    assert isinstance(config.preprocess, PreprocessConfig)
    assert isinstance(config.decode, LtrbGrid)
    preprocessor, tracker = Preprocessor(config.preprocess), Tracker(TrackerConfig())
    rows = []
    with open_session(Path(engine), threads=1) as session:
        for nv12, time_s in zip(pictures, times_s, strict=True):
            image = cv2.cvtColor(nv12, cv2.COLOR_YUV2BGR_NV12)
            blob, geometry = preprocessor.run(image)
            view = view_of(geometry, image.shape, config.preprocess)
            objects = decode(session.infer({"images": blob}), config.decode, view)
            assert isinstance(objects, Detections)
            objects = tracker.update(objects, time_s)
            assert objects.track_ids is not None
            columns = (objects.track_ids, objects.class_ids, objects.scores, objects.boxes)
            names = ("track", "class", "score", "box")
            values = zip(*(column.tolist() for column in columns), strict=True)
            rows.append([dict(zip(names, row, strict=True)) for row in values])
    return rows


def assert_same(
    lines: str, expected: list[list[dict[str, Any]]], pixels: float, score: float = 1e-4
) -> None:
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [row["frame"] for row in rows] == list(range(len(expected)))
    assert sum(map(len, expected)) >= len(expected)  # there is something to compare
    assert any(one["track"] > 0 for one in expected[-1])
    for row, objects in zip(rows, expected, strict=True):
        for name in ("track", "class"):
            assert [one[name] for one in row["objects"]] == [one[name] for one in objects]
        for name, limit in (("score", score), ("box", pixels)):
            ours, theirs = ([one[name] for one in them] for them in (row["objects"], objects))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit)


def test_a_video_on_standard_input_has_the_objects_of_the_python_pipeline(
    command: Command,
) -> None:
    video, words = encoded_and_decoded(320, 240), command("-", 320, 240)
    done = subprocess.run(words, input=video, capture_output=True, check=True)
    pictures = np.frombuffer(video, np.uint8).reshape(FRAMES, 360, 320)
    expected = of_python(words[1], pictures, [index / 30 for index in range(FRAMES)])
    assert_same(done.stdout.decode(), expected, pixels=2e-3)


def test_frames_larger_than_the_input_are_made_smaller(command: Command) -> None:
    """Means of NV12, where the Python pipeline resizes blue, green and red."""
    video, words = encoded_and_decoded(640, 480), command("-", 640, 480)
    done = subprocess.run(words, input=video, capture_output=True, check=True)
    pictures = np.frombuffer(video, np.uint8).reshape(FRAMES, 720, 640)
    expected = of_python(words[1], pictures, [index / 30 for index in range(FRAMES)])
    assert_same(done.stdout.decode(), expected, pixels=4.0, score=0.05)


def yuyv_of(nv12: np.ndarray) -> np.ndarray:
    """YUYV whose chroma is the same in both rows that share a row of NV12."""
    height, width = len(nv12) // 3 * 2, nv12.shape[1]
    yuyv = np.empty((height, width, 2), np.uint8)
    yuyv[..., 0] = nv12[:height]
    yuyv[..., 1] = nv12[height:].repeat(2, axis=0)
    return yuyv.reshape(height, 2 * width)


@pytest.mark.parametrize("fourcc", ["NV12", "YUYV"])
def test_a_double_of_a_camera_gives_the_same_objects(
    command: Command, tmp_path: Path, fourcc: str
) -> None:
    """The driver has rows longer than the picture, a size of its own, and a damaged frame."""
    video = encoded_and_decoded(320, 240)
    pictures = np.frombuffer(video, np.uint8).reshape(FRAMES, 360, 320)
    frames = pictures if fourcc == "NV12" else np.stack([yuyv_of(one) for one in pictures])
    frames = np.pad(frames, ((0, 0), (0, 0), (0, 64)))
    length = -(-frames[0].size // 65536) * 65536  # whole pages of any size
    camera, double = tmp_path / "camera", tmp_path / "v4l2.so"
    camera.write_bytes(b"".join(one.tobytes().ljust(length, b"\0") for one in frames))
    source = ROOT / "tests/fixtures/v4l2_double.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", source, "-o", double], check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(double),
        "V4L2_DOUBLE": f"{fourcc} 320 240 {frames.shape[2]} {length} {FRAMES}",
    }
    words = command(str(camera), 1280, 720)
    done = subprocess.run(words, env=environment, capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")  # it ends at SIGINT
    times_s = [5 + index * 0.033333 for index in range(FRAMES) if index != 1]
    expected = of_python(words[1], np.delete(pictures, 1, axis=0), times_s)
    assert_same(done.stdout.decode(), expected, pixels=2e-3)


def test_an_engine_of_other_outputs_is_refused(command: Command, tmp_path: Path) -> None:
    engine = write_network(tmp_path / "e", single_network())
    words = command("-", 320, 240)
    words[1] = str(engine)
    done = subprocess.run(words, input=bytes(320 * 360), capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"camera: {engine} has not one input, distances and")


def test_it_ends_at_an_interrupt_between_frames(command: Command) -> None:
    words = command("-", 320, 240)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(bytes(320 * 360))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["objects"] == []
        while process.poll() is None:  # one that comes just before it reads waits for the next
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("source", "size", "sent", "says"),
    [
        ("-", (320, 240), b"12", "ended within a frame: give the WIDTH and HEIGHT"),
        ("-", (4000, 2), bytes(12000), "a picture of 4000x2 pixels leaves none in "),
        ("-", (321, 240), b"", "usage: camera ENGINE /dev/video0|- WIDTH HEIGHT"),
        ("/dev/video-none", (320, 240), b"", "/dev/video-none cannot be opened (name a camera"),
        ("/dev/null", (320, 240), b"", "/dev/null captures no frames (name another"),
    ],
)
def test_what_cannot_be_read_is_said(
    command: Command, source: str, size: tuple[int, int], sent: bytes, says: str
) -> None:
    done = subprocess.run(command(source, *size), input=sent, capture_output=True, check=False)
    assert done.returncode in (1, 2)
    assert says in done.stderr.decode()
    assert done.stdout == b""
