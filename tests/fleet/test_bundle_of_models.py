"""Several models as one release: packed, checked, transferred, prepared, compared, and run."""

import json
import queue
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cli_fixtures import invoke
from deploy_fixtures import deploy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, Mosquitto
from several_models_fixtures import DETECTOR, ON_RED, SPARE, pictures, shade_model
from tensorrt_fixtures import build, install
from video_fixtures import PATIENCE_S, colour_model, python_m_pipelines

import tandem as library
from device.agent import preparation
from device.agent.golden_check import GoldenCheck, GoldenEnded, golden_refusal
from device.agent.preparation import Preparation, PreparationEnded, PreparationEvent
from device.engine.manifest import DimRange
from device.errors import BundleError, ConfigError
from device.protocol.documents import InstallPolicy
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, Message
from device.protocol.topics import PipelineTopics, Topics
from device.update import members
from device.update.bundle import (
    BundleInfo,
    BundleModel,
    ModelSource,
    check_bundle,
    extract_bundle,
    hash_folder,
    member_offsets,
    verify_folder,
    write_bundle_of_models,
)
from device.update.members import MAX_MODELS, expected_members
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.transports.deploy import DeployOptions
from toolkit.fleet.trust.repository import FleetRepository

RED = (5, 5, 230)
MQTT = '[[sinks]]\nkind = "mqtt"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of a detector and a classifier with their real engines, for a laptop."""
    place = tmp_path_factory.mktemp("models")
    fp32 = BuildOptions(precision="fp32")
    build_engine(colour_model(place / "c.onnx"), "laptop", place / "colours.engine", fp32)
    dims = (DimRange(name="N", min=1, opt=2, max=4),)
    shade = BuildOptions(precision="fp32", dims=dims)
    build_engine(shade_model(place / "s.onnx"), "laptop", place / "shade.engine", shade)
    (place / "labels.txt").write_text("red\ngreen\n")
    (place / "shades.txt").write_text("dark\nbright\n")
    pictures(place / "in", {(1, 1): (90, 90, 250), (5, 5): RED}, {(2, 2): RED})
    write_pipeline(place)
    return place


def write_pipeline(folder: Path, *more: str, name: str = "yard.toml") -> Path:
    head = f'name = "yard"\n[source]\nuri = "{folder}/in"\nframes = "every"\n'
    cascade = DETECTOR + ON_RED.replace("softmax = false", "")
    (folder / name).write_text(head + cascade + "".join(more))
    return folder / name


