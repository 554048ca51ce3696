"""docs/ros2.md alone sets up a pipeline: its commands and files are run, with a router of Zenoh."""

import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
import zenoh
from docs_fixtures import ROOT
from ros2_fixtures import zenoh_router
from video_fixtures import PATIENCE_S, wait_for

from pipelines.config import parse_pipeline
from pipelines.ros2.cdr import decode
from pipelines.ros2.messages import DETECTIONS_2D, DIAGNOSTICS
from pipelines.ros2.wire import dds_type, ros_type
from pipelines.sources.ros2 import ENCODINGS
from pipelines.sources.uri import parse_ros2
from toolkit.engine.build import BuildOptions, build_engine

PAGE = (ROOT / "docs/ros2.md").read_text()
PIPELINE, DDS, SOURCE = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
INSTALL, RUN = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
ROBOT, BUILD = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("page")
    (path / "configs").symlink_to(ROOT / "configs")
    return path


def start(folder, commands=RUN):
    tandem_here = f'tandem() {{ "{sys.executable}" -m toolkit.cli "$@"; }}'
    return subprocess.Popen(
        ["bash", "-ec", f"{tandem_here}\n{commands}"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_the_page_alone_gives_a_robot_what_it_says(folder):
    listed = {f"{name} [{kind}]" for name, kind in re.findall(r"^(/\S+) \[(.*)\]", ROBOT, re.M)}
    assert len(listed) == 3
    with zenoh_router() as (locator, _):
        # The page's router is on this machine's port 7447, which other tests may have.
        text = PIPELINE.replace('kind = "ros2"', f'kind = "ros2"\nconnect = ["{locator}"]')
        (folder / "yard.toml").write_text(text)
        config = zenoh.Config()
        config.insert_json5("mode", '"client"')
        config.insert_json5("connect/endpoints", f'["{locator}"]')
        with zenoh.open(config) as robot:
            tokens, echoed, health = set(), [], []
            robot.liveliness().declare_subscriber(
                "@ros2_lv/0/**", lambda sample: tokens.add(str(sample.key_expr)), history=True
            )
            robot.declare_subscriber(f"0/detections/{dds_type(DETECTIONS_2D)}/*", echoed.append)
            robot.declare_subscriber(f"0/diagnostics/{dds_type(DIAGNOSTICS)}/*", health.append)
            running = start(folder)
            try:
                wait_for(lambda: echoed and health, 6 * PATIENCE_S, "detections and health")
            finally:
                output, _ = running.communicate(timeout=6 * PATIENCE_S)
    assert running.returncode == 0, output
    parts = [token.split("/") for token in tokens]
    topics = {
        f"{part[9].replace('%', '/')} [{ros_type(part[10])}]" for part in parts if part[5] == "MP"
    }
    assert topics == listed
    header = decode(DETECTIONS_2D, echoed[0].payload.to_bytes())["header"]
    assert header["frame_id"] == "camera_optical_frame"
    # `ros2 param set /tandem min_score 0.6` calls this service of the node /tandem.
    assert "ros2 param set /tandem min_score" in ROBOT
    services = {part[9] for part in parts if part[5] == "SS"}
    assert {"%tandem%set_parameters", "%tandem%get_parameters"} <= services


def test_the_sink_for_dds_takes_the_place_of_the_first(folder):
    head, _, _ = PIPELINE.partition("[[sinks]]")
    (folder / "yard.toml").write_text(head + DDS.replace('"dds"', '"dds"\ndomain = 92'))
    build, run = RUN.splitlines()
    assert build.endswith("-o robot.engine")
    model = ROOT / "configs/models/robot-objects.onnx"
    build_engine(model, "laptop", folder / "robot.engine", BuildOptions(precision="fp32"))
    running = start(folder, run)
    output, _ = running.communicate(timeout=6 * PATIENCE_S)
    assert running.returncode == 0, output
    assert "100 frames" in output


def test_the_source_is_one():
    whole = re.sub(r"\[source\]\nuri = .*\n", SOURCE, PIPELINE)
    config = parse_pipeline(whole, "yard.toml")
    assert parse_ros2(config.cameras[0].uri).topic == "/camera/image_raw"
    named = re.findall(r"Read encodings: (.*?), 8-bit Bayer", PAGE, re.DOTALL)[0]
    assert set(re.findall(r"`(\w+)`", named)) <= set(ENCODINGS)


def test_the_page_builds_the_version_of_cyclone_that_is_tested():
    version = metadata.version("cyclonedds")
    assert f"--branch {version} " in BUILD
    assert f"cyclonedds=={version}\n" in BUILD


def test_the_extras_of_the_page_exist():
    assert set(re.findall(r"\[(.*?)\]", INSTALL)[0].split(",")) | {"dds"} <= set(
        metadata.metadata("tandem-edge").get_all("Provides-Extra")
    )
