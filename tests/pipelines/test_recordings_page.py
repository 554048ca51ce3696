"""The page on recordings alone sets up a recording, its replay and a live view."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from rosbags.highlevel import AnyReader
from video_fixtures import PATIENCE_S, wait_for
from websockets.sync.client import connect

import tandem
from toolkit.fleet.brokers.local import free_port

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/recordings.md").read_text()
INSTALL, RUN, INSTALL_VIEW = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
MCAP, FOXGLOVE = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
(READ,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
HERE = f'tandem() {{ "{sys.executable}" -m toolkit.cli "$@"; }}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with robot.engine and the shipped configurations."""
    tandem.build(
        ROOT / "configs/models/robot-objects.onnx",
        tmp_path / "robot.engine",
        profile="laptop",
        precision="fp32",
    )
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_records_replays_and_reads(folder: Path) -> None:
    run(folder, "bash", "-ec", f"{HERE}\n{RUN}")
    assert len((folder / "again.jsonl").read_text().splitlines()) == 20
    with AnyReader([folder / "field.mcap"]) as bag:
        counts = {one.topic: (one.msgtype, one.msgcount) for one in bag.connections}
    for topic, kind in re.findall(r"^\| `(/\S+)` \| `(\w+)/", TEXT, re.MULTILINE):
        if topic != "/diagnostics":  # the run is shorter than a second
            assert counts[topic][0].startswith(kind)
            assert counts[topic][1] == 20
    shown = run(folder, sys.executable, "-c", READ).splitlines()
    assert len(shown) > 10
    assert all(re.fullmatch(r"\d+ \w+ [\d.]+", line) for line in shown)


def test_the_sinks_of_the_page_record_and_show(folder: Path) -> None:
    labels = ROOT / "configs/models/robot-objects.labels.txt"
    text = (ROOT / "configs/pipelines/robot-objects.toml").read_text()
    port = free_port()
    view = FOXGLOVE.replace("8765", str(port))
    assert f"port = {port}" in view
    (folder / "yard.toml").write_text(
        f'engine = "robot.engine"\nlabels = "{labels}"\n{text}\n{MCAP}\n{view}'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit.cli", "run", "yard.toml", "--source", "test://",
         "--frames", "100"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    first: list[str | bytes] = []

    def look() -> bool:
        try:
            with connect(f"ws://127.0.0.1:{port}", subprotocols=["foxglove.sdk.v1"]) as client:  # type: ignore[list-item]
                first.append(client.recv(PATIENCE_S))
        except OSError:
            return False
        return True

    wait_for(look, PATIENCE_S, "the live view is there")
    assert b"serverInfo" in (first[0] if isinstance(first[0], bytes) else first[0].encode())
    assert process.wait(PATIENCE_S) == 0
    with AnyReader([folder / "field.mcap"]) as bag:
        counts = {one.topic: one.msgcount for one in bag.connections}
    assert counts["/detections"] > 0
    assert counts["/diagnostics"] > 0


def test_the_extras_of_the_page_exist() -> None:
    named = set(",".join(re.findall(r"\[(.*?)\]", INSTALL + INSTALL_VIEW)).split(","))
    assert named <= set(metadata.metadata("tandem-edge").get_all("Provides-Extra") or ())