@pytest.fixture(scope="module")
def cascade(folder: Path) -> Path:
    done = invoke(
        "bundle", folder / "colours.engine", folder / "shade.engine",
        "--pipeline", folder / "yard.toml",
        "--labels", folder / "labels.txt", "--labels", folder / "shades.txt",
        "--golden", 2, "--portable", "-o", folder / "yard.bundle",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "yard 0.1.0 for laptop, models detector, shade" in done.output
    return folder / "yard.bundle"


# -- the file


def test_a_bundle_holds_what_the_pipeline_names(cascade: Path, tmp_path: Path) -> None:
    info = extract_bundle(cascade, tmp_path / "out")
    assert [(one.name, one.engine, one.labels, one.golden) for one in info.models] == [
        ("detector", "detector.engine", "detector.labels.txt", "detector.golden.npz"),
        ("shade", "shade.engine", "shade.labels.txt", "shade.golden.npz"),
    ]
    assert info.format == 2
    assert info.golden is not None
    assert info.golden.samples == 2
    assert verify_folder(tmp_path / "out") == info == hash_folder(tmp_path / "out")[0]
    whole, first = cascade.read_bytes(), check_bundle(cascade)[1]
    offsets = member_offsets(info)
    assert first == offsets["detector.engine"]
    for entry in info.files:
        start = offsets[entry.name]
        assert whole[start : start + entry.bytes] == (tmp_path / "out" / entry.name).read_bytes()


def test_the_pipeline_alone_says_all_and_the_bytes_are_the_same(
    folder: Path, cascade: Path, tmp_path: Path
) -> None:
    out = tmp_path / "b"
    done = invoke("bundle", "--pipeline", folder / "yard.toml", "--golden", 2, "--portable",
                  "-o", out)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert out.read_bytes() == cascade.read_bytes()


def test_the_commands_of_the_page_write_bundles(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "several_models.md").read_text()
    commands = re.findall(r"^\$ tandem (bundle .*)$", page, re.MULTILINE)
    assert len(commands) == 2
    files = {"colours.engine": "detector.engine", "labels.txt": "detector.labels.txt",
             "shade.engine": "colour.engine", "shades.txt": "colour.labels.txt"}  # fmt: skip
    text = (folder / "yard.toml").read_text().replace('"shade"', '"colour"')
    for name, called in files.items():
        shutil.copy(folder / name, tmp_path / called)
        text = text.replace(f'"{name}"', f'"{called}"')
    (tmp_path / "yard.toml").write_text(text)
    shutil.copy(folder / "shade.engine", tmp_path / "better.engine")
    (tmp_path / "better.txt").write_text("dim\nbright\n")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        done = invoke(*command.split())
        assert done.exit_code == 0, done.output
    extract_bundle(tmp_path / "yard.bundle", tmp_path / "out")
    assert (tmp_path / "out" / "colour.labels.txt").read_text() == "dim\nbright\n"


def test_what_models_share_is_in_the_bundle_once(folder: Path, tmp_path: Path) -> None:
    spare = SPARE.replace("small.engine", "colours.engine") + "dla_core = 0\n"
    pipeline = write_pipeline(folder, spare, name="shared.toml")
    done = invoke("bundle", "--pipeline", pipeline, "--portable", "-o", tmp_path / "b")
    assert done.exit_code == 0, done.output
    info = extract_bundle(tmp_path / "b", tmp_path / "out")
    assert [(one.engine, one.labels) for one in info.models] == [
        ("detector.engine", "detector.labels.txt"),
        ("shade.engine", "shade.labels.txt"),
        ("detector.engine", "detector.labels.txt"),
    ]
    assert len(info.files) == 6  # two engines, two labels, the pipeline, the bill of materials
    assert {"detector.model", "shade.model"} <= info.hashes.keys()
    verified = invoke("bundle", "verify", tmp_path / "b", "--json")
    assert verified.exit_code == 0, verified.output
    view = json.loads(invoke("bundle", "inspect", tmp_path / "b", "--json").output)
    assert [engine["member"] for engine in view["engines"]] == ["detector.engine", "shade.engine"]
    assert list(view["labels"]) == ["detector.labels.txt", "shade.labels.txt"]
    done = invoke("run", tmp_path / "b", "--json")
    assert done.exit_code == 0, done.output


def test_each_file_of_a_bundle_that_two_models_share_runs(cascade: Path, tmp_path: Path) -> None:
    done = invoke("run", cascade, "--json", "--jsonl", tmp_path / "seen.jsonl")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line)["detections"] for line in (tmp_path / "seen.jsonl").open()]
    shades = [sorted(one["attributes"]["shade"]["label"] for one in row) for row in rows]
    assert shades == [["bright", "dark"], ["dark"]]
    results = list(library.Pipeline(cascade).results())
    assert [len(one.detections) for one in results] == [2, 1]


# -- refusals


def refused(folder: Path, tmp_path: Path, *arguments: object) -> str:
    done = invoke("bundle", *arguments, "-o", tmp_path / "none.bundle")
    assert isinstance(done.exception, (BundleError, ConfigError)), done.output
    assert not (tmp_path / "none.bundle").exists()
    return str(done.exception)


