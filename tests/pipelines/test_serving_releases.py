"""A board serves a release; bundles in a folder are served, with pictures as their inputs."""

import socket
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
import tritonclient.http as triton_http
from board_fixtures import Board, colour_bundle
from click.testing import CliRunner
from engine_fixtures import engine_parts, picture, single_network
from serving_fixtures import served
from tritonclient.utils import InferenceServerException
from video_fixtures import LABELS

import tandem as library
from device.engine.file import write_engine
from device.errors import ConfigError
from device.session import open_session
from pipelines.config import parse_pipeline
from pipelines.run import run_pipeline
from toolkit.cli.main import tandem


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def serve_bundle(folder: Path, port: int, version: str, host: str = "127.0.0.1") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    manifest, entries = engine_parts(single_network("batch"))
    manifest = msgspec.structs.replace(manifest, profile="laptop")
    write_engine(folder / "door.engine", manifest, entries)
    (folder / "labels.txt").write_text("\n".join(map(str, range(10))))
    (folder / "pipeline.toml").write_text(
        f'name = "door"\nkind = "serve"\nengine = "door.engine"\nlabels = "labels.txt"\n'
        f'[serve]\nhost = "{host}"\nhttp_port = {port}\ngrpc_port = 0\nmetrics_port = 0\n'
        "dynamic_batching = true\n"
    )
    bundle = folder / f"door-{version}.bundle"
    words = ("bundle", "create", "--pipeline", folder / "pipeline.toml", "-o", bundle)
    options = ("--version", version, "--portable")
    result = CliRunner().invoke(tandem, [*map(str, words), *options])
    assert result.exit_code == 0, result.output
    return bundle


def test_a_release_that_serves_is_checked(tmp_path: Path) -> None:
    serve_bundle(tmp_path, 8000, "1")
    file = tmp_path / "pipeline.toml"

    def check() -> str:
        result = CliRunner().invoke(tandem, ["pipeline", "check", str(file)])
        assert result.exit_code == 0, result.output
        return result.output

    assert check() == (
        f"{file}: 'door' serves door\n"
        f"it fits {tmp_path / 'door.engine'}, an engine for laptop, and {tmp_path / 'labels.txt'}\n"
    )
    file.write_text('name = "door"\nkind = "serve"\n')
    assert "the file names no `engine` and `labels`" in check()


def test_a_board_serves_a_release_and_rolls_a_bad_one_back(tmp_path: Path) -> None:
    port = free_port()
    good = serve_bundle(tmp_path / "good", port, "1")
    bad = serve_bundle(tmp_path / "bad", port, "2", host="0.0.0.0")
    profile = tmp_path / "board"
    board = Board(profile, tmp_path / "no-camera")
    try:
        result = board.deploy(good)
        assert result.live, (result, board.box.log())
        frame = picture(2)
        with open_session(tmp_path / "good" / "door.engine") as session:
            expected = session.infer({"x": frame})["y"]

        def ask() -> np.ndarray:
            with triton_http.InferenceServerClient(f"127.0.0.1:{port}") as client:
                x = triton_http.InferInput("x", list(frame.shape), "FP32")
                x.set_data_from_numpy(frame)
                return client.infer("door", [x]).as_numpy("y")  # type: ignore[no-any-return]

        assert np.array_equal(ask(), expected)
        result = board.deploy(bad)
        assert not result.live
        assert "can be reached by other machines" in str(result), result
        board.wait_status("running")
        assert np.array_equal(ask(), expected)
    finally:
        board.close()


def test_a_picture_goes_in_and_detections_come_out(tmp_path: Path) -> None:
    bundle = colour_bundle(tmp_path / "models")
    image = np.zeros((64, 64, 3), np.uint8)
    image[8:24, 8:24] = (0, 0, 255)
    cv2.imwrite(str(tmp_path / "picture.png"), image)
    expected = []
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (tmp_path / "picture.png").rename(pictures / "picture.png")
    run_pipeline(bundle, source=str(pictures), on_result=expected.append)
    boxes = expected[0].detections.boxes
    assert len(boxes)
    with (
        served(tmp_path / "models") as ports,
        triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}") as client,
    ):
        assert {"colours", "colours_picture"} <= set(ports.models)
        data = np.array([(pictures / "picture.png").read_bytes()], object)
        one = triton_http.InferInput("image", [1], "BYTES")
        one.set_data_from_numpy(data)
        answer = client.infer("colours_picture", [one])
        assert np.array_equal(answer.as_numpy("boxes"), boxes)
        assert {label.decode() for label in answer.as_numpy("labels")} <= set(LABELS)
        one.set_data_from_numpy(np.array([b"no picture"], object))
        with pytest.raises(InferenceServerException, match=r"\[400\] input 'image'"):
            client.infer("colours_picture", [one])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[source]\nuri = "x"', "has no 'source'"),
        ("[serve]\nhttp_port = 70000", "http_port"),
        ("[serve]\nhttp = 1", "http"),
    ],
)
def test_a_pipeline_that_serves_has_no_frames(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_pipeline(f'name = "x"\nkind = "serve"\n{text}', Path("pipeline.toml"))


def test_a_release_that_serves_is_not_run_on_frames(tmp_path: Path) -> None:
    bundle = serve_bundle(tmp_path, 1, "1")
    with pytest.raises(library.TandemError, match="`tandem serve` runs its engines"):
        run_pipeline(bundle)
