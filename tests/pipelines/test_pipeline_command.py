"""tandem pipeline: a pipeline.toml is written, checked and described."""

import json
from pathlib import Path

import msgspec
import onnx
import pytest
from click.testing import CliRunner, Result
from plan_pipeline_fixtures import classifier
from video_fixtures import COLOUR_TOML, colour_model

import configs
from device.errors import TandemError
from pipelines.config import load_pipeline
from toolkit.build import BuildOptions, build_engine
from toolkit.cli.main import tandem

ROBOT = configs.ROOT / "models" / "robot-objects.toml"


def invoke(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(tandem, ["pipeline", *map(str, arguments)], input=text)


def test_a_new_pipeline_has_what_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    kinds_given = ["jsonl", "serial", "video", "prometheus", "mcap", "foxglove"]
    sinks = [word for kind in kinds_given for word in ("--sink", kind)]
    result = invoke("new", "--model", ROBOT, "--source", "rtsp://u:pass@cam/1", "--track",
                    *sinks, "-o", path)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "pass" not in result.output
    config = load_pipeline(path)
    shipped = load_pipeline(configs.ROOT / "pipelines" / "robot-objects.toml")
    assert config.preprocess == shipped.preprocess
    assert config.decode == msgspec.structs.replace(shipped.decode, score_threshold=0.1)
    assert config.cameras[0].uri == "rtsp://u:pass@cam/1"
    assert config.tracker
    kinds = [sink.__struct_config__.tag for sink in config.sinks]
    assert kinds == kinds_given


def test_a_tracker_gets_the_weak_detections_that_it_wants(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    for more, threshold in (((), 0.35), (("--track",), 0.1)):
        for model in (ROBOT, ROBOT.with_suffix(".onnx")):
            result = invoke(
                "new", "--model", model, "--source", "test://", *more, "-o", path, "--overwrite"
            )
            assert result.exit_code == 0, result.output
            assert load_pipeline(path).decode.score_threshold == threshold
    # Of several models the one that is followed, which a classifier is not.
    scene = classifier(tmp_path / "scene.onnx", 8)
    result = invoke(
        "new", "--model", scene, "--beside", f"finder={ROBOT.with_suffix('.onnx')}", "--source",
        "test://", "--track", "-o", path, "--overwrite",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    config = load_pipeline(path)
    assert config.followed.name == "finder"
    assert config.followed.reading.score_threshold == 0.1


def test_a_new_pipeline_is_not_written_with_an_address_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    result = invoke("new", "--model", ROBOT, "--source", "rstp://cam/1", "-o", path)
    assert "unknown scheme 'rstp'" in str(result.exception)
    assert not path.exists()


def test_what_is_not_said_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    result = invoke("new", "-o", path, text=f"{ROBOT}\ntest://\n")
    assert result.exit_code == 0, result.output
    assert load_pipeline(path).name == "robot-objects"


def test_the_decoder_of_a_model_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    model = ROBOT.with_suffix(".onnx")
    result = invoke("new", "--model", model, "--source", "test://", "-o", path)
    assert result.exit_code == 0, result.output
    assert load_pipeline(path).preprocess.width == 320


def test_a_new_pipeline_has_labels_and_fits_at_once(tmp_path: Path) -> None:
    engine, path = tmp_path / "models" / "m.engine", tmp_path / "p.toml"
    engine.parent.mkdir()
    options = BuildOptions(precision="fp32")
    build_engine(classifier(tmp_path / "m.onnx", 4), "laptop", engine, options)
    done = invoke("new", "--model", engine, "--source", "test://", "-o", path)
    labels = tmp_path / "m.labels.txt"
    assert f"{labels}: 2 classes, which the model does not name" in done.output
    assert labels.read_text() == "class 0\nclass 1\n"
    assert "it fits" in invoke("check", path).output
    labels.write_text("dark\nbright\n")  # by the user
    assert invoke("new", "--model", engine, "--source", "test://", "-o", path,
                  "--overwrite").exit_code == 0  # fmt: skip
    assert labels.read_text() == "dark\nbright\n"
    beside = engine.with_suffix(".labels.txt")
    beside.write_text("0\n1\n")
    assert invoke("new", "--model", engine, "--source", "test://", "-o", path,
                  "--overwrite").exit_code == 0  # fmt: skip
    assert load_pipeline(path).labels == "models/m.labels.txt"


def test_a_new_pipeline_takes_class_names_of_the_metadata(tmp_path: Path) -> None:
    model, path = classifier(tmp_path / "m.onnx", 4), tmp_path / "p.toml"
    proto = onnx.load(model)
    proto.metadata_props.add(key="names", value="{0: 'dark', 1: 'bright'}")
    onnx.save(proto, model)
    done = invoke("new", "--model", model, "--source", "test://", "-o", path)
    assert "2 classes, named by the model's metadata" in done.output
    assert (tmp_path / load_pipeline(path).labels).read_text() == "dark\nbright\n"
    build_engine(model, "laptop", tmp_path / "e.engine", BuildOptions(precision="fp32"))
    of_engine = tmp_path / "e.toml"
    invoke("new", "--model", tmp_path / "e.engine", "--source", "test://", "-o", of_engine)
    assert (tmp_path / load_pipeline(of_engine).labels).read_text() == "dark\nbright\n"
    assert "it fits" in invoke("check", of_engine).output
    unchecked = invoke("check", path)
    assert "the file names no `engine`: write what is missing there" in unchecked.output
    assert "`--engine`" in unchecked.output


def test_a_guess_says_in_the_file_what_the_model_does_not_show(tmp_path: Path) -> None:
    path, model = tmp_path / "p.toml", classifier(tmp_path / "shades.onnx", 4)
    result = invoke("new", "--model", model, "--source", "test://", "-o", path)
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert "# shades.onnx: likely, by the rule 'one vector'.\n" in text
    assert "# Note: the file does not show the colour order and the numbers.\n" in text


def test_a_new_pipeline_of_several_models_is_one_that_is_taken(
    engine: Path, tmp_path: Path
) -> None:
    path, shades = tmp_path / "p.toml", classifier(tmp_path / "shades.onnx", 4)
    done = invoke("new", "--model", ROBOT, "--beside", f"scene={shades}", "--on-crops",
                  f"shade={shades}", "--source", "test://", "--track", "-o", path)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "decodes ltrb_grid, classification, classification on robot-objects" in done.output
    assert "tracks objects of robot-objects" in done.output
    first, scene, shade = load_pipeline(path).models
    assert (first.name, scene.name, shade.name) == ("robot-objects", "scene", "shade")
    assert (scene.on, shade.on, shade.feeding.width) == ("", "robot-objects", 64)
    assert (path.parent / first.labels).resolve() == ROBOT.with_suffix(".labels.txt")
    assert (scene.labels, shade.labels) == ("scene.labels.txt", "shade.labels.txt")
    wrong = invoke("new", "--model", shades, "--on-crops", f"robots={ROBOT}", "--source", "test://",
                   "-o", path, "--overwrite")  # fmt: skip
    assert "says nothing of one object: use 'classification'" in str(wrong.exception)
    assert load_pipeline(path).models[0].name == "robot-objects"  # the old file stays
    assert "is not NAME=FILE" in invoke("new", "--model", ROBOT, "--beside", "x").output


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("mine")
    result = invoke("new", "--model", ROBOT, "--source", "test://", "-o", path)
    assert result.exit_code == 1
    assert path.read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir()] == ["p.toml"]
    assert invoke("new", "--model", ROBOT, "--source", "test://", "-o", path,
                  "--overwrite").exit_code == 0  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    model = colour_model(folder / "colours.onnx")
    build_engine(model, "laptop", folder / "m.engine", BuildOptions(precision="fp32"))
    (folder / "labels.txt").write_text("red\ngreen\n")
    return folder / "m.engine"


def test_a_new_pipeline_names_the_files_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "board").mkdir()
    engine, path = tmp_path / "m.engine", tmp_path / "board" / "p.toml"
    options = BuildOptions(precision="fp32")
    build_engine(classifier(tmp_path / "m.onnx", 4), "laptop", engine, options)
    result = invoke("new", "--model", engine, "--source", "test://", "-o", path)
    assert result.exit_code == 0, result.output
    assert load_pipeline(path).engine == str(engine)  # not below the folder of the file
    result = invoke("new", "--model", ROBOT, "--source", "test://", "-o", tmp_path / "r.toml")
    assert load_pipeline(tmp_path / "r.toml").labels.endswith("robot-objects.labels.txt")


def check(tmp_path: Path, text: str, *arguments: object) -> Result:
    path = tmp_path / "p.toml"
    path.write_text(text)
    return invoke("check", path, *arguments)


def colours(uri: str, sinks: str = "") -> str:
    return COLOUR_TOML.format(uri=uri, source="", sinks=sinks)


def test_a_pipeline_that_fits_its_engine_is_checked_without_a_camera(
    tmp_path: Path, engine: Path
) -> None:
    labels = engine.with_name("labels.txt")
    for uri in ("v4l2:///dev/video77", "csi://0", "rtsp://nowhere.invalid/1"):
        result = check(tmp_path, colours(uri), "--engine", engine, "--labels", labels)
        assert result.exit_code == 0, result.output
        assert "it fits" in result.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (colours("/no/such.mp4"), "no such file or folder"),
        (colours("v4l2:///dev/video0?heigth=4"), "unknown option 'heigth'"),
        (colours("test://", '[[sinks]]\nkind = "mqqt"'), "'mqqt'"),
        (colours("test://").replace("width = 64", "width = 32"), "where [preprocess] gives"),
        (colours("test://").replace('"boxes"', '"bxs"'), "which is no output of the engine"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    tmp_path: Path, engine: Path, text: str, says: str
) -> None:
    labels = engine.with_name("labels.txt")
    result = check(tmp_path, text, "--engine", engine, "--labels", labels)
    assert isinstance(result.exception, TandemError)
    assert says in str(result.exception)


def test_a_sink_that_needs_a_tracker_is_named_without_an_engine(tmp_path: Path) -> None:
    sink = '[[sinks]]\nkind = "snapshot"\npath = "seen"\n'
    result = check(tmp_path, colours("test://", sink))
    assert "a snapshot sink and no [tracker]" in str(result.exception)


def test_a_check_as_json_has_the_defaults(tmp_path: Path) -> None:
    result = check(tmp_path, colours("test://"), "--json")
    assert json.loads(result.stdout)["source"]["stall_s"] == 2.0


def test_a_run_without_an_engine_says_how_to_name_it(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(colours("test://"))
    result = CliRunner().invoke(tandem, ["run", str(path)])
    assert "use `tandem run ENGINE --pipeline PIPELINE.toml`" in str(result.exception)


def test_a_check_as_json_has_no_password(tmp_path: Path) -> None:
    result = check(tmp_path, colours("rtsp://u:s3cret@cam/1"), "--json")
    assert json.loads(result.stdout)["source"]["uri"] == "rtsp://***@cam/1"


def test_the_schema_takes_the_shipped_pipeline_and_refuses_a_wrong_key(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    tomllib = pytest.importorskip("tomllib")
    path = tmp_path / "s.json"
    assert invoke("schema", "-o", path).exit_code == 0
    schema = json.loads(path.read_text())
    shipped = (configs.ROOT / "pipelines" / "robot-objects.toml").read_text()
    validator = jsonschema.Draft202012Validator(schema)
    assert list(validator.iter_errors(tomllib.loads(shipped))) == []
    assert list(validator.iter_errors(tomllib.loads("speed = 1\n" + shipped)))
