"""Whole pipelines: in this process, and as the process that the agent starts."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from process_lines import next_line
from sink_fixtures import subscriber
from video_fixtures import (
    COLOUR_TOML,
    LABELS,
    PATIENCE_S,
    ColourDetector,
    colour_model,
    colour_pipeline,
    gray_frame,
    mosquitto,
    python_m_pipelines,
    rtsp_server,
    scene,
    wait_for,
    write_video,
)

from device.engine.file import open_engine
from device.engine.manifest import TensorInfo
from device.errors import PipelineError, SourceError
from device.install_advice import pip_install
from device.protocol.messages import (
    Failure,
    Heartbeat,
    Ready,
    Result,
    Stats,
    decode_message,
)
from device.runtime.session import Session
from device.update.bundle import ENGINE, PIPELINE, extract_bundle, write_bundle
from pipelines.decode_config import Classification, LtrbGrid
from pipelines.runtime.batch import Model
from pipelines.runtime.metrics import Metrics
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sink_config import JsonlSink
from pipelines.sinks.events import encode_event
from pipelines.stages.fit import check_model
from toolkit.cli.commands.run import run as run_command
from toolkit.engine.build import BuildOptions, build_engine

DETECTOR = Model(ColourDetector(), LABELS, "0" * 64)


def write_images(folder, *cells):
    folder.mkdir()
    for i, (column, row, colour) in enumerate(cells):
        cv2.imwrite(str(folder / f"{i:03}.png"), scene(column, row, colour))
    return folder


def run_all(config, model=DETECTOR, **options):
    messages, results = [], []
    stop = options.pop("stop", threading.Event())
    count = run_pipeline(
        config, model, RunOptions(emit=messages.append, stop=stop, **options), watch=results.append
    )
    return count, messages, results


# --- in this process


def test_images_become_detections_where_the_objects_are(tmp_path):
    folder = write_images(tmp_path / "in", (3, 4, "red"), (0, 7, "green"))
    count, messages, results = run_all(colour_pipeline(folder))
    assert count == 2
    seen = [[(d.label, d.box) for d in one.event.detections] for one in results]
    assert seen == [[("red", (24.0, 32.0, 32.0, 40.0))], [("green", (0.0, 56.0, 8.0, 64.0))]]
    assert [type(m) for m in messages if not isinstance(m, Heartbeat)] == [Ready, Result, Stats]
    assert messages[0].segments == ("all (cpu): numpy: it is the reference of the detector",)
    assert messages[-1].frames == 2
    assert set(messages[-1].stage_p50_ms) == {
        *("wait", "preprocess", "queue", "infer", "collect", "decode", "sinks"),
    }


def test_boxes_are_in_the_pixels_of_the_frame(tmp_path):
    image = cv2.resize(scene(2, 5), None, fx=4, fy=4, interpolation=cv2.INTER_NEAREST)
    cv2.imwrite(str(tmp_path / "big.png"), image[:, :192])  # 192 x 256: padded left and right
    _, _, (result,) = run_all(colour_pipeline(tmp_path / "big.png"))
    best = result.event.detections[0]
    assert best.label == "red"
    overlap = np.minimum(best.box[2:], (96, 192)) - np.maximum(best.box[:2], (64, 160))
    assert (overlap >= 8).all()


def test_frames_limit_ends_the_run(tmp_path):
    folder = write_images(tmp_path / "in", *[(1, 1, "red")] * 5)
    assert run_all(colour_pipeline(folder), frames=3)[0] == 3


def test_engine_is_warm_before_the_pipeline_says_ready(tmp_path):
    order = []

    class Recording(ColourDetector):
        def infer(self, feeds):
            order.append("infer")
            return super().infer(feeds)

    run_pipeline(
        colour_pipeline(write_images(tmp_path / "in", (1, 1, "red"))),
        Model(Recording(), LABELS, ""),
        RunOptions(emit=lambda message: order.append(type(message))),
    )
    order = [step for step in order if step is not Heartbeat]
    assert order == ["infer", "infer", Ready, "infer", Result, Stats]


def test_an_event_becomes_json_once_and_only_where_a_sink_writes_it(tmp_path, monkeypatch):
    encoded = []

    def encode(event):
        encoded.append(event.seq)
        return encode_event(event)

    monkeypatch.setattr("pipelines.sinks.result.encode_event", encode)
    folder = write_images(tmp_path / "in", (1, 1, "red"), (2, 2, "red"))
    run_all(colour_pipeline(folder))
    assert not encoded
    sinks = tuple(JsonlSink(path=str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl"))
    run_all(msgspec.structs.replace(colour_pipeline(folder), sinks=sinks))
    assert encoded == [0, 1]


def test_sinks_get_every_result(tmp_path):
    folder = write_images(tmp_path / "in", *[(i, i, "red") for i in range(4)])
    out = tmp_path / "out.jsonl"
    config = msgspec.structs.replace(colour_pipeline(folder), sinks=(JsonlSink(path=str(out)),))
    run_all(config)
    events = [json.loads(line) for line in out.read_text().splitlines()]
    assert [e["seq"] for e in events] == [0, 1, 2, 3]
    assert [e["detections"][0]["box"][0] for e in events] == [0.0, 8.0, 16.0, 24.0]


def test_drops_of_the_source_are_in_the_figures(tmp_path):
    folder = write_images(tmp_path / "in", (1, 1, "red"))
    (folder / "bad.jpg").write_bytes(b"broken")
    _, messages, _ = run_all(colour_pipeline(folder))
    assert messages[-1].dropped == {"corrupt": 1}


def test_figures_come_once_a_second_and_stop_ends_the_run(tmp_path):
    path = write_video(tmp_path / "v.mp4", [scene(1, 1)] * 10, fps=20.0)
    stop = threading.Event()
    threading.Timer(2.4, stop.set).start()
    count, messages, _ = run_all(colour_pipeline(path, loop=True), stop=stop)
    stats = [m for m in messages if isinstance(m, Stats)]
    assert len(stats) == 3
    assert sum(s.frames for s in stats) == count
    assert 15.0 < stats[1].fps < 22.0
    assert 0.0 < stats[1].latency_p50_ms <= stats[1].latency_p99_ms < 100.0


def test_slow_engine_on_a_stream_keeps_results_young():
    slow = Model(ColourDetector(delay_s=0.1), LABELS, "0" * 64)
    with rtsp_server() as server:
        _, messages, results = run_all(colour_pipeline(server.url), slow, frames=20)
    ages = [(r.event.t_result_ns - r.event.t_recv_ns) / 1e6 for r in results]
    assert np.median(ages[10:]) < 100 + 2 * 33 + 40  # one inference, two frames, a busy machine
    assert messages[-1].dropped["busy"] >= 20


def test_error_of_the_source_stops_the_run_after_its_last_figures(tmp_path):
    (tmp_path / "a.png").write_bytes(b"broken")
    messages = []
    with pytest.raises(SourceError, match="none of the 1 images"):
        run_pipeline(colour_pipeline(tmp_path), DETECTOR, RunOptions(emit=messages.append))
    assert [type(m) for m in messages if not isinstance(m, Heartbeat)] == [Ready, Stats]


class Other(ColourDetector):
    """A session whose inputs and outputs are given."""

    def __init__(self, inputs=ColourDetector.inputs, outputs=ColourDetector.outputs):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs


def tensor(name, *shape, dtype="float32"):
    return TensorInfo(name=name, dtype=dtype, shape=shape)


GOOD_SCORES = tensor("scores", 1, 2, 64)


@pytest.mark.parametrize(
    ("session", "says"),
    [
        (Other(inputs=(tensor("x", 1, 3, 32, 64),)), r"\[1, 3, 32, 64\] where \[preprocess\]"),
        (Other(inputs=(tensor("x", 1, 3, 64, 64, dtype="uint8"),)), "is uint8"),
        (Other(inputs=(tensor("x", 1, 64),)), r"\[1, 64\]"),
        (Other(inputs=Other().inputs * 2), "takes 2 inputs"),
        (
            Other(outputs=(GOOD_SCORES, tensor("b", 1, 4, 64))),
            "boxes = 'boxes', which is no .* b, scores",
        ),
        (Other(outputs=(tensor("scores", 1, 3, 64), tensor("boxes", 1, 4, 64))), "3 classes"),
        (
            Other(outputs=(GOOD_SCORES, tensor("boxes", 1, 4, 80))),
            r"takes boxes \[1, 4, 64\].*'boxes' float32 \[1, 4, 80\]",
        ),
    ],
)
def test_engine_that_does_not_fit_is_refused_before_the_first_frame(session, says):
    pipeline = colour_pipeline("x")
    with pytest.raises(PipelineError, match=says):
        check_model(pipeline, pipeline.first, session.inputs, session.outputs, LABELS)


def test_dynamic_sizes_of_an_engine_are_let_through():
    outputs = (tensor("boxes", 1, 4, None), tensor("scores", "batch", 2, None))
    session = Other((tensor("x", "batch", 3, "height", "width"),), outputs)
    pipeline = colour_pipeline("x")
    check_model(pipeline, pipeline.first, session.inputs, session.outputs, LABELS)


def test_classification_engine_is_checked_by_its_labels():
    config = msgspec.structs.replace(colour_pipeline("x"), decode=Classification(scores="p"))
    session = Other(outputs=(tensor("p", 1, 2),))
    check_model(config, config.first, session.inputs, session.outputs, LABELS)
    with pytest.raises(PipelineError, match=r"2 classes but labels\.txt names 3"):
        check_model(config, config.first, session.inputs, session.outputs, ("a", "b", "c"))


def test_figures_hold_percentiles_of_the_interval_and_start_anew():
    metrics = Metrics()
    for value in range(1, 101):
        metrics.add({"infer": value / 2}, float(value))
    stats = metrics.take({"busy": 3})
    assert (stats.frames, stats.latency_p50_ms, stats.latency_p99_ms) == (100, 50.5, 99.01)
    assert (stats.stage_p50_ms, stats.dropped) == ({"infer": 25.25}, {"busy": 3})
    assert metrics.take({}).frames == 0


def test_percentiles_are_those_of_numpy(rng):
    for count in (1, 2, 3, 29, 30, 100, 999, *rng.integers(1, 1000, 50)):
        values = rng.uniform(0.0, 50.0, count).round(int(rng.integers(0, 9))).tolist()
        metrics = Metrics()
        for value in values:
            metrics.add({}, value)
        stats = metrics.take({})
        ours = stats.latency_p50_ms, stats.latency_p99_ms, stats.recent_p95_ms
        assert ours == tuple(round(float(np.percentile(values, one)), 3) for one in (50, 99, 95))


# --- with a real engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    model = colour_model(folder / "colours.onnx")
    path = folder / "model.engine"
    build_engine(model, "laptop", path, BuildOptions(precision="fp32"))
    return path


def folder_of(tmp_path, engine, uri, source="", sinks=""):
    """The folder of an unpacked bundle."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "model.engine").symlink_to(engine)
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    text = COLOUR_TOML.format(uri=uri, source=source, sinks=sinks)
    (folder / "pipeline.toml").write_text(text)
    return folder