def test_what_is_missing_unused_or_wrong_is_refused(folder: Path, tmp_path: Path) -> None:
    yard = ("--pipeline", folder / "yard.toml")
    stray = tmp_path / "other.engine"
    shutil.copy(folder / "shade.engine", stray)

    def says(*arguments: object) -> str:
        return refused(folder, tmp_path, *arguments)

    unused = says(stray, *yard)
    assert "is engine of no model of pipeline 'yard'" in unused
    assert "colours.engine (detector), shade.engine (shade): write NAME=FILE" in unused
    assert "no model 'shad', use one of shade" in says(f"shad={stray}", *yard)
    assert "there is no file" in says("shade=/nowhere.engine", *yard)
    wrong = says(f"shade={folder / 'colours.engine'}", *yard)
    assert "do not fit together, so no bundle was written" in wrong
    assert "model 'shade': the engine's input 'images'" in wrong
    twice = says(f"shade={stray}", f"shade={folder / 'shade.engine'}", *yard)
    assert "as engine of the model 'shade': name one of them" in twice
    alone = tmp_path / "alone"
    alone.mkdir()
    text = (folder / "yard.toml").read_text().replace('engine = "shade.engine"\n', "")
    (alone / "p.toml").write_text(text)
    missing = says(folder / "colours.engine", "--labels", folder / "labels.txt",
                   "--labels", folder / "shades.txt", "--pipeline", alone / "p.toml")  # fmt: skip
    assert "model 'shade' of pipeline 'yard' has no engine: add `shade=FILE`" in missing
    absent = says(folder / "colours.engine", "--pipeline", alone / "p.toml")
    assert "names labels.txt as its labels, and there is no file" in absent
    assert "add `--labels detector=FILE`" in absent


def test_engines_for_two_profiles_are_refused(folder: Path, tmp_path: Path) -> None:
    options = BuildOptions(precision="fp32", kernels=False)
    build_engine(
        shade_model(tmp_path / "s.onnx"), "orin-nano-8gb", tmp_path / "shade.engine", options
    )
    message = refused(
        folder, tmp_path, tmp_path / "shade.engine", "--pipeline", folder / "yard.toml"
    )
    assert "is an engine for laptop, and" in message
    assert "one for orin-nano-8gb: build all engines of a bundle for one profile" in message


def test_a_single_model_needs_no_engine_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    text = f'name = "yard"\n[source]\nuri = "{folder}/in"\n{DETECTOR}'
    (folder / "one.toml").write_text(text)
    done = invoke("bundle", "--pipeline", folder / "one.toml", "-o", tmp_path / "b")
    assert done.exit_code == 0, done.output
    info, _ = check_bundle(tmp_path / "b")
    assert (info.format, info.models, info.name) == (1, (), "colours")


def sources(folder: Path, count: int) -> list[ModelSource]:
    (folder / "f").write_text("x")
    return [ModelSource(f"m{number}", folder / "f", folder / "f") for number in range(count)]


def write(folder: Path, rows: list[ModelSource]) -> BundleInfo:
    return write_bundle_of_models(
        folder / "b", models=rows, pipeline=folder / "f", name="n", version="1", profile="p"
    )


def test_so_many_models_and_bytes_are_allowed_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(write(tmp_path, sources(tmp_path, MAX_MODELS)).models) == MAX_MODELS
    with pytest.raises(BundleError, match=f"holds {MAX_MODELS + 1} models, allowed are 2 to"):
        write(tmp_path, sources(tmp_path, MAX_MODELS + 1))
    size = len((tmp_path / "b").read_bytes())
    monkeypatch.setattr("device.update.bundle.MAX_BUNDLE_BYTES", size)
    write(tmp_path, sources(tmp_path, MAX_MODELS))
    monkeypatch.setattr("device.update.bundle.MAX_BUNDLE_BYTES", size - 1)
    with pytest.raises(BundleError, match=f"has {size} bytes, a device fetches {size - 1} at most"):
        write(tmp_path, sources(tmp_path, MAX_MODELS))


ROWS = (BundleModel(name="a", engine="a.engine", labels="a.labels.txt"),
        BundleModel(name="b", engine="b.engine", labels="a.labels.txt"))  # fmt: skip


@pytest.mark.parametrize(
    ("key", "member"),
    [
        ("engine", "../evil.engine"),
        ("engine", "c.engine"),
        ("engine", "a.labels.txt"),
        ("labels", "pipeline.toml"),
        ("labels", "bundle.json"),
        ("engine", ""),
        ("golden", "b.golden.npz"),
    ],
)
def test_a_row_names_its_own_members_or_those_of_rows_before(key: str, member: str) -> None:
    names = expected_members(ROWS, Path("x"), golden=False)
    assert names == ("a.engine", "a.labels.txt", "b.engine", "pipeline.toml")
    hostile = msgspec.structs.replace(ROWS[1], **{key: member})
    with pytest.raises(BundleError, match=rf"names '{member}' as {key} of the model 'b'"):
        expected_members((ROWS[0], hostile), Path("x"), golden=False)
    with pytest.raises(BundleError, match="names a model twice"):
        expected_members((ROWS[0], ROWS[0]), Path("x"), golden=False)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_changed_bundle_raises_nothing_but_bundle_errors(
    cascade: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(cascade.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, 2600))
        length = data.draw(st.integers(0, 200))
        whole[start : start + length] = data.draw(st.binary(max_size=200))
    place = tmp_path_factory.mktemp("fuzz")
    (place / "b").write_bytes(whole)
    try:
        info = extract_bundle(place / "b", place / "out")
    except BundleError:
        return
    assert {path.name for path in (place / "out").iterdir()} == {
        members.INFO, *(entry.name for entry in info.files)
    }  # fmt: skip


