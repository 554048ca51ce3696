"""The preview page, in a real browser and by its own addresses."""

import dataclasses
import http.client
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
from browser_fixtures import open_browser
from drawn_frames import FRAMES
from video_fixtures import (
    LABELS,
    PATIENCE_S,
    ColourDetector,
    colour_pipeline,
    scene,
    wait_for,
)

from device.errors import PipelineError
from device.protocol.messages import Stats
from pipelines.config import SourceConfig
from pipelines.preview import server
from pipelines.preview.server import MAX_STREAMS, Preview, Status, parse_address
from pipelines.runtime.batch import Model
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sources.http import HttpCapture


@pytest.fixture(scope="module")
def preview(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preview]:
    """The preview of a pipeline with two cameras that goes on and on."""
    folder = tmp_path_factory.mktemp("preview")
    for name, colour in (("left", "red"), ("right", "green")):
        (folder / name).mkdir()
        for i in range(8):
            picture = cv2.resize(scene(i, 3, colour), (320, 320), interpolation=cv2.INTER_NEAREST)
            cv2.imwrite(str(folder / name / f"{i}.png"), picture)
    sources = tuple(
        SourceConfig(uri=f"images://{folder / name}?fps=20", id=name, loop=True)
        for name in ("left", "right")
    )
    config = msgspec.structs.replace(colour_pipeline(folder), source=msgspec.UNSET, sources=sources)
    stop = threading.Event()
    with Preview(":0") as opened:
        runner = threading.Thread(
            target=run_pipeline,
            args=(
                config,
                Model(ColourDetector(), LABELS, ""),
                RunOptions(emit=opened.on_message, stop=stop),
                opened.on_result,
            ),
        )
        runner.start()
        wait_for(lambda: opened.knows("left") and opened.knows("right"), PATIENCE_S, "pictures")
        yield opened
        stop.set()
        runner.join()


def get(preview: Preview, path: str, host: str | None = None) -> tuple[int, bytes]:
    place = preview.url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=30)
    connection.request("GET", path, headers={"Host": host or place})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


# Resolves once both pictures are there and have moved on, with what the page shows.
LOOK = """new Promise((done, fail) => {
    const began = Date.now(), first = new Map();
    const look = () => {
        const captions = [...document.querySelectorAll("figcaption")].map(c => c.textContent);
        const images = [...document.querySelectorAll("img")];
        captions.forEach((text, i) => { if (!first.has(i)) first.set(i, text); });
        const moved = captions.length === 2 && captions.every((text, i) => text !== first.get(i));
        const rows = document.querySelectorAll("#stages tbody tr").length;
        if (moved && rows && images.every(i => i.naturalWidth > 0))
            done({name: document.getElementById("name").textContent, captions, rows,
                  sizes: images.map(i => [i.naturalWidth, i.naturalHeight]),
                  state: document.getElementById("state").textContent});
        else if (Date.now() - began > 50000) fail(new Error(document.body.innerText));
        else setTimeout(look, 100);
    };
    look();
})"""


def test_a_browser_shows_each_camera_and_the_figures(preview: Preview, tmp_path: Path) -> None:
    with open_browser(tmp_path) as browser:
        browser.open(preview.url)
        seen = browser.evaluate(LOOK)
        errors = browser.errors
    assert errors == []
    assert seen["name"] == "colours"
    assert [text.split("frame")[0] for text in seen["captions"]] == ["left", "right"]
    assert all("1 found" in text for text in seen["captions"])
    assert seen["sizes"] == [[320, 320], [320, 320]]
    assert seen["rows"] >= 4
    assert "frames/s" in seen["state"]


# Resolves once every picture has its size, with what sticks out of the window.
FITS = """new Promise((done, fail) => {
    const began = Date.now();
    const look = () => {
        const images = [...document.images];
        const there = images.length === COUNT && images.every(i => i.style.length > 0);
        const page = document.documentElement;
        if (there && document.querySelectorAll("#stages tbody tr").length)
            done({right: page.scrollWidth - innerWidth, below: page.scrollHeight - innerHeight,
                  sizes: images.map(i => [i.getBoundingClientRect().width,
                                          i.getBoundingClientRect().height])});
        else if (Date.now() - began > 50000) fail(new Error(document.body.innerText));
        else setTimeout(look, 100);
    };
    look();
})"""