def test_engine_gives_what_the_reference_gives(engine):
    rng = np.random.default_rng(11)
    feeds = {"images": rng.random((1, 3, 64, 64), np.float32)}
    expected = ColourDetector().infer(feeds)
    with open_engine(engine) as opened, Session(opened) as session:
        outputs = session.infer(feeds)
    for name, array in expected.items():
        np.testing.assert_allclose(outputs[name], array, atol=1e-5)


def finish(process, seconds=30):
    out, err = process.communicate(timeout=seconds)
    return [decode_message(line) for line in out.splitlines()], err.decode(), process.returncode


def test_process_says_ready_result_stats_and_nothing_else(tmp_path, engine):
    folder = write_images(tmp_path / "in", *[(i, 2, "green") for i in range(5)])
    bundle = folder_of(tmp_path, engine, folder)
    process = python_m_pipelines("--bundle", bundle, "--profile", "laptop", "--frames", 4)
    messages, err, status = finish(process)
    assert status == 0, err
    ready, result, stats = (m for m in messages if not isinstance(m, Heartbeat))
    assert (type(ready), type(result), type(stats)) == (Ready, Result, Stats)
    with open_engine(engine) as opened:
        assert ready.engine_sha256 == opened.sha256
    assert "portable" in ready.segments[0]
    assert stats.frames == 4


