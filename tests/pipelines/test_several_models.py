"""Several models in one pipeline: beside each other, on crops, in place of each other."""

import json
import re
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
from cli_fixtures import invoke
from several_models_fixtures import (
    DEEP,
    DETECTOR,
    GREEN,
    HEAD,
    ON_RED,
    PALE,
    SHADE,
    SHADES,
    SPARE,
    ShadeClassifier,
    config_of,
    pictures,
    shade_model,
)
from video_fixtures import (
    LABELS,
    PATIENCE_S,
    Blocks,
    ColourDetector,
    colour_model,
    python_m_pipelines,
    scene,
)

from device.agent.config import load_agent_config
from device.agent.pipeline_process import PIPELINE
from device.agent.pipeline_runner import PipelineRunner
from device.engine.manifest import DimRange
from device.errors import ConfigError, PipelineError
from device.protocol.messages import ChildMessage, Heartbeat, Ready, Reload, decode_message
from pipelines.config import PipelineConfig, parse_pipeline
from pipelines.model_config import PipelineModel
from pipelines.results import NO_TRACK, Attribute, Detections
from pipelines.runtime.batch import Model
from pipelines.runtime.load_control import LoadControl
from pipelines.runtime.pipeline import RunOptions, iter_results, run_pipeline
from pipelines.runtime.trace import TraceWriter
from pipelines.sinks.table import FrameResult
from pipelines.sinks.track_lifecycle import TrackLifecycle
from pipelines.stages.crops import Describer
from pipelines.stages.zones import NO_ZONES
from toolkit.engine.build import BuildOptions, build_engine


def run_all(
    config: PipelineConfig, others: Mapping[str, Model]
) -> tuple[list[FrameResult], list[ChildMessage]]:
    results: list[FrameResult] = []
    messages: list[ChildMessage] = []
    run_pipeline(
        config,
        Model(ColourDetector(), LABELS, "0" * 64),
        RunOptions(emit=messages.append, others=others),
        watch=results.append,
    )
    return results, messages


def test_a_classifier_describes_the_objects_of_a_detector(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "in", {(1, 1): PALE, (5, 5): DEEP, (2, 6): GREEN})
    classifier = ShadeClassifier()
    shade = Model(classifier, SHADES, "")
    (result,), messages = run_all(config_of(DETECTOR + ON_RED, folder), {"shade": shade})
    values = {one.box[:2]: one.attributes for one in result.event.detections if one.box}
    assert values[16.0, 48.0] is msgspec.UNSET  # it is green
    assert values[8.0, 8.0]["shade"].label == "bright"
    assert values[40.0, 40.0]["shade"].label == "dark"
    row = next(one for one in json.loads(result.payload)["detections"] if one["box"][0] == 8.0)
    assert row["attributes"] == {"shade": {"label": "bright", "score": 1.0, "class_id": 1}}
    assert classifier.sizes == [2, 2, 2]  # the warm-up, and both crops in one inference
    assert result.event.processors == ("cpu", "dla0")
    assert result.event.latency_ms["shade"] > 0.0
    (ready,) = [one for one in messages if isinstance(one, Ready)]
    assert [segment.split(":")[0] for segment in ready.segments] == ["detector", "shade"]


