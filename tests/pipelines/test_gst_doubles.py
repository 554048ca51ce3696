"""CSI cameras and hardware decoding, on doubles of NVIDIA's GStreamer elements.

The registry is the real one without H.265, and the doubles: `gst-inspect-1.0` names them, and the
capture's child process has them (tests/fixtures/gst_doubles/nvidia.py).
"""

import os
import shutil
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from video_fixtures import PATIENCE_S, require_program, rtsp_server, wait_for

from device.errors import SourceError
from pipelines.config import SourceConfig
from pipelines.sources import gst
from pipelines.sources.batching import read_frames
from pipelines.sources.gst import csi_pipeline, rtsp_decoders, rtsp_pipeline
from pipelines.sources.live import Waiting
from pipelines.sources.table import open_source
from pipelines.sources.uri import parse_csi

DOUBLES = Path(__file__).parents[1] / "fixtures" / "gst_doubles" / "nvidia.py"
INSPECT = """#!/bin/sh
case "$1" in
    "") {real} | grep -v h265parse; for name in nvarguscamerasrc nvv4l2decoder nvvidconv; do
            echo "nv:  $name: a double"; done ;;
    nvv4l2decoder) {decoder} ;;
    *) {real} "$@" ;;
esac
"""
JETPACK_6 = 'echo "  enable-max-performance: Set to enable max performance"'
JETPACK_7 = "true"


@pytest.fixture(params=[JETPACK_6, JETPACK_7], ids=["JetPack 6", "JetPack 7"])
def jetson(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A machine whose GStreamer has NVIDIA's elements."""
    real = require_program("gst-inspect-1.0")
    program = tmp_path / "gst-inspect-1.0"
    program.write_text(INSPECT.format(real=real, decoder=request.param))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    packages = Path(gst.__file__).parents[gst.__name__.count(".")]  # the checkout, or site-packages
    monkeypatch.setenv("PYTHONPATH", str(packages))
    python = shutil.which("python3", path="/usr/bin")
    monkeypatch.setattr(gst, "module_command", lambda name, *words: [python, str(DOUBLES), *words])
    forget()
    yield
    monkeypatch.undo()
    forget()


def forget() -> None:
    gst._elements.cache_clear()
    gst._inspect.cache_clear()


@pytest.mark.usefixtures("jetson")
def test_a_csi_camera_gives_frames_out_of_its_memory() -> None:
    uri = "csi://1?width=320&height=240&fps=30&flip=2"
    with read_frames(SourceConfig(uri=uri)) as frames:
        taken = list(islice(frames, 3))
    assert [frame.image.shape for frame in taken] == [(240, 320, 3)] * 3
    assert all(frame.nv12 is not None for frame in taken)
    assert taken[0].image.max() > 200  # the test picture's bars


@pytest.mark.usefixtures("jetson")
def test_a_csi_camera_that_is_not_there_is_named_with_what_to_check() -> None:
    with (
        pytest.raises(SourceError, match=r"no CSI camera is known: check its cable"),
        read_frames(SourceConfig(uri="csi://7")) as frames,
    ):
        next(frames)


@pytest.mark.usefixtures("jetson")
def test_frames_in_a_camera_s_memory_reach_nothing_without_the_converter() -> None:
    words = csi_pipeline(parse_csi("csi://0"))
    at = words.index("nvvidconv")
    without = [*words[:at], "identity", *words[at + 2 :]]
    with pytest.raises(SourceError, match=r"could not link|cannot give that size"):
        gst.GstCapture("csi://0", without, 2.0, lambda: False).read()


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("#!/bin/sh\nexit 1\n", "returned non-zero exit status 1"),
        ("#!/bin/sh\nexec sleep 60\n", "timed out"),
        ("nothing to run", "Exec format error"),
    ],
    ids=["fails", "hangs", "cannot be run"],
)
@pytest.mark.usefixtures("jetson")
def test_a_gstreamer_that_does_not_answer_is_asked_again(
    broken: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gst, "INSPECT_S", 0.5, raising=False)
    program = tmp_path / "gst-inspect-1.0"
    works = program.read_text()
    program.write_text(broken)
    with pytest.raises(SourceError, match=why), read_frames(SourceConfig(uri="csi://0")):
        pass
    program.write_text(works)
    monkeypatch.setattr(gst, "INSPECT_S", 30.0, raising=False)
    assert gst.has_element("nvarguscamerasrc")
    program.write_text(broken)
    monkeypatch.setattr(gst, "INSPECT_S", 0.5, raising=False)
    with pytest.raises(SourceError, match=why):
        gst.has_property("nvv4l2decoder", "enable-max-performance")
    program.write_text(works)
    monkeypatch.setattr(gst, "INSPECT_S", 30.0, raising=False)
    assert gst.has_property("rtph264depay", "request-keyframe")


@pytest.mark.usefixtures("jetson")
def test_a_camera_that_may_come_later_waits_for_gstreamer_too(tmp_path: Path) -> None:
    (tmp_path / "gst-inspect-1.0").write_text("#!/bin/sh\nexit 1\n")
    source = open_source(
        SourceConfig(uri="rtsp://127.0.0.1/1"), Waiting(threading.Event(), patient=True)
    )
    with source:
        wait_for(lambda: source.away is not None, PATIENCE_S, "it says why")
        assert source.away is not None
        assert "GStreamer does not answer" in source.away.reason


def test_a_property_with_a_long_name_is_found() -> None:
    """gst-inspect-1.0 writes no space before the colon of a name of 20 characters or more."""
    assert gst.has_property("rtspsrc", "max-rtcp-rtp-time-diff")
    assert not gst.has_property("rtspsrc", "max-rtcp-rtp")


def test_rtsp_is_decoded_by_the_board_s_hardware(
    jetson: None, request: pytest.FixtureRequest
) -> None:
    assert rtsp_decoders()["H264"] == "nvv4l2decoder"
    words = rtsp_pipeline("rtsp://camera/1", rtsp_decoders())
    fast = "enable-max-performance=true" in words
    assert fast == ("JetPack 6" in request.node.name)  # it is gone in JetPack 7
    with rtsp_server() as server, read_frames(SourceConfig(uri=server.url)) as frames:
        taken = list(islice(frames, 3))
    assert [frame.image.shape for frame in taken] == [(180, 320, 3)] * 3