def test_process_takes_the_files_that_pipeline_toml_names(tmp_path, engine):
    folder = write_images(tmp_path / "in", *[(i, 2, "green") for i in range(3)])
    bundle = folder_of(tmp_path, engine, folder)
    models = tmp_path / "models"
    models.mkdir()
    (bundle / ENGINE).rename(models / "colours.engine")
    (bundle / "labels.txt").rename(models / "names.txt")
    text = (bundle / PIPELINE).read_text()
    named = 'engine = "../models/colours.engine"\nlabels = "../models/names.txt"\n'
    (bundle / PIPELINE).write_text(named + text)
    messages, err, status = finish(
        python_m_pipelines("--bundle", bundle, "--profile", "laptop", "--frames", 2)
    )
    assert status == 0, err
    assert messages[-1].frames == 2
    # A real bundle has its own files; what its pipeline.toml names was where it was packed.
    write_bundle(
        tmp_path / "b.bundle", engine=models / "colours.engine", pipeline=bundle / PIPELINE,
        labels=models / "names.txt", name="colours", version="1", profile="laptop",
    )  # fmt: skip
    extract_bundle(tmp_path / "b.bundle", tmp_path / "out")
    (models / "colours.engine").unlink()
    messages, err, status = finish(
        python_m_pipelines("--bundle", tmp_path / "out", "--profile", "laptop", "--frames", 2)
    )
    assert status == 0, err
    assert messages[-1].frames == 2