def test_models_beside_each_other_see_the_same_frames_at_the_same_time(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "in", *[{(i, 3): PALE} for i in range(4)])
    beside = DETECTOR.replace('"detector"', '"second"') + "score_threshold = 0.5\n"
    beside = beside.replace("score_threshold = 0.5\n", "score_threshold = 0.99\n", 1)
    beside = beside.removesuffix("score_threshold = 0.5\n")
    running: list[str] = []
    together: list[int] = []

    class Watching(ColourDetector):
        def infer(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            running.append("x")
            time.sleep(0.05)
            together.append(len(running))
            outputs = super().infer(feeds)
            running.pop()
            return outputs

    results: list[FrameResult] = []
    run_pipeline(
        config_of(DETECTOR + beside, folder),
        Model(Watching(), LABELS, ""),
        RunOptions(others={"second": Model(Watching(), LABELS, "")}),
        watch=results.append,
    )
    assert max(together) == 2
    trace = tmp_path / "trace.json"
    with TraceWriter(trace) as writer:
        writer.add(results[0])
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {one["tid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    second = [one for one in events if one["name"] == "second"]
    assert [rows[one["tid"]] for one in second] == ["yard: second", "cpu"]  # not behind the first
    assert second[0]["ts"] <= second[1]["ts"]
    assert second[0]["dur"] >= second[1]["dur"] > 0.0
    assert [one.frame.seq for one in results] == [0, 1, 2, 3]
    for i, result in enumerate(results):
        assert [one.box for one in result.event.detections] == [(8.0 * i, 24.0, 8.0 * i + 8, 32.0)]
        assert result.event.models["second"].detections == ()  # below its own threshold
        assert set(result.models) == {"second"}


def test_a_model_beside_has_a_rate_and_cameras_of_its_own(tmp_path: Path) -> None:
    for name in ("front", "rear"):
        pictures(tmp_path / name, *[{(i, 3): PALE} for i in range(6)])
    frame_shade = SHADE.format(
        keys='every_nth = 3\ncameras = ["rear"]',
        kind="classification",
        decode='scores = "p"\nsoftmax = false',
    )
    sources = "".join(
        f'[[sources]]\nid = "{name}"\nuri = "{tmp_path / name}"\nframes = "every"\n'
        for name in ("front", "rear")
    )
    config = parse_pipeline(f'name = "yard"\n{sources}{DETECTOR}{frame_shade}', Path("p.toml"))
    results, _ = run_all(config, {"shade": Model(ShadeClassifier(), SHADES, "")})
    seen = sorted(
        (one.frame.camera, one.frame.seq)
        for one in results
        if one.event.models is not msgspec.UNSET
    )
    assert seen == [("rear", 0), ("rear", 3)]
    assert all(len(one.event.detections) == 1 for one in results)
    (camera_alone,) = {one.event.models["shade"].detections[0].box for one in results if one.models}
    assert camera_alone is None  # a class of the whole frame


def tracked(*rows: tuple[int, float]) -> Detections:
    """Objects of class 0 side by side: track and score."""
    left = np.arange(len(rows), dtype=np.float32) * 10
    boxes = np.stack([left, left * 0, left + 8, left * 0 + 8], 1)
    ids, scores = np.array([row[0] for row in rows]), np.array([row[1] for row in rows], np.float32)
    return Detections(boxes, scores, np.zeros(len(rows), np.int64), ids.astype(np.int64))


def test_tracks_are_described_in_turn_and_keep_what_was_said() -> None:
    describer = Describer(PipelineModel(name="shade", on="detector", max_crops=1), ("red",))
    dark = Attribute("dark", 0.9, 0)
    first = tracked((1, 0.9), (2, 0.8))
    assert describer.choose(first) == [0]
    assert describer.describe(first, [0], [dark]).attributes == ({"shade": dark}, {})
    assert describer.choose(first) == [1]
    assert describer.describe(first, [1], [None]).attributes == ({"shade": dark}, {})
    assert describer.choose(first) == [0]  # longest ago
    turned = tracked((2, 0.9), (1, 0.8))
    assert describer.describe(turned, [], []).attributes == ({}, {"shade": dark})
    assert describer.choose(tracked((NO_TRACK, 0.1), (1, 0.8))) == [0]


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        ({}, [0, 1, 2]),
        ({"max_crops": 2}, [0, 1]),
        ({"min_score": 0.8}, [0, 1]),
        ({"min_score": 0.81}, [0]),
        ({"classes": ("red",)}, [0, 1, 2]),
        ({"classes": ("green",)}, []),
    ],
)
def test_which_objects_are_cut_out(keys: dict[str, object], chosen: list[int]) -> None:
    model = msgspec.convert({"name": "shade", "on": "detector", **keys}, PipelineModel)
    objects = tracked((NO_TRACK, 0.9), (NO_TRACK, 0.8), (NO_TRACK, 0.7))
    assert Describer(model, ("red", "green")).choose(objects) == chosen


def test_the_life_of_an_object_has_its_attributes_and_tells_of_another_one() -> None:
    lives = TrackLifecycle("", ("red",), 1.0)

    def seen(label: str, time_s: float) -> list[tuple[str, str]]:
        one = tracked((1, 0.9))
        one = described(one, ({"shade": Attribute(label, 0.9, 0)},))
        events = lives.update(one, NO_ZONES, int(time_s * 1e9))
        return [(event.type, event.after.attributes["shade"].label) for event in events]

    assert seen("dark", 100.0) == [("new", "dark")]
    assert seen("bright", 100.5) == []  # at most one update a second
    assert seen("bright", 101.0) == [("update", "bright")]


def described(objects: Detections, attributes: tuple[dict[str, Attribute], ...]) -> Detections:
    return Detections(
        objects.boxes,
        objects.scores,
        objects.class_ids,
        objects.track_ids,
        attributes=attributes,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DETECTOR + DETECTOR, "two [[models]] are called 'detector'"),
        (DETECTOR.replace('"detector"', '"infer"'), "'infer' is the name of a stage"),
        (DETECTOR + ON_RED.replace('on = "detector"', 'on = "detectr"'), "use one of detector"),
        (DETECTOR + ON_RED.replace('on = "detector"', 'on = "shade"'), "circle (shade -> shade)"),
        (
            DETECTOR
            + ON_RED.replace('on = "detector"', 'on = "b"')
            + ON_RED.replace('"shade"', '"b"').replace('on = "detector"', 'on = "shade"'),
            "circle (shade -> b -> shade)",
        ),
        (
            DETECTOR + ON_RED + ON_RED.replace('"shade"', '"b"').replace('"detector"', '"shade"'),
            "objects of 'shade', which gives no boxes",
        ),
        (
            DETECTOR
            + DETECTOR.replace('"detector"', '"b"\non = "detector"'),
            "'ltrb_grid' says nothing of one object: use 'classification' or 'text_recognition'",
        ),
        (ON_RED + DETECTOR, "'shade' is the first of [[models]], which every frame is for"),
        (DETECTOR.replace("labels =", "max_crops = 3\nlabels ="), "`max_crops`, which is for"),
        (DETECTOR + ON_RED.replace("max_crops", "every_nth"), "`every_nth`, and its crops follow"),
        (DETECTOR + SPARE.replace('"detector"', '"none"'), "replaces = 'none', which is none of"),
        (DETECTOR + SPARE + SPARE.replace('"small"', '"b"').replace('"detector"', '"small"'),
         "replaces 'small', which replaces another"),
        (
            DETECTOR + SPARE + "[models.decode]\nkind = 'classification'\nscores = 'p'\n",
            "what they give must be of one kind",
        ),
        (DETECTOR + '[[models]]\nname = "b"\n', "the model 'b' has no [models.preprocess]"),
        (DETECTOR + SPARE + "max_hz = 3\n", "`max_hz`, which it has from the model"),
        (DETECTOR + SPARE + "[load]\nhot_c = 80\nsteps = [{use = ['smal']}]", "[load] uses 'smal'"),
        (
            DETECTOR + SPARE + SPARE.replace('"small"', '"b"')
            + "[load]\nhot_c = 80\nsteps = [{use = ['small', 'b']}]",
            "which replace one model",
        ),
        (
            DETECTOR + SHADE.format(keys="cameras = ['x']", kind="depth", decode=""),
            "sees the camera 'x', which is no id",
        ),
        ("[preprocess]\nwidth = 8\nheight = 8\n" + DETECTOR, "[[models]] have 'preprocess' each"),
        ("", "it has no 'preprocess': add it, or [[models]]"),
    ],
)  # fmt: skip
def test_models_that_do_not_go_together_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(text)
    assert says in str(caught.value)


