"""docs/tutorials word by word: every command runs, and prints what the page shows."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from docs_fixtures import ROOT, link_configs
from foreign_models import foreign_model

import tandem
from toolkit.fleet.brokers.local import free_port

TUTORIALS = ROOT / "docs/tutorials"
MOST_WORDS = 900
BLOCK = re.compile(r"```(bash|text)\n(.*?)```", re.DOTALL)
FIGURE = r"[-+]?\d+(?:\.\d+)?"
LONGEST_S = 400.0  # a busy machine takes minutes
pytestmark = pytest.mark.timeout(LONGEST_S + 60.0)


def pattern_of(line: str) -> "re.Pattern[str]":
    """Return what matches a line of output that a page shows."""
    words = re.sub(r"\d+\.\d+|\d{3,}|\d+(?=%)", "FIGURE", line)
    pattern = ".*".join(re.escape(part) for part in words.split("..."))
    return re.compile(re.sub(r"(?:\\ )+", r"\\s+", pattern).replace("FIGURE", FIGURE))


def logs_of(folder: Path) -> dict[str, str]:
    """Return the ends of the logs that the page's programs wrote below `folder`."""
    logs = sorted(folder.rglob("*.log"))
    return {str(log.relative_to(folder)): log.read_text()[-2000:] for log in logs}


def follow(page: str, folder: Path, program: Path, stands_for: dict[str, str] | None = None) -> str:
    """Run the blocks of `page` in `folder` as one script, and return what they print.

    `program` is the script's `tandem`. `stands_for` replaces texts of the page, such as a port.
    Whatever the page starts and does not end is killed. Fails unless every line that the page
    shows is printed, in order: "..." stands for any text, a figure such as 1.5, 120 or 7% for any
    figure, a space for several.
    """
    text = (TUTORIALS / page).read_text()
    for words, here in (stands_for or {}).items():
        assert words in text, f"{page} does not say {words}"
        text = text.replace(words, here)
    blocks = BLOCK.findall(text)
    script = "\n".join(block for kind, block in blocks if kind == "bash")
    folders = (str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"])
    path = os.pathsep.join(folders)
    log, errors = folder / "stdout.txt", folder / "stderr.txt"
    with log.open("w") as stdout, errors.open("w") as stderr:
        process = subprocess.Popen(
            ["bash", "-ec", script], cwd=folder, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "160"},
        )  # fmt: skip
    status: int | str
    try:
        status = process.wait(LONGEST_S)
    except subprocess.TimeoutExpired:
        status = f"not at its end after {LONGEST_S:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    out = log.read_text()
    assert status == 0, (status, out, errors.read_text(), logs_of(folder))
    place = 0
    for line in (line for kind, block in blocks if kind == "text" for line in block.splitlines()):
        match = pattern_of(line).search(out, place)
        assert match, (
            f"{page} shows {line!r}, which is not printed behind the lines above it: {out}"
        )
        place = match.end()
    return out


@pytest.mark.parametrize("page", sorted(path.name for path in TUTORIALS.glob("*.md")))
def test_a_tutorial_is_short_and_says_at_once_what_it_gives_and_takes(page: str) -> None:
    text = (TUTORIALS / page).read_text()
    assert len(re.findall(r"\w[^\s|]*", text)) <= MOST_WORDS
    beginning = text.split("\n\n")[1]
    assert beginning.startswith("**You get**")
    assert "**It takes** 10 minutes" in beginning
    assert "```console" not in text, "such a block is run by no test"


def test_first_detector(tmp_path: Path, tandem_program: Path) -> None:
    link_configs(tmp_path, pictures=16)
    out = follow("first_detector.md", tmp_path, tandem_program)
    assert "WARNING" not in out
    assert (tmp_path / "seen.mp4").stat().st_size > 10_000
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 10


def test_dla_plan(tmp_path: Path, tandem_program: Path) -> None:
    link_configs(tmp_path, pictures=1)
    follow("dla_plan.md", tmp_path, tandem_program)
    assert (tmp_path / "plan.html").is_file()


def test_fleet_on_laptop(tmp_path: Path, tandem_program: Path) -> None:
    link_configs(tmp_path, pictures=1)
    model = ROOT / "configs/models/robot-objects.onnx"
    tandem.build(model, tmp_path / "robot.engine", profile="laptop")
    follow(
        "fleet_on_laptop.md", tmp_path, tandem_program, {"1884": str(free_port()), "fps=5": "fps=2"}
    )


def test_yolo_on_orin(tmp_path: Path, tandem_program: Path) -> None:
    """With a YOLOv8n of others in place of the reader's."""
    (tmp_path / "yolo.onnx").symlink_to(foreign_model("nudenet-320n"))
    (tmp_path / "pictures").mkdir()
    for name in ("astronaut", "china", "coffee", "rocket"):
        picture = ROOT / f"configs/scenes/backgrounds/{name}.jpg"
        (tmp_path / "pictures" / picture.name).symlink_to(picture)
    follow("yolo_on_orin.md", tmp_path, tandem_program)
    events = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    labels = {detection["label"] for event in events for detection in event["detections"]}
    assert "FACE_FEMALE" in labels  # the astronaut's


def test_from_tensorrt(tmp_path: Path, tandem_program: Path) -> None:
    link_configs(tmp_path, pictures=8)
    follow("from_tensorrt.md", tmp_path, tandem_program)
    assert list((tmp_path / "orin-trtexec/implicit").glob("trtexec-*.sh"))
