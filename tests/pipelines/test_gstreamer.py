"""The element `tandeminfer` in lines of gst-launch-1.0, and as a bridge of appsink and appsrc."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from shared_folder import shared_folder
from video_fixtures import (
    COLOUR_TOML,
    LABELS,
    PATIENCE_S,
    colour_model,
    require_program,
    scene,
    wait_for,
)

from device.protocol.messages import Stats
from pipelines.gstreamer import worker
from pipelines.sinks.result import SinkContext
from toolkit.build import BuildOptions, build_engine

ROOT = Path(__file__).parents[2]
ELEMENT = Path(worker.__file__).parent / "python"
SYSTEM_PYTHON = "/usr/bin/python3"  # it has GStreamer's bindings
FRAMES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline.toml with its engine and labels, and pictures of a square that moves right."""
    require_program("gst-launch-1.0")
    folder = tmp_path_factory.mktemp("gst")
    model = colour_model(folder / "colours.onnx")
    build_engine(model, "laptop", folder / "colours.engine", BuildOptions(precision="fp32"))
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    text = COLOUR_TOML.format(uri="test://", source="", sinks="")
    (folder / "colours.toml").write_text(
        'engine = "colours.engine"\nlabels = "labels.txt"\n' + text
    )
    for number in range(FRAMES):
        cv2.imwrite(str(folder / f"{number:03d}.png"), scene(number, 2))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `eval "$(tandem-pipeline --gstreamer)"` sets, and a registry of these tests' own."""
    return environment_of(shared_folder(tmp_path_factory, "gstreamer", scan_plugins))


def environment_of(place: Path) -> dict[str, str]:
    words = json.loads((place / "words.json").read_text())
    # GStreamer's Python takes its libraries from the first one on the PATH: let it be the system's.
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(one for one in folders if Path(one) != Path(sys.executable).parent)
    return {**os.environ, **words, "PATH": path, "GST_REGISTRY": str(place / "registry")}


