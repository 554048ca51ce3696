"""pipeline.toml, model files and labels: what is read and what the errors say."""

import re
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET

import configs
from device.errors import ConfigError, SourceError
from pipelines.config import load_labels, load_model, load_pipeline
from pipelines.decode_config import LtrbGrid
from pipelines.sink_config import MqttSink
from pipelines.sources.uri import Camera, parse_camera, redact, scheme_of

GOOD = """
name = "door"
[source]
uri = "rtsp://cam/1"
[preprocess]
width = 320
height = 240
[decode]
kind = "ltrb_grid"
boxes = "b"
scores = "s"
strides = [8, 16]
[[sinks]]
kind = "mqtt"
[[sinks]]
kind = "jsonl"
path = "out.jsonl"
"""


def write(tmp_path, text):
    path = tmp_path / "pipeline.toml"
    path.write_text(text)
    return path


def error_of(tmp_path, text):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_pipeline_is_read_with_its_defaults(tmp_path):
    config = load_pipeline(write(tmp_path, GOOD))
    assert config.source.frames is UNSET  # every one of a file, the latest of a camera
    assert config.source.stall_s == 2.0
    assert isinstance(config.decode, LtrbGrid)
    assert config.decode.strides == (8, 16)
    assert config.sinks[0] == MqttSink(max_hz=30.0, qos=0)


@pytest.mark.parametrize("path", sorted((configs.ROOT / "pipelines").glob("*.toml")), ids=str)
def test_pipelines_that_ship_are_read(path):
    assert load_pipeline(path).name == path.stem


def test_unknown_key_is_named_with_its_table_and_the_allowed_keys(tmp_path):
    message = error_of(tmp_path, GOOD.replace("width =", "widht ="))
    assert message == (
        ": unknown key 'widht' in [preprocess]: use one of width, color, crop_fraction, dtype,"
        " height, interpolation, layout, mean, pad_value, resize, scale, std."
    )


def test_unknown_key_in_a_sink_names_the_keys_of_its_kind(tmp_path):
    message = error_of(tmp_path, GOOD.replace('path = "out.jsonl"', 'path = "o"\nfps = 3'))
    assert message == ": unknown key 'fps' in [sinks[1]]: use one of format, kind, models, path."


def test_unknown_key_at_the_top_names_the_tables(tmp_path):
    message = error_of(tmp_path, "speed = 1" + GOOD)
    assert message == (
        ": unknown key 'speed' in the top level: use one of serve, batch, decode, engine,"
        " kind, labels, lines, load, models, name, preprocess, roi, service, sinks, source,"
        " sources, tracker, zones."
    )


def test_missing_key_is_named_with_its_table(tmp_path):
    assert error_of(tmp_path, GOOD.replace("height = 240", "")) == (
        ": [preprocess] has no 'height': add it."
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("width = 320", "width = 0", "preprocess.width is wrong: expected `int` >= 1"),
        ("width = 320", 'width = "a"', "preprocess.width is wrong: expected `int`, got `str`"),
        (
            '"ltrb_grid"',
            '"yolo"',
            "decode.kind is 'yolo': use one of yolox, yolov5, blazeface, box_s",
        ),
        ("[8, 16]", "[]", "decode.strides is wrong: expected `array` of length >= 1"),
        ("width = 320", "width = 320\nstd = [1, 0, 1]", "preprocess.std[1] is wrong: expected"),
        ("[8, 16]", "[8, 0]", "decode.strides[1] is wrong: expected `int` >= 1"),
    ],
)
def test_wrong_value_is_named_with_its_key_path(tmp_path, old, new, says):
    assert says in error_of(tmp_path, GOOD.replace(old, new))


SINKS = (
    ('kind = "jsonl"\npath = "a"', "the file 'a'"),
    ('kind = "video"\npath = "a"', "the file 'a'"),
    ('kind = "serial"\nport = "/dev/ttyS0"', "the serial port '/dev/ttyS0'"),
    ('kind = "prometheus"', "the port 9108"),
)


@pytest.mark.parametrize(("sink", "what"), SINKS)
def test_two_sinks_that_want_the_same_are_refused(tmp_path, sink, what):
    twice = f"[[sinks]]\n{sink}\n" * 2
    assert f"two [[sinks]] have {what}: give each its own" in error_of(tmp_path, GOOD + twice)


def test_two_sinks_may_take_free_ports(tmp_path):
    twice = '[[sinks]]\nkind = "prometheus"\nport = 0\n' * 2
    assert len(load_pipeline(write(tmp_path, GOOD + twice)).sinks) == 4


ZONE = '[[zones]]\nname = "a"\n'
LINE = '[[lines]]\nname = "a"\n'
TRIANGLE = "polygon = [[{0}, 0], [{0}, 1], [{1}, 1]]"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            f"[roi]\n{TRIANGLE.format(100, 300)}",
            "[100, 0] is far outside of the frame, whose sides",
        ),
        (
            f"{ZONE}{TRIANGLE.format(1.1, 1.5)}",
            "all of it is outside of the frame",
        ),
        (f"{ZONE}{TRIANGLE.format(100, 300)}", 'write units = "px" if these are'),
        (f"{LINE}start = [-0.5, 0]\nend = [-0.1, 1]", "all of it is outside"),
        (f"{LINE}start = [0.5, 0]\nend = [0.5, 0]", "which nothing crosses"),
        ("[tracker]\nlow_score = 0.7", "low_score is 0.7, above high_score (0.5)"),
    ],
)
def test_what_could_never_count_is_refused(tmp_path, table, says):
    assert says in error_of(tmp_path, f"{GOOD}\n{table}")


