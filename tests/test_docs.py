"""What the documents say is so: files exist, the example runs, the commands are there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli import COMMANDS

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
FILE = re.compile(
    r"`((?:toolkit|calibration|device|pipelines|configs|scripts|tests|docs)/[\w./-]*)`"
)
LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_that_a_document_names_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    named = {*FILE.findall(text), *LINK.findall(text)}
    missing = [
        path for path in named if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()
    ]
    missing = [path for path in missing if not ((ROOT / name).parent / path).exists()]
    assert not missing


def test_the_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = example.replace('"robot.engine"', f'r"{tmp_path / "robot.engine"}"')
    code += "\nprint([output.name for output in session.outputs])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['boxes', 'scores']"


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(f"tandem {name}" in text for name in COMMANDS)


def test_every_module_of_the_data_s_way_is_in_the_architecture() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.stem not in UNNAMED and not path.stem.startswith("__"):
                assert path.name in text or path.stem in text, f"{folder}/{path.name}"


FOLDERS = (
    *("toolkit", "toolkit/int8", "toolkit/planning", "toolkit/rules", "toolkit/costs"),
    *("toolkit/scheduling", "toolkit/dla_cycles", "pipelines", "calibration"),
)
# Small parts of a step that the page names by its main file.
UNNAMED = {
    "broker", "clock", "doctor_probes", "draw", "frame", "gdp", "machine", "mqtt_sink",
    "report_text", "target", "uri", "video_sink", "vision", "accuracy", "rule", "windows",
    "dla_checks", "dla_layer_checks", "compare", "arrays", "samples", "iterable", "bytes", "shapes",
    "layers",
}  # fmt: skip