def scan_plugins(place: Path) -> None:
    """Fill the registry: each first start of GStreamer would read all plugins."""
    shown = subprocess.run(
        [sys.executable, "-m", "pipelines.__main__", "--gstreamer"],
        check=True, cwd=ROOT, capture_output=True, text=True,
    ).stdout  # fmt: skip
    words = dict(shlex.split(line)[1].split("=", 1) for line in shown.splitlines())
    (place / "words.json").write_text(json.dumps(words))
    # GStreamer bars a plugin whose first scan fails until its registry is gone.
    for _ in range(3):
        scan = subprocess.run(
            ["gst-inspect-1.0", "tandeminfer"],
            check=False, env=environment_of(place) | {"GST_DEBUG": "2"}, capture_output=True,
            text=True,
        )  # fmt: skip
        if scan.returncode == 0:
            return
        (place / "registry").unlink(missing_ok=True)
    pytest.fail(f"GStreamer finds no tandeminfer: {scan.stderr}")


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(folder: Path, environment: dict[str, str]) -> Launch:
    def run(line: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["gst-launch-1.0", "-m", *shlex.split(line)],
            cwd=folder, env={**environment, **env}, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    return run


def results_of(shown: str) -> list[dict]:
    texts = re.findall(r'tandem-result, json=\(string\)"(.*)";', shown)
    return [json.loads(re.sub(r"\\(.)", r"\1", text)) for text in texts]


PICTURES = "multifilesrc location=%03d.png stop-index=7 caps=image/png,framerate=30/1 ! pngdec"


@pytest.mark.parametrize("caps", ["BGR", "RGB", "NV12"])
def test_each_frame_of_a_line_gets_its_result(launch: Launch, caps: str) -> None:
    done = launch(
        f"{PICTURES} ! videoconvert ! video/x-raw,format={caps}"
        " ! tandeminfer pipeline=colours.toml ! fakesink",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = results_of(done.stdout)
    assert [one["seq"] for one in results] == list(range(FRAMES))
    steps_ns = np.diff([one["t_capture_ns"] for one in results])
    np.testing.assert_allclose(steps_ns, 1e9 / 30, atol=2)  # those of the file, at any pace
    for column, one in enumerate(results):
        assert [row["label"] for row in one["detections"]] == ["red"]
        x1, y1, x2, y2 = one["detections"][0]["box"]
        np.testing.assert_allclose([x1, y1, x2, y2], [8 * column, 16, 8 * column + 8, 24], atol=4)


def test_results_are_drawn_on_pictures_of_any_width(launch: Launch, tmp_path: Path) -> None:
    """63 pixels of BGR have rows of 189 bytes, padded to 192."""
    done = launch(
        f"{PICTURES} ! videoconvert ! videoscale ! video/x-raw,width=63,height=64 ! tee name=t"
        f" t. ! queue ! videoconvert ! pngenc ! multifilesink location={tmp_path}/in%d.png"
        " t. ! queue ! videoconvert ! video/x-raw,format=BGR"
        " ! tandeminfer pipeline=colours.toml draw=true messages=false"
        f" ! videoconvert ! pngenc ! multifilesink location={tmp_path}/out%d.png",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not results_of(done.stdout)
    given, drawn = (cv2.imread(str(tmp_path / f"{name}5.png")) for name in ("in", "out"))
    assert drawn.shape == given.shape
    difference = np.abs(drawn.astype(int) - given).max(axis=2)
    assert (difference > 20).sum() > 30  # the box and its label
    assert (difference[50:, 50:] <= 2).all()  # nothing is shifted


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        ("", {}, "set pipeline=FILE.toml"),
        ("pipeline=missing.toml", {}, "missing.toml"),
        ("pipeline=colours.toml python=/nowhere/python", {}, "/nowhere/python cannot be started"),
        ("pipeline=colours.toml", {"TANDEM_PYTHON": "/bin/false"}, "set TANDEM_PYTHON"),
    ],
)
def test_an_engine_that_cannot_start_is_an_error_of_the_line(
    launch: Launch, words: str, env: dict[str, str], says: str
) -> None:
    done = launch(f"{PICTURES} ! videoconvert ! tandeminfer {words} ! fakesink", **env)
    assert done.returncode != 0
    assert says in done.stderr + done.stdout


def test_nothing_is_drawn_on_nv12(launch: Launch) -> None:
    done = launch(
        f"{PICTURES} ! videoconvert ! video/x-raw,format=NV12"
        " ! tandeminfer pipeline=colours.toml draw=true ! fakesink",
    )
    assert done.returncode != 0
    assert "can't handle caps" in done.stderr + done.stdout
    done = launch(
        f"{PICTURES} ! videoconvert ! video/x-raw,format=NV12 ! videoconvert"
        " ! tandeminfer pipeline=colours.toml draw=true ! fakesink",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(results_of(done.stdout)) == FRAMES


BRIDGE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tandeminfer import Bridge, Gst, Worker, result_of
source = Gst.parse_launch(sys.argv[2] + " ! videoconvert ! appsink name=s")
target = Gst.parse_launch("appsrc name=a format=time ! tee name=t ! queue ! videoconvert ! pngenc"
    " ! multifilesink location=%s/bridged%%d.png t. ! queue ! fakesink name=f signal-handoffs=true"
    % sys.argv[3])
seen = []
target.get_by_name("f").connect("handoff", lambda f, buffer, pad: seen.append(result_of(buffer)))
worker = Worker("colours.toml", draw=True)
bridge = Bridge(worker, source.get_by_name("s"), target.get_by_name("a"))
for pipeline in (target, source):
    pipeline.set_state(Gst.State.PLAYING)
bus = target.get_bus()
message = bus.timed_pop_filtered(30 * Gst.SECOND, Gst.MessageType.EOS | Gst.MessageType.ERROR)
assert message is not None and message.type == Gst.MessageType.EOS, bridge.error
for pipeline in (target, source):
    pipeline.set_state(Gst.State.NULL)
worker.close()
times = [one["t_capture_ns"] for one in seen]
assert all(abs(b - a - 1e9 / 30) < 2 for a, b in zip(times, times[1:])), times
print(json.dumps(seen))
"""


def test_a_bridge_joins_an_appsink_to_an_appsrc(
    folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", BRIDGE, ELEMENT, PICTURES, tmp_path],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert [one["seq"] for one in seen] == list(range(FRAMES))
    assert all(one["detections"][0]["label"] == "red" for one in seen)
    assert cv2.imread(str(tmp_path / "bridged7.png")).shape == (64, 64, 3)


SIZES = """
import sys
sys.path.insert(0, sys.argv[1])
from tandeminfer import Bridge, Gst, Worker, WorkerError
picture = bytes(64 * 64 * 3)
caps = Gst.Caps.from_string("video/x-raw,format=BGR,width=64,height=64,framerate=30/1")
worker = Worker("colours.toml", draw=True)
seen = []
bridge = Bridge(worker, on_result=lambda _, buffer: seen.append(buffer))
bridge.push(Gst.Buffer.new_wrapped(picture + b"padding"), caps)
assert seen[0].extract_dup(len(picture), 7) == b"padding"
try:
    bridge.push(Gst.Buffer.new_wrapped(picture[:-9]), caps)
except WorkerError as error:
    print(error)
worker.close()
"""


def run_program(folder: Path, environment: dict[str, str], program: str) -> str:
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", program, ELEMENT],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_buffers_may_be_padded_and_not_shorter_than_a_frame(
    folder: Path, environment: dict[str, str]
) -> None:
    output = run_program(folder, environment, SIZES)
    assert output.startswith("a frame has 12279 bytes, fewer than the 12288 of its caps: put")


SLOW = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from tandeminfer import Bridge, Gst, Worker
caps = Gst.Caps.from_string("video/x-raw,format=BGR,width=64,height=64,framerate=30/1")
target = Gst.parse_launch("appsrc name=a format=time max-bytes=20000 ! fakesink")
target.set_state(Gst.State.PAUSED)
source = target.get_by_name("a")
worker = Worker("colours.toml")
bridge = Bridge(worker, None, source)
def push():
    for _ in range(20):
        bridge.push(Gst.Buffer.new_wrapped(bytes(64 * 64 * 3)), caps)
thread = threading.Thread(target=push)
thread.start()
thread.join(2)
print(thread.is_alive(), source.get_property("current-level-bytes") <= 20000 + 64 * 64 * 3)
target.set_state(Gst.State.NULL)
thread.join()
worker.close()
"""


def test_a_bridge_waits_for_a_slow_output(folder: Path, environment: dict[str, str]) -> None:
    assert run_program(folder, environment, SLOW) == "True True\n"


SIGNALS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from tandeminfer import Bridge, Gst, Worker
caps = Gst.Caps.from_string("video/x-raw,format=BGR,width=64,height=64,framerate=30/1")
worker = Worker("colours.toml")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    os.kill(worker._process.pid, number)
print(Bridge(worker).push(Gst.Buffer.new_wrapped(bytes(64 * 64 * 3)), caps)["seq"])
worker.close()
print(worker._process.returncode)
"""


def test_the_engine_ends_with_its_input_and_not_by_a_signal(
    folder: Path, environment: dict[str, str]
) -> None:
    assert run_program(folder, environment, SIGNALS) == "0\n0\n"


ANALYTICS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tandeminfer
from tandeminfer import GLib, attach_boxes
rows = []
class Relations:
    def add_od_mtd(self, label, x, y, width, height, confidence):
        rows.append([GLib.quark_to_string(label), x, y, width, height, confidence])
        return True, None
class Analytics:
    @staticmethod
    def buffer_add_analytics_relation_meta(buffer):
        return Relations()
attach_boxes(None, [{"label": "red", "score": 0.5, "box": [1.2, 2.0, 11.4, 8.0]}, {"label": "day",
    "score": 1.0}], Analytics)
print(json.dumps(rows))
"""


def test_boxes_become_analytics_where_gstreamer_has_them() -> None:
    """Against a double of GstAnalytics 1.24: Debian 12 has 1.22."""
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", ANALYTICS, ELEMENT],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [["red", 1, 2, 10, 6, 0.5]]


def test_sinks_control_the_pipeline_and_get_its_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts, stats = [], []

    class Sinks(worker.OpenSinks):
        def __init__(self, configs: list, context: SinkContext) -> None:
            super().__init__(configs, context)
            contexts.append(context)

        def take_stats(self, figures: Stats) -> None:
            stats.append(figures)

    picture = scene(2, 2)
    layout = {"format": "BGR", "width": 64, "height": 64, "stride": 192, "size": picture.nbytes}
    requests = [{"caps": layout}, *({"pts": number} for number in range(4))]
    lines = io.BytesIO(b"".join(json.dumps(one).encode() + b"\n" for one in requests))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=lines))
    monkeypatch.setattr(worker, "OpenSinks", Sinks)
    config, files = worker._find(folder / "colours.toml", "", "", ExitStack())
    with ExitStack() as stack:
        memory = stack.enter_context(os.fdopen(os.memfd_create("frames"), "wb", buffering=0))
        memory.write(picture.tobytes())
        answers = worker._answers(config, files, memory.fileno(), False, stack)
        assert json.loads(next(answers)) == {"ready": True}
        (context,) = contexts
        assert dict(context.models) == {config.first.name: context.labels}
        assert context.about["pipeline"] == config.name
        assert len(json.loads(next(answers))["detections"]) == 1
        context.controls.set_least_score(context.cameras[0], 1.0)
        assert json.loads(next(answers))["detections"] == []
        context.controls.switch(context.cameras[0], on=False)
        assert next(answers) == b""
        context.controls.switch(context.cameras[0], on=True)
        assert json.loads(next(answers))["seq"] == 2
        wait_for(lambda: sum(one.frames for one in stats) == 3, PATIENCE_S, "figures")
    assert stats[-1].dropped == {"paused": 1}