def test_engines_that_do_not_fit_are_named_with_their_model(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "in", {})
    config = config_of(DETECTOR + ON_RED, folder)
    with pytest.raises(PipelineError, match="'shade' of pipeline 'yard' has no engine"):
        run_all(config, {})
    with pytest.raises(PipelineError, match=r"model 'shade': .* 2 classes but labels.txt names 3"):
        run_all(config, {"shade": Model(ShadeClassifier(), ("a", "b", "c"), "")})
    config = config_of(DETECTOR + ON_RED.replace('"red"', '"blue"'), folder)
    with pytest.raises(PipelineError, match="crops of the class 'blue', which is none of the lab"):
        run_all(config, {"shade": Model(ShadeClassifier(), SHADES, "")})
    config = config_of(DETECTOR + SPARE, folder)
    with pytest.raises(PipelineError, match="'small' has other labels than 'detector'"):
        run_all(config, {"small": Model(ColourDetector(), ("a", "b"), "")})


def test_a_hot_board_runs_the_other_engine_and_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.runtime.load_control.PERIOD_S", 0.02)
    zone = tmp_path / "sys/class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("tj-thermal\n")
    (zone / "temp").write_text("45000\n")
    monkeypatch.setattr(
        "pipelines.runtime.pipeline.LoadControl",
        lambda load, use: LoadControl(load, tmp_path / "sys", use),
    )
    (tmp_path / "in").mkdir()
    cv2.imwrite(str(tmp_path / "in" / "0.png"), scene(2, 3))
    load = "[load]\nhot_c = 80\nhold_s = 0\nrecover_s = 0\nsteps = [{use = ['small']}]\n"
    config = config_of(DETECTOR + SPARE + load, f"images://{tmp_path}/in?fps=200")
    assert config.source is not msgspec.UNSET
    config = msgspec.structs.replace(
        config, source=msgspec.structs.replace(config.source, loop=True)
    )

    class OnDla(ColourDetector):
        reports = (Blocks(processor="dla0", runs_on=("dla0",)),)

    messages: list[ChildMessage] = []
    stop = threading.Event()
    processors: list[tuple[str, ...]] = []
    numbers: list[int] = []
    for result in iter_results(
        config,
        Model(ColourDetector(), LABELS, ""),
        RunOptions(emit=messages.append, stop=stop, others={"small": Model(OnDla(), LABELS, "")}),
    ):
        numbers.append(result.frame.seq)
        assert len(result.event.detections) == 1
        if not processors or processors[-1] != result.event.processors:
            processors.append(result.event.processors)
        if len(processors) < 3:  # hot once the first engine has run, cool once the other one has
            degrees = "91000" if processors[-1] == ("cpu",) else "45000"
            (zone / "temp").write_text(f"{degrees}\n")
        if len(processors) == 3 or len(numbers) > 3000:
            break
    assert processors == [("cpu",), ("dla0",), ("cpu",)]
    assert numbers == list(range(len(numbers)))  # no frame is lost by the switch
    values = {one.load for one in messages if isinstance(one, Heartbeat)}
    assert "step 1 of 1 (with small): 91.0 C is above hot_c = 80" in values