def test_a_bundle_whose_pipeline_names_another_model_says_so(cascade: Path, tmp_path: Path) -> None:
    extract_bundle(cascade, tmp_path / "out")
    pipeline = tmp_path / "out" / "pipeline.toml"
    pipeline.write_text(pipeline.read_text().replace('name = "shade"', 'name = "tone"'))
    process = python_m_pipelines("--bundle", tmp_path / "out", "--profile", "laptop")
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    message = json.loads(out.splitlines()[-1])["message"]
    assert "has the model 'tone', which is none of the bundle's (detector, shade)" in message


# -- on the board


def ended(start: Callable[[GoldenCheck], bool], events: list[GoldenEnded]) -> GoldenEnded:
    check = GoldenCheck(events.append)
    assert start(check)
    end_s = time.monotonic() + WAIT_S * 3
    while not events:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return events[0]


def test_every_engine_is_compared_with_its_golden_inputs(cascade: Path, tmp_path: Path) -> None:
    slot = tmp_path / "slot"
    extract_bundle(cascade, slot)
    good = ended(lambda check: check.start(slot), [])
    assert good.result is not None, good.problem
    assert (good.result.samples, good.result.agreement) == (4, 1.0)
    # As if the board's classifier computed something else than the host's.
    with np.load(slot / "shade.golden.npz") as file:
        arrays = {name: file[name] for name in file.files}
    np.savez_compressed(
        slot / "shade.golden.npz",
        **{
            name: value + 9.0 if name.startswith("out") else value for name, value in arrays.items()
        },
    )
    bad = ended(lambda check: check.start(slot), [])
    assert bad.result is not None, bad.problem
    # The best class is the same; the output is far from what was recorded.
    assert (bad.result.noisiest, bad.result.agreement) == ("shade: p", 1.0)
    assert "its output shade: p differs" in (golden_refusal(bad, InstallPolicy()) or "")
    (slot / "shade.golden.npz").write_bytes(b"no")
    none = ended(lambda check: check.start(slot), [])
    assert none.result is None
    assert none.problem.startswith("shade: ")


def test_the_policy_holds_for_the_model_that_agrees_least(cascade: Path, tmp_path: Path) -> None:
    """By the bundle's limits the classifier may lose a lot; the policy asks all models for 90 %."""
    slot = tmp_path / "slot"
    info = extract_bundle(cascade, slot)
    assert info.golden is not None
    least = {"detector": 1.0, "shade": 0.1}
    limits = {
        name: msgspec.structs.replace(row, min_agreement=least[name], min_sqnr_db=-200.0)
        for name, row in info.golden.limits.items()
    }
    golden = msgspec.structs.replace(info.golden, limits=limits)
    info = msgspec.structs.replace(info, golden=golden)
    (slot / "bundle.json").write_bytes(msgspec.json.encode(info))
    with np.load(slot / "shade.golden.npz") as file:
        arrays = {name: file[name] for name in file.files}
    arrays["out_0_0"] = arrays["out_0_0"][..., ::-1]  # another class is the best
    np.savez_compressed(slot / "shade.golden.npz", **arrays)
    bundle_checks = ended(lambda check: check.start(slot), [])
    assert bundle_checks.result is not None, bundle_checks.problem
    assert golden_refusal(bundle_checks, InstallPolicy()) is None
    checks = ended(lambda check: check.start(slot, 0.9), [])
    assert checks.result is not None, checks.problem
    assert (checks.result.worst, checks.result.agreement) == ("shade", 0.5)
    reason = golden_refusal(checks, InstallPolicy(min_golden_agreement=0.9)) or ""
    assert "50.00% of the best classes of its output shade agree" in reason