def test_the_lines_of_the_page_run(tmp_path: Path, environment: dict[str, str]) -> None:
    text = (ROOT / "docs/gstreamer.md").read_text()
    commands = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (packages,) = re.findall(r"^sudo apt-get install (.*)$", commands[0], re.MULTILINE)
    listed = (ROOT / "scripts/test_parts.sh").read_text().split()
    assert set(packages.split()) <= set(listed)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    model = ROOT / "configs/models/robot-objects.onnx"
    build_engine(model, "laptop", tmp_path / "robot.engine", BuildOptions(precision="fp32"))
    (tmp_path / "program.py").write_text(program)
    lines = "\n".join(commands).replace(f"sudo apt-get install {packages}", "")
    here = f'tandem-pipeline() {{ "{sys.executable}" -m pipelines.__main__ "$@"; }}'
    done = subprocess.run(
        ["bash", "-ec", f"{here}\n{lines}\n{SYSTEM_PYTHON} program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": environment["PATH"],
            "GST_REGISTRY": environment["GST_REGISTRY"],
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(results_of(done.stdout)) == 5
    assert len(list(tmp_path.glob("seen*.jpg"))) == len(list(tmp_path.glob("out*.jpg"))) == 5
    assert re.findall(r"^(\d+) \[", done.stdout, re.MULTILINE) == list("01234")