def test_stray_output_of_libraries_goes_to_standard_error(tmp_path, engine):
    path = write_video(tmp_path / "v.mp4", [scene(5, 1)] * 20, fps=20.0)
    bundle = folder_of(tmp_path, engine, path, "loop = true")
    # C code writes to the descriptor itself, as this does, until the process ends.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading, time\n"
        "def chatter():\n"
        "    while True:\n"
        "        time.sleep(0.02)\n"
        "        if 'pipelines.runtime.pipeline' in __import__('sys').modules:\n"
        "            os.write(1, b'stray')\n"
        "threading.Thread(target=chatter, daemon=True).start()\n"
    )
    arguments = ("--bundle", bundle, "--profile", "laptop", "--frames", 10)
    process = python_m_pipelines(*arguments, PYTHONPATH=str(tmp_path))
    messages, err, status = finish(process)
    assert status == 0
    assert [type(m) for m in messages if not isinstance(m, Heartbeat)] == [Ready, Result, Stats]
    assert "stray" in err


def test_process_publishes_what_it_sees(tmp_path, engine):
    path = write_video(tmp_path / "v.mp4", [scene(5, 1)] * 20, fps=20.0)
    bundle = folder_of(tmp_path, engine, path, "loop = true", '[[sinks]]\nkind = "mqtt"')
    with mosquitto(tmp_path) as (port, _), subscriber(port) as seen:
        process = python_m_pipelines(
            *("--bundle", bundle, "--profile", "laptop", "--mqtt-host", "127.0.0.1"),
            *("--mqtt-port", port, "--topic-prefix", "fleet/v1/robot-1"),
        )
        wait_for(lambda: len(seen) >= 10, PATIENCE_S, "ten messages")
        process.send_signal(signal.SIGTERM)
        stopped = time.monotonic()
        messages, err, status = finish(process)
        assert time.monotonic() - stopped < 5.0  # then the agent kills it
    assert status == 0, err
    assert isinstance(messages[-1], Stats)
    events = [json.loads(message.payload) for message in seen]
    labels = [[detection["label"] for detection in event["detections"]] for event in events]
    assert labels == [["red"]] * len(events), events
    np.testing.assert_allclose(events[-1]["detections"][0]["box"], [40, 8, 48, 16], atol=0.1)