def test_every_engine_is_finished_by_tensorrt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the double of TensorRT: two engines for a DLA, of which one is there twice."""
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setattr(preparation, "find_spec", lambda _: object())
    labels, text = tmp_path / "labels", tmp_path / "pipeline"
    labels.write_text("x\n")
    text.write_text("")
    engines = []
    for precision in ("int8", "fp16"):
        (tmp_path / precision).mkdir()
        engines.append(build(tmp_path / precision, precision=precision))
    rows = [
        ModelSource(name, engine, labels)
        for name, engine in zip("abc", (*engines, engines[0]), strict=True)
    ]
    write_bundle_of_models(
        tmp_path / "bundle", models=rows, pipeline=text, name="n", version="1", profile="p"
    )
    extract_bundle(tmp_path / "bundle", tmp_path / "slot")
    events: list[PreparationEvent] = []
    prepared = Preparation(
        events.append, tmp_path / "state", timeout_s=60.0, memory_mb=None, total_timeout_s=120.0
    )
    assert prepared.start(tmp_path / "slot")
    end_s = time.monotonic() + 120.0
    while not (events and isinstance(events[-1], PreparationEnded)):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    last = events[-1]
    assert isinstance(last, PreparationEnded)
    assert last.rows is not None, last.problem
    assert [(row.segment, row.problem) for row in last.rows] == [
        ("a: dla0.0", None),
        ("b: dla0.0", None),
        ("b: dla0.1", None),
    ]
    (tmp_path / "slot" / "bundle.json").write_bytes(b"{")
    assert not prepared.start(tmp_path / "slot")  # it is for the pipeline to say


def test_a_cascade_goes_from_its_fleet_to_detections(folder: Path, tmp_path: Path) -> None:
    """Published and signed, fetched by a real agent, compared, tried, live, and seen on MQTT."""
    pipeline = write_pipeline(folder, MQTT, name="board.toml")
    text = pipeline.read_text()
    pipeline.write_text(text.replace('frames = "every"', "loop = true"))
    bundle = tmp_path / "yard.bundle"
    done = invoke("bundle", "--pipeline", pipeline, "--golden", 1, "--portable", "-o", bundle)
    assert done.exit_code == 0, done.output
    broker = Mosquitto(tmp_path)
    fleet = tmp_path / "fleet"
    make_fleet(fleet, name="robots", broker=f"127.0.0.1:{broker.port}")
    text = (fleet / "fleet.toml").read_text()
    (fleet / "fleet.toml").write_text(text.replace("tls = true", "tls = false"))
    shutil.copytree(FleetRepository(fleet).trust, tmp_path / "trust")
    box = AgentBox(
        tmp_path,
        broker.tls_port,
        dev=False,
        ca=broker.ca,
        profile="laptop",
        source=f"images://{folder}/in?fps=20",  # type: ignore[arg-type]
        trial_timeout_s=WAIT_S * 2,
    )
    seen: queue.Queue[LinkEvent] = queue.Queue()
    topic = PipelineTopics(Topics(DEVICE).root).detections
    settings = LinkSettings("127.0.0.1", broker.port, "watcher", ((topic, 0),))
    watcher = Link(settings, seen.put)
    watcher.start()
    try:
        box.start()
        published = invoke("fleet", "publish", bundle, "--fleet", fleet)
        assert published.exit_code == 0, published.output
        result = deploy(broker.port, bundle, DeployOptions(3 * WAIT_S, fleet=fleet))
        assert result.live, (result, box.log())
        shades = set()
        end_s = time.monotonic() + 4 * WAIT_S
        while len(shades) < 2:
            assert time.monotonic() < end_s, (shades, box.log())
            event = seen.get(timeout=2 * WAIT_S)
            if isinstance(event, Message):
                rows = json.loads(event.payload)["detections"]
                shades |= {row["attributes"]["shade"]["label"] for row in rows}
    finally:
        watcher.close()
        box.close()
        broker.close()
    assert shades == {"dark", "bright"}
    slot = tmp_path / "state" / "slots" / "a"
    assert [one.name for one in verify_folder(slot).models] == ["detector", "shade"]