@pytest.mark.parametrize(
    "table",
    [
        f"{ZONE}{TRIANGLE.format(-0.2, 1.2)}",  # it ends beyond the frame
        f'{ZONE}units = "px"\n{TRIANGLE.format(100, 300)}',
    ],
)
def test_a_zone_may_reach_beyond_the_frame(tmp_path, table):
    assert load_pipeline(write(tmp_path, f"{GOOD}\n{table}")).zones[0].name == "a"


def test_text_that_is_not_toml_names_the_file(tmp_path):
    assert "is not valid TOML" in error_of(tmp_path, "name = ")


def test_bytes_that_are_not_text_name_the_file(tmp_path):
    path = tmp_path / "pipeline.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_pipeline(path)


def test_missing_file_is_named(tmp_path):
    path = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=re.escape(f"{path} cannot be read (No such file")):
        load_pipeline(path)


def test_model_file_is_read(tmp_path):
    text = """
    name = "m"
    file = "m.onnx"
    labels = "m.txt"
    [preprocess]
    width = 8
    height = 8
    [decode]
    kind = "classification"
    scores = "s"
    """
    model = load_model(write(tmp_path, text))
    assert (model.file, model.decode.scores) == ("m.onnx", "s")


def test_labels_are_one_a_line(tmp_path):
    path = tmp_path / "labels.txt"
    path.write_text("robot arm\ncrate\n\n")
    assert load_labels(path) == ("robot arm", "crate")


@pytest.mark.parametrize(("text", "says"), [("", "no labels"), ("a\n\nb\n", "an empty line")])
def test_labels_that_would_shift_classes_are_refused(tmp_path, text, says):
    path = tmp_path / "labels.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_labels(path)


def test_config_is_frozen(tmp_path):
    config = load_pipeline(write(tmp_path, GOOD))
    with pytest.raises(AttributeError):
        config.name = "other"
    assert msgspec.structs.replace(config, name="other").name == "other"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rtsp://admin:s3cret@10.0.0.7:554/ch1", "rtsp://***@10.0.0.7:554/ch1"),
        ("rtsp://a:p@ss@cam/ch1", "rtsp://***@cam/ch1"),
        ("rtsp://cam/ch1?user=a&password=b&x=1", "rtsp://cam/ch1?user=a&password=***&x=1"),
        ("open rtsp://u:p@h/a and rtsp://v:q@i/b", "open rtsp://***@h/a and rtsp://***@i/b"),
        ("rtsp://a:p/s@cam/ch1", "rtsp://***@cam/ch1"),
        ("rtsp://a:12/34@cam/ch1", "rtsp://***@cam/ch1"),
        ("rtsp:/a:s3cret@cam/ch1", "rtsp:/***@cam/ch1"),
        ("rtsp://cam/ch1", "rtsp://cam/ch1"),
        ("/data/a@b.mp4", "/data/a@b.mp4"),
        (
            "gst://rtspsrc location=rtsp://cam/a user-id=u user-pw=s3cret ! decodebin",
            "gst://rtspsrc location=rtsp://cam/a user-id=u user-pw=*** ! decodebin",
        ),
        ("gst://srtsrc passphrase='a b' ! decodebin", "gst://srtsrc passphrase=*** ! decodebin"),
        ('gst://souphttpsrc proxy-pw="a b" ! jpegdec', "gst://souphttpsrc proxy-pw=*** ! jpegdec"),
    ],
)
def test_credentials_are_hidden(text, shown):
    assert redact(text) == shown


def test_scheme_of_a_plain_path_is_file():
    assert [scheme_of(u) for u in ("a/b.mp4", "file:///a", "RTSP://h", "v4l2:///dev/video0")] == [
        "file",
        "file",
        "rtsp",
        "v4l2",
    ]


def test_camera_address_is_read():
    assert parse_camera("v4l2:///dev/video2") == Camera("/dev/video2")
    full = "v4l2:///dev/video0?width=1280&height=720&fps=60&format=mjpg"
    assert parse_camera(full) == Camera("/dev/video0", 1280, 720, 60, "mjpg")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("v4l2://video0", "three slashes"),
        ("v4l2:///etc/passwd", "names no device"),
        (
            "v4l2:///dev/video0?size=3",
            "unknown option 'size': use one of format, fps, height, width",
        ),
        ("v4l2:///dev/video0?width=-3", "width='-3'"),
        ("v4l2:///dev/video0?fps=", "fps=''"),
        ("v4l2:///dev/video0?format=h264", "use one of mjpg, raw"),
    ],
)
def test_wrong_camera_address_says_what_to_write(uri, says):
    with pytest.raises(SourceError, match=re.escape(says)):
        parse_camera(uri)


def test_config_module_does_not_load_opencv():
    import subprocess
    import sys

    imports = "pipelines.config, pipelines.sources.uri"
    code = f"import sys, {imports}; sys.exit('cv2' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
