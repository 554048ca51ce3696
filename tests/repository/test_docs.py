"""What the documents say is so: files exist, the example runs, the commands are there."""

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs_fixtures import ROOT, link_configs
from model_fixtures import small_convnet

from toolkit.cli.main import COMMANDS

DOCUMENTS = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "THIRD_PARTY.md"),
    *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)
FILE = re.compile(
    r"`((?:toolkit|calibration|device|pipelines|configs|examples|scripts|tests|docs)/[\w./-]*)`"
)
LINK = re.compile(r"\]\(([^)#:]+)\)")
ROWS = re.compile(r"^(\w+(?:, \w+)*) {2,}\S", re.M)  # of the table in a package's docstring


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_that_a_document_names_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    named = {*FILE.findall(text), *LINK.findall(text)}
    missing = [
        path for path in named if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()
    ]
    missing = [path for path in missing if not ((ROOT / name).parent / path).exists()]
    assert not missing


def test_the_python_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    link_configs(tmp_path, pictures=2)  # one to measure, one to judge by
    assert "agx-orin-64gb" in example
    example = example.replace("agx-orin-64gb", "laptop")  # nothing to compile
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    assert [output.name for output in names["session"].outputs] == ["boxes", "scores"]


@pytest.mark.usefixtures("quick_torch_export")
def test_the_example_of_fine_tuning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/calibrate.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "orin-nx-16gb" in example
    example = example.replace("orin-nx-16gb", "laptop")  # nothing to compile
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert (tmp_path / "tuned.engine").is_file()


def test_the_examples_of_the_python_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    quick, count = re.subn(
        r'engine", profile="[\w-]+"', 'engine", profile="laptop"', "\n".join(examples)
    )
    assert count == 2  # nothing to compile
    monkeypatch.chdir(tmp_path)
    exec(quick, {})


def test_the_commands_of_the_page_on_debugging_run(tmp_path: Path, tandem_program: Path) -> None:
    small_convnet(tmp_path / "model.onnx", np.random.default_rng())
    text = (ROOT / "docs/debugging.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    tandem = f'tandem() {{ "{tandem_program}" "$@"; }}'
    done = subprocess.run(
        ["bash", "-ec", "\n".join([tandem, *blocks])],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("A and B agree") == 2
    assert "1 of 9 nodes are left" in done.stdout


def test_the_commands_of_the_page_on_serving_run(tmp_path: Path, tandem_program: Path) -> None:
    small_convnet(tmp_path / "model.onnx", np.random.default_rng())
    text = (ROOT / "docs/serving.md").read_text()
    for port in ("8000", "8001", "8002"):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            text = text.replace(f":{port}/", f":{one.getsockname()[1]}/")
    http, metrics = re.findall(r"127.0.0.1:(\d+)/(?:v2/health|metrics)", text)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    tandem = f"""tandem() {{
        if [ "$1" = serve ]; then set -- "$@" --http {http} --grpc 0 --metrics {metrics}; fi
        if [ "$1" = build ]; then set -- "$@" --precision fp32; mkdir -p models; fi
        exec=; if [ "$1" = serve ]; then exec=exec; fi  # so that `kill` reaches it
        $exec "{tandem_program}" "$@"
    }}"""
    done = subprocess.run(
        ["bash", "-ec", "\n".join([tandem, *blocks])],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"platform":"tandem_engine"' in done.stdout
    assert "nv_inference_request_success" in done.stdout
    assert (tmp_path / "repository/robot/1/model.onnx").exists()
    assert (tmp_path / "imported/robot/1/model.engine").exists()


@pytest.mark.slow
def test_the_commands_of_the_page_on_jetpack_5_run(tmp_path: Path) -> None:
    text = (ROOT / "docs/jetpack5.md").read_text()
    assert len(text.splitlines()) <= 40, "one screen"
    link_configs(tmp_path, pictures=4)
    (block,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        ["bash", "-ec", f'tandem() {{ "{sys.executable}" -m toolkit.cli "$@"; }}\n{block}'],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # What the board is told: the scripts are there, and trtexec is given what the page says.
    trtexec = tmp_path / "bin/trtexec"
    trtexec.parent.mkdir()
    trtexec.write_text('#!/bin/sh\necho "$@"\n')
    trtexec.chmod(0o755)
    commands = re.findall(r"^board\$ (?:sh|trtexec) .*", text, re.MULTILINE)
    lines = []
    for command in commands:
        done = subprocess.run(
            ["sh", "-ec", command.removeprefix("board$ ")],
            cwd=tmp_path, capture_output=True, text=True, check=True,
            env={**os.environ, "PATH": f"{trtexec.parent}:{os.environ['PATH']}"},
        )  # fmt: skip
        lines.append(done.stdout.split())
    built, loaded = lines
    assert {"--int8", "--calib=calibration-8.5.2.cache", "--saveEngine=model-8.5.2.plan"} <= {
        *built
    }
    assert {"--useDLACore=0", "--allowGPUFallback"} <= {*built}
    assert not [argument for argument in built if argument.startswith("--layerDeviceTypes")]
    assert loaded == ["--loadEngine=jetpack5-trtexec/implicit/model-8.5.2.plan"]


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(f"tandem {name}" in text for name in COMMANDS)


FOLDERS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for top in ROOT.glob("[!.]*")  # not the environments, which take a second
    if top.name not in ("build", "scripts")
    for path in top.rglob("__init__.py")
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_it_is_for_and_is_on_the_map(folder: str) -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    assert ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())), folder
    assert re.search(rf"`{folder}/?`", text), f"docs/ARCHITECTURE.md does not name {folder}/"


def test_every_file_that_a_package_lists_exists() -> None:
    """The tables in the docstrings have names, two or more spaces, and what is there."""
    rows = [
        (ROOT / folder, name)
        for folder in FOLDERS
        for row in ROWS.findall(docstring_of(ROOT / folder / "__init__.py"))
        for name in row.split(", ")
    ]
    assert len(rows) > 200
    assert not [
        str(folder / name)
        for folder, name in rows
        if not (folder / name).is_dir() and not (folder / f"{name}.py").is_file()
    ]


def test_a_step_of_the_build_has_the_number_of_the_driver() -> None:
    driver = docstring_of(ROOT / "toolkit/engine/build.py")
    steps = dict(re.findall(r"^ ?(\d+) (.*)$", driver, re.M))
    texts = {path.stem: docstring_of(path) for path in (ROOT / "toolkit/engine").glob("*.py")}
    numbers = {
        name: step[1] for name, text in texts.items() if (step := re.match(r"Step (\d+) of", text))
    }
    assert set(numbers) == {"support", "write"}
    for name, number in numbers.items():
        assert f"toolkit.engine.{name}" in steps[number]


def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""