def test_sigterm_ends_a_process_whose_camera_is_away(tmp_path, engine):
    with rtsp_server() as server:
        bundle = folder_of(tmp_path, engine, "nowhere", "stall_s = 0.5")
        process = python_m_pipelines(
            "--bundle", bundle, "--profile", "laptop", "--source", server.url
        )
        lines = iter(process.stdout.readline, b"")
        while not isinstance(decode_message(next(lines)), Result):
            pass
    while decode_message(next(lines)).frames > 0:  # figures come without frames too
        pass
    process.send_signal(signal.SIGTERM)
    _, err, status = finish(process)
    assert status == 0, err
    reasons = ("nothing answers there", "the stream ended", "broke off", "gave no frame")
    assert any(reason in err for reason in reasons), err


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda b: (b / "labels.txt").write_text("red\n"), "2 classes but labels.txt names 1"),
        (lambda b: (b / "pipeline.toml").unlink(), "pipeline.toml cannot be read"),
        (lambda b: (b / "model.engine").unlink(), "model.engine"),
        (lambda b: None, "no such file or folder"),
    ],
)
def test_process_reports_a_failure_and_exits_with_one(tmp_path, engine, spoil, says):
    bundle = folder_of(tmp_path, engine, "/nonexistent.mp4")
    spoil(bundle)
    messages, err, status = finish(python_m_pipelines("--bundle", bundle, "--profile", "laptop"))
    assert status == 1
    assert isinstance(messages[-1], Failure)
    assert says in messages[-1].message
    assert "Traceback" not in err


def test_a_release_may_not_bring_gstreamer_elements(tmp_path, engine):
    address = "gst://videotestsrc num-buffers=1 ! video/x-raw,width=64,height=64"
    bundle = folder_of(tmp_path, engine, address)
    command = ("--bundle", bundle, "--profile", "laptop", "--frames", "1")
    messages, _, status = finish(python_m_pipelines(*command, "--data", tmp_path / "data"))
    assert status == 1
    assert "a release may not bring GStreamer elements" in messages[-1].message
    messages, err, status = finish(python_m_pipelines(*command))
    assert status == 0, err


def test_engine_of_another_profile_is_refused(tmp_path, engine):
    bundle = folder_of(tmp_path, engine, "/nonexistent.mp4")
    process = python_m_pipelines("--bundle", bundle, "--profile", "orin-nano-8gb")
    messages, _, status = finish(process)
    assert status == 1
    assert "orin-nano-8gb" in messages[-1].message


def test_missing_opencv_is_one_sentence(tmp_path, engine):
    bundle = folder_of(tmp_path, engine, "/nonexistent.mp4")
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1 is missing')\n")
    process = python_m_pipelines(
        "--bundle", bundle, "--profile", "laptop", PYTHONPATH=str(tmp_path)
    )
    messages, _, status = finish(process)
    assert status == 1
    assert "libGL.so.1 is missing" in messages[-1].message
    assert pip_install("camera") in messages[-1].message


def test_process_whose_listener_is_gone_ends(tmp_path, engine):
    path = write_video(tmp_path / "v.mp4", [scene(5, 1)] * 20, fps=20.0)
    bundle = folder_of(tmp_path, engine, path, "loop = true")
    process = python_m_pipelines("--bundle", bundle, "--profile", "laptop")
    next_line(process)
    process.stdout.close()
    assert process.wait(10) == 0
    process.stderr.close()


# --- tandem run


def invoke(*arguments):
    return CliRunner().invoke(run_command, [str(a) for a in arguments], catch_exceptions=False)


