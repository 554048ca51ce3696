"""The commands and manifests of the page on several machines."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import yaml
from model_fixtures import small_convnet
from PIL import Image
from registry_fixtures import registry
from web_fixtures import free_port

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "scale_out.md").read_text()
# The default method tries INT8 for half a minute.
PRELUDE = f"""
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
dask() {{
    local program=distributed.cli.dask_$1; shift
    exec "{sys.executable}" -m $program "$@" >/dev/null 2>&1  # in the background, by itself
}}
tandem() {{
    case $1 in calibrate) set -- "$@" --method minmax --accept-loss ;; esac
    "$TANDEM_PROGRAM" "$@"
}}
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def run(folder: Path, script: str, **environment: str) -> str:
    with subprocess.Popen(
        ["bash", "-ec", PRELUDE + script], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    ) as process:  # fmt: skip
        output, errors = process.communicate()
        with suppress(ProcessLookupError):  # a worker without its scheduler would wait for it
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    return output


@pytest.fixture
def folder(
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    tandem_program: Path,
) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TANDEM_PROGRAM", str(tandem_program))
    small_convnet(tmp_path / "net.onnx", rng)
    (tmp_path / "images").mkdir()
    for number in range(40):
        picture = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / "images" / f"{number}.png")
    return tmp_path


def test_calibrations_give_one_table(folder: Path) -> None:
    pytest.importorskip("distributed")
    expected = run(folder, "tandem calibrate net.onnx --data images -o plain.json")
    assert expected
    port = str(free_port())
    for block in blocks("bash")[:3]:
        run(folder, block.replace("8786", port).replace("--workers 4", "--workers 2"))
        table = folder / "net.calib.json"
        assert table.read_bytes() == (folder / "plain.json").read_bytes()
        table.unlink()


def test_the_matrix_is_built(folder: Path) -> None:
    (matrix,) = blocks("toml")
    words = '"--samples", "64", "--method", "minmax", "--accept-loss"'
    matrix = matrix.replace('"--samples", "64"', words)
    for name, quick in (("orin-nano-8gb", "laptop"), (', "orin-nx-16gb"', ""), ("fp16", "fp32")):
        matrix = matrix.replace(name, quick)
    (folder / "matrix.toml").write_text(matrix)
    assert "2 built" in run(folder, blocks("bash")[3], TANDEM_REBUILD="")
    assert len(list((folder / "engines").glob("net.laptop.*.engine"))) == 2


def test_the_cache_is_looked_after_and_travels(folder: Path) -> None:
    local, travels = blocks("bash")[4:]
    script = "tandem build net.onnx -o net.engine\n" + local
    assert "1 " in run(folder, script, TANDEM_REBUILD="")
    with registry(folder / "registry") as host:
        travels = travels.replace("registry.example.com", host)
        output = run(folder, re.sub("$", " --plain-http", travels.strip(), flags=re.MULTILINE))
    assert "sent 1 of 1 entries" in output


def test_shards_of_slurm_and_of_a_matrix_of_jobs_are_those_of_the_page(folder: Path) -> None:
    (script,) = blocks("sh")
    assert script.startswith("#!/bin/sh\n#SBATCH --array=1-8\n")
    run(folder, script, SLURM_ARRAY_TASK_ID="8")
    assert (folder / "part8.state").exists()
    jobs = yaml.safe_load(blocks("yaml")[1])["jobs"]
    command = jobs["shard"]["steps"][2]["run"]
    shards = jobs["shard"]["strategy"]["matrix"]["shard"]
    assert command.endswith(f"/{len(shards)} -o part.state")
    for shard in shards:
        run(folder, command.replace("${{ matrix.shard }}", str(shard)))
        (folder / f"part{shard}").mkdir()
        (folder / "part.state").rename(folder / f"part{shard}" / "part.state")
    run(folder, jobs["table"]["steps"][3]["run"])


def test_the_job_of_kubernetes_is_valid_and_counts_from_one(folder: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    job = yaml.safe_load(blocks("yaml")[0])
    validate.validate(job, "1.30", strict=True)
    (command,) = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"/{job['spec']['completions']} -o" in command
    run(folder, command, JOB_COMPLETION_INDEX="7")
    assert (folder / "part7.state").exists()
