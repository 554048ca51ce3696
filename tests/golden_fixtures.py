"""Bundles with golden inputs, and the board on doubles that runs them."""

import sys
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from model_fixtures import small_convnet

from toolkit.build import BuildOptions, build_engine
from toolkit.cli.commands.bundle import bundle as bundle_command

PIPELINE = """
name = "p"
[source]
uri = "v4l2:///dev/video0"
[preprocess]
width = 32
height = 32
[decode]
kind = "classification"
scores = "y"
"""


def engine_of(folder: Path, seed: int) -> Path:
    folder.mkdir()
    model = small_convnet(folder / "m.onnx", np.random.default_rng(seed))
    return build_engine(model, "laptop", folder / "m.engine", BuildOptions(precision="fp32")).path


def packed(folder: Path, engine: Path, out: str, *options: str) -> Path:
    (folder / "pipeline.toml").write_text(PIPELINE)
    (folder / "labels.txt").write_text("".join(f"class {n}\n" for n in range(10)))
    files = ("--pipeline", str(folder / "pipeline.toml"), "--labels", str(folder / "labels.txt"))
    arguments = [str(engine), *files, "--portable", "-o", str(folder / out), *options]
    result = CliRunner().invoke(bundle_command, arguments)
    assert result.exit_code == 0, result.output
    return folder / out


# A module in a process with the doubles of the driver and, by its environment, of TensorRT.
ON_DOUBLES = (
    sys.executable,
    "-c",
    f"import runpy, sys; sys.path.append({str(Path(__file__).parent)!r}); import cuda_double; "
    "driver = cuda_double.installed(); driver.__enter__(); del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)",
)