def test_run_command_runs_a_bundle_and_writes_video_and_events(tmp_path, engine):
    cells = write_images(tmp_path / "in", *[(i, 3, "red") for i in range(6)])
    folder = folder_of(tmp_path, engine, "/nonexistent", sinks='[[sinks]]\nkind = "mqtt"')
    bundle = tmp_path / "colours.bundle"
    write_bundle(
        bundle,
        engine=folder / "model.engine",
        pipeline=folder / "pipeline.toml",
        labels=folder / "labels.txt",
        name="colours",
        version="1",
        profile="laptop",
    )
    video, events = tmp_path / "out.mp4", tmp_path / "out.jsonl"
    trace = tmp_path / "trace.json"
    outputs = ("--video", video, "--jsonl", events, "--trace", trace)
    result = invoke(bundle, "--source", cells, *outputs)
    assert result.exit_code == 0, result.output
    assert "portable" in result.output
    assert "6 frames" in result.output
    assert len(events.read_text().splitlines()) == 6
    assert cv2.VideoCapture(str(video)).get(cv2.CAP_PROP_FRAME_COUNT) == 6
    bars = [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == "X"]
    assert [one["name"] for one in bars].count("infer") == 6


def test_run_command_says_that_it_leaves_mqtt_out(tmp_path, engine):
    cells = write_images(tmp_path / "in", (0, 3, "red"))
    folder = folder_of(tmp_path, engine, cells, sinks='[[sinks]]\nkind = "mqtt"\n')
    result = invoke(folder, "--json")
    assert result.exit_code == 0, result.output
    assert "The mqtt sink is left out" in result.stderr


def test_run_command_sums_up_as_json(tmp_path, engine):
    cells = write_images(tmp_path / "in", *[(i, 3, "red") for i in range(6)])
    folder = folder_of(tmp_path, engine, cells)
    arguments = ("--pipeline", folder / "pipeline.toml", "--labels", folder / "labels.txt")
    result = invoke(engine, *arguments, "--frames", 5, "--json", "--preview", ":0")
    assert result.exit_code == 0, result.output
    assert "preview: http://127.0.0.1:" in result.stderr
    summary = json.loads(result.stdout)
    assert summary["stats"]["frames"] == 5
    assert summary["last"]["detections"][0]["label"] == "red"
    assert set(summary["stats"]["stage_p50_ms"]) == {
        *("wait", "preprocess", "queue", "infer", "collect", "decode"),
    }
    assert summary["stats"]["processors"] == {"cpu": 5}


def test_run_command_asks_for_what_an_engine_lacks(engine):
    result = invoke(engine)
    assert result.exit_code == 2
    assert "give --pipeline and --labels" in result.output


def test_ctrl_c_finishes_the_video(tmp_path, engine):
    path = write_video(tmp_path / "v.mp4", [scene(5, 1)] * 20, fps=20.0)
    bundle = folder_of(tmp_path, engine, path, "loop = true")
    code = "from toolkit.cli.commands.run import run; run()"
    out = tmp_path / "out.mp4"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(bundle), "--video", str(out), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    wait_for(lambda: out.exists() and out.stat().st_size > 0, PATIENCE_S, "the video begins")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    text, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    frames = json.loads(text)["stats"]["frames"]
    assert cv2.VideoCapture(str(out)).get(cv2.CAP_PROP_FRAME_COUNT) == frames > 3


def test_stages_cost_little_beside_the_engine(tmp_path):
    """A loose bound that only a lost fast path breaks: 640x360 took 0.6 ms here."""
    cv2.imwrite(str(tmp_path / "a.png"), gray_frame(90, 640, 360))
    config = colour_pipeline(tmp_path, loop=True)
    stats = run_all(config, frames=60)[1][-1]
    overhead = sum(stats.stage_p50_ms[s] for s in ("preprocess", "decode", "sinks"))
    assert overhead < 10.0


def test_grid_of_the_shipped_pipeline_has_the_cells_of_its_input():
    from pipelines.config import load_pipeline
    from pipelines.stages.decoders.grid import cell_count

    root = Path(__file__).parents[2]
    config = load_pipeline(root / "configs" / "pipelines" / "robot-objects.toml")
    assert isinstance(config.decode, LtrbGrid)
    assert cell_count(config.decode.strides, 320, 320) == 40 * 40 + 20 * 20 + 10 * 10