# --- with real engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pipeline of two real engines, and pictures."""
    place = tmp_path_factory.mktemp("several")
    options = BuildOptions(precision="fp32")
    build_engine(colour_model(place / "c.onnx"), "laptop", place / "colours.engine", options)
    dims = (DimRange(name="N", min=1, opt=2, max=4),)
    build_engine(
        shade_model(place / "s.onnx"),
        "laptop",
        place / "shade.engine",
        BuildOptions(precision="fp32", dims=dims),
    )
    (place / "labels.txt").write_text("red\ngreen\n")
    (place / "shades.txt").write_text("dark\nbright\n")
    pictures(place / "in", {(1, 1): PALE, (5, 5): DEEP}, {(2, 2): DEEP})
    text = HEAD.format(uri=place / "in") + DETECTOR + ON_RED.replace("softmax = false", "")
    (place / "yard.toml").write_text(text)
    return place


def test_the_command_runs_several_engines_from_the_pipelines_own_files(folder: Path) -> None:
    out = folder / "seen.jsonl"
    result = invoke("run", folder / "yard.toml", "--jsonl", out, "--overwrite", "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line)["detections"] for line in out.read_text().splitlines()]
    shades = [sorted(one["attributes"]["shade"]["label"] for one in row) for row in rows]
    assert shades == [["bright", "dark"], ["dark"]]
    summary = json.loads(result.stdout)
    assert [one.split(":")[0] for one in summary["segments"]] == ["detector", "shade"]


def test_the_command_line_names_other_engines(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.engine"
    moved.symlink_to(folder / "shade.engine")
    text = (folder / "yard.toml").read_text().replace('"shade.engine"', '"none.engine"')
    text = text.replace('engine = "colours.engine"\nlabels = "labels.txt"\n', "")
    (tmp_path / "p.toml").write_text(text)
    (tmp_path / "shades.txt").write_text("dark\nbright\n")
    here = ("run", tmp_path / "p.toml", "--labels", folder / "labels.txt", "--json")
    shade = ("--model", f"shade={moved}")
    says = str(invoke(*here).exception)
    assert "model 'detector' of pipeline 'yard' has no `engine`" in says
    assert "`tandem run PIPELINE.toml --model detector=ENGINE`" in says
    named = ("--model", f"detector={folder / 'colours.engine'}")
    assert "none.engine" in str(invoke(*here, *named).exception)
    done = invoke(*here, *named, *shade)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["stats"]["frames"] == 2
    assert "has no model 'shad'" in str(invoke(*here, "--model", "shad=x").exception)
    assert "is not NAME=FILE" in invoke(*here, "--model", "shade").output


def test_a_check_looks_at_all_engines_that_the_file_names(folder: Path, tmp_path: Path) -> None:
    done = invoke("pipeline", "check", folder / "yard.toml")
    assert done.exit_code == 0, done.output
    assert "decodes ltrb_grid, classification on detector" in done.output
    assert [line.split(" ")[1] for line in done.output.splitlines()[1:]] == ["fits", "fits"]
    wrong = ("--model", f"shade={folder / 'colours.engine'}")
    assert "model 'shade': the engine's input 'images'" in str(
        invoke("pipeline", "check", folder / "yard.toml", *wrong).exception
    )


def test_the_examples_of_the_page_are_pipelines() -> None:
    page = (Path(__file__).parents[2] / "docs" / "several_models.md").read_text()
    whole, chosen, more = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert parse_pipeline(whole + chosen, Path("yard.toml")).followed.name == "detector"
    assert [one.on for one in parse_pipeline(whole, Path("yard.toml")).networks] == ["", "detector"]
    jsonschema = pytest.importorskip("jsonschema")
    tomllib = pytest.importorskip("tomllib")
    validator = jsonschema.Draft202012Validator(json.loads(invoke("pipeline", "schema").stdout))
    assert list(validator.iter_errors(tomllib.loads(whole + more))) == []
    assert list(validator.iter_errors(tomllib.loads(whole + "speed = 1"))) != []
    spare = parse_pipeline(whole + more, Path("yard.toml")).networks[2]
    assert spare.feeding.width == 640
    assert spare.labels == "detector.labels.txt"


def test_a_process_runs_a_folder_and_takes_a_change_at_a_hangup(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("colours.engine", "shade.engine", "labels.txt", "shades.txt"):
        (tmp_path / name).symlink_to(folder / name)
    text = (folder / "yard.toml").read_text()
    text = text.replace(f'"{folder}/in"', f'"images://{folder}/in?fps=50"\nloop = true')
    path = tmp_path / "pipeline.toml"
    path.write_text(text)
    process = python_m_pipelines("--bundle", tmp_path, "--profile", "laptop")
    lines = (decode_message(line) for line in iter(process.stdout.readline, b""))
    try:
        next(one for one in lines if isinstance(one, Heartbeat) and one.frames > 0)
        path.write_text(text.replace("max_crops = 2", "max_crops = 1"))
        process.send_signal(signal.SIGHUP)
        values = next(one for one in lines if isinstance(one, Reload))
        assert values.changes == ("models[1].max_crops: 2 -> 1",)
        next(one for one in lines if isinstance(one, Heartbeat))
    finally:
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err


def test_the_agent_gives_a_process_the_address_of_each_camera(folder: Path, tmp_path: Path) -> None:
    board = tmp_path / "agent.toml"
    places = "".join(f"[sources.{name}]\nuri = '{folder}/in'\n" for name in ("left", "right"))
    head = 'device = "b"\nprofile = "laptop"\nstate_dir = "s"\ndev = true\n[broker]\nhost = "h"\n'
    board.write_text(head + places)
    runner = PipelineRunner(load_agent_config(board), "fleet/v1/b", PIPELINE, lambda event: None)
    given = runner._environment()
    for name in ("colours.engine", "labels.txt"):
        (tmp_path / name).symlink_to(folder / name)
    sources = '[[sources]]\nid = "left"\nuri = "/none"\n[[sources]]\nid = "right"\nuri = "/none"\n'
    sinks = f'[[sinks]]\nkind = "jsonl"\npath = "{tmp_path}/s.jsonl"\n'
    (tmp_path / "pipeline.toml").write_text(f'name = "yard"\n{sources}{DETECTOR}{sinks}')
    (tmp_path / "model.engine").symlink_to(folder / "colours.engine")
    process = python_m_pipelines("--bundle", tmp_path, "--profile", "laptop", **given)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert sorted((row["camera"], row["seq"]) for row in rows) == [
        ("left", 0),
        ("left", 1),
        ("right", 0),
        ("right", 1),
    ]