@pytest.mark.parametrize(
    ("cameras", "least"),
    [
        (1, 400),
        pytest.param(2, 300, marks=pytest.mark.slow),
        pytest.param(4, 190, marks=pytest.mark.slow),
    ],
)
def test_pictures_and_figures_fit_a_window_of_900_pixels(
    cameras: int, least: int, tmp_path: Path
) -> None:
    """Nothing sticks out, and the pictures are as large as that permits."""
    stages = ("wait", "preprocess", "queue", "infer", "collect", "decode", "track", "sinks",
              "total", "transport")  # fmt: skip
    figures = dict.fromkeys(stages, 123.45)
    stats = Stats(
        fps=29.9, frames=1000, latency_p50_ms=12.3, latency_p99_ms=45.6, stage_p50_ms=figures,
        stage_p99_ms=figures, dropped={"source_latest": 1234, "video_quota": 5},
    )  # fmt: skip
    with Preview(":0") as opened, open_browser(tmp_path) as browser:
        opened.on_message(stats)
        for number in range(cameras):
            one = FRAMES["large"]()
            frame = dataclasses.replace(one.frame, camera=f"camera-{number}")
            opened.on_result(dataclasses.replace(one, frame=frame))
        for width, height in ((900, 900), (900, 700), (1440, 900)):
            browser.resize(width, height)
            browser.open(opened.url)
            seen = browser.evaluate(FITS.replace("COUNT", str(cameras)))
            assert seen["right"] <= 0, (width, height)
            assert seen["below"] <= 0, (width, height)
            for shown_width, shown_height in seen["sizes"]:
                assert shown_width / shown_height == pytest.approx(1.5, rel=0.01)
                assert shown_height >= least * (height / 900) ** 2
        if directory := os.environ.get("TANDEM_SCREENSHOTS"):
            for width, height in ((900, 900), (1440, 900)):
                browser.resize(width, height)
                browser.screenshot(Path(directory) / f"preview-{cameras}-{width}.png")


def test_a_stream_holds_the_picture_with_its_boxes(preview: Preview) -> None:
    capture = HttpCapture(f"{preview.url}stream/left", 30.0, lambda: False)
    try:
        image = capture.read().pixels
    finally:
        capture.close()
    assert image.shape == (320, 320, 3)
    red = (image[..., 2] > 150) & (image[..., :2].max(axis=2) < 110)
    assert red.sum() > 400  # the square of 40 x 40 less its frame and its label


def test_the_figures_are_documented_json(preview: Preview) -> None:
    status, body = get(preview, "/status.json")
    assert status == 200
    figures = msgspec.json.decode(body, type=Status)
    assert [camera.id for camera in figures.cameras] == ["left", "right"]
    assert all(camera.age_ms >= 0.0 for camera in figures.cameras)


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/", None, 200),
        ("/", "localhost:80", 200),
        ("/", "evil.example:8090", 421),  # its name may point to this machine
        ("/stream/top", None, 404),
        ("/../../etc/passwd", None, 404),
    ],
)
def test_what_the_server_answers(
    preview: Preview, path: str, host: str | None, status: int
) -> None:
    assert get(preview, path, host)[0] == status


def test_viewers_are_bounded_and_those_who_have_gone_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "REPEAT_S", 0.05)
    pattern = colour_pipeline("test://?width=64&height=64", frames="every")
    with Preview(":0") as opened:
        run_pipeline(  # it ends: no further picture comes
            pattern,
            Model(ColourDetector(), LABELS, ""),
            RunOptions(emit=opened.on_message, frames=1),
            watch=opened.on_result,
        )
        place = opened.url.removeprefix("http://").rstrip("/")
        viewers = [http.client.HTTPConnection(place, timeout=30) for _ in range(MAX_STREAMS)]
        answers = []
        for viewer in viewers:
            viewer.request("GET", "/stream/")
            answers.append(viewer.getresponse())
        assert [answer.status for answer in answers] == [200] * MAX_STREAMS
        assert get(opened, "/stream/")[0] == 503
        for answer, viewer in zip(answers, viewers, strict=True):
            answer.close()
            viewer.close()
        wait_for(lambda: stream_status(place) == 200, PATIENCE_S, "room for a viewer")


def stream_status(place: str) -> int:
    """Return the status of a stream whose pictures nobody reads."""
    viewer = http.client.HTTPConnection(place, timeout=30)
    viewer.request("GET", "/stream/")
    status = viewer.getresponse().status
    viewer.close()
    return status


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":8090", ("127.0.0.1", 8090)),
        ("8090", ("127.0.0.1", 8090)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:8090", ("::1", 8090)),
        (":65535", ("127.0.0.1", 65535)),
    ],
)
def test_an_address_without_a_host_is_this_machine_alone(
    text: str, address: tuple[str, int]
) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", ":", "host", ":65536", "host:port", ":-1"])
def test_an_address_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(PipelineError, match="has no port: write :8090"):
        parse_address(text)


def test_a_port_that_is_taken_is_one_sentence(preview: Preview) -> None:
    port = preview.url.rstrip("/").rpartition(":")[2]
    says = rf"cannot listen on :{port} \(Address already in use\): give another host or port\."
    with pytest.raises(PipelineError, match=says):
        Preview(f":{port}")


def test_a_picture_that_is_wide_is_scaled_down() -> None:
    config = colour_pipeline("test://?width=1920&height=1080", frames="every")
    with Preview(":0") as opened:
        results = []
        run_pipeline(
            config,
            Model(ColourDetector(), LABELS, ""),
            RunOptions(emit=opened.on_message, frames=1),
            watch=results.append,
        )
        data = opened.picture(results[0])
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert image.shape == (540, 960, 3)
