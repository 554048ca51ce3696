"""Give damaged whole model files to every command that reads a model, as a shell would.

The rows of `COMMANDS` are command lines. `scripts/fuzz_models.py --whole` runs them.
"""

import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import click
import numpy as np
import onnx

from scripts.mutants.whole import WEIGHTS, weights
from toolkit.cli.main import tandem
from toolkit.engine.build import build_engine
from toolkit.engine.options import BuildOptions
from toolkit.partition.planning.plan import PlanOptions

ROOT = Path(__file__).parents[1]
NAME = "mutant.onnx"
GOOD = "good.onnx"
DATA = "data.npz"
ENGINE = "mutant.engine"
SEARCH = PlanOptions(seconds=0.2)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Words after `tandem`; {model}, {good}, {data} and {out} are paths, {output} is a tensor.

    `engine`: they need an engine of the model, which is built first.
    """

    words: str
    engine: str = ""

    @property
    def title(self) -> str:
        """The command's name."""
        return " ".join(word for word in self.words.split()[:2] if "{" not in word)


COMMANDS = (
    CommandLine("inspect {model}"),
    CommandLine("inspect {model} --nodes --json"),
    CommandLine("inspect {model} --profile agx-orin-64gb --html {out}/page.html"),
    CommandLine("infer {model}"),
    CommandLine("infer {model} --all --json"),
    CommandLine("infer {model} --input {data}"),
    CommandLine("compare {model} {good}"),
    CommandLine("compare {good} {model} --layers"),
    CommandLine("compare {model} --profile xavier-nx-16gb --data {data}"),
    CommandLine("model guess {model}"),
    CommandLine("model guess {model} --json"),
    CommandLine("plan {model} --profile agx-orin-64gb --seconds 0.2"),
    CommandLine("plan {model} --profile xavier-nx-16gb --precision fp16 --nodes --seconds 0.2"),
    CommandLine("build {model} -o {out}/mutant.engine"),
    CommandLine("calibrate {model} --data {data} -o {out}/table.json"),
    CommandLine("calibrate {model} --data {data} --method minmax -o {out}/table.json"),
    CommandLine("ranges {model}"),
    CommandLine("ranges {model} --any-weight-scale --plain {out}/plain.onnx"),
    CommandLine("surgeon extract {model} --outputs {output} -o {out}/part.onnx"),
    CommandLine("surgeon reduce {model} --check true -o {out}/part.onnx"),
    CommandLine("export {engine} -o {out}/export", engine="agx-orin-64gb"),
    CommandLine("bench {engine} --iterations 2 --warmup 0", engine="laptop"),
)


def command_of(seed: int) -> CommandLine:
    """Return the command line of a seed."""
    return COMMANDS[random.Random(f"command {seed}").randrange(len(COMMANDS))]


def run_command(line: CommandLine, data: bytes, good: bytes, folder: Path) -> None:
    """Run a command on a file; `good`: what it was. Raises what the command raises."""
    words = _words(line, data, good, folder)
    if line.engine:
        options = BuildOptions(kernels=False, plan=SEARCH)
        build_engine(folder / NAME, line.engine, folder / ENGINE, options)
    answers = suppress(SystemExit, click.exceptions.Exit)  # a status such as "they differ"
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), answers:
        tandem.main(words, standalone_mode=False)


def run_process(line: CommandLine, data: bytes, good: bytes, folder: Path) -> tuple[int, str]:
    """Run a command as a shell does, in a process; return its status and what it says.

    `tandem build` makes the engine that it needs, and answers in its place if that fails.
    """
    words = _words(line, data, good, folder)
    if line.engine:
        build = ["build", str(folder / NAME), "--profile", line.engine, "-o", str(folder / ENGINE)]
        built = _tandem(build)
        if built[0]:
            return built
    return _tandem(words)


def _tandem(words: Sequence[str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "toolkit.cli", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False
    )
    return done.returncode, done.stderr.strip()


def _words(line: CommandLine, data: bytes, good: bytes, folder: Path) -> list[str]:
    """Write the files of a command line; return its words."""
    for name, content in {NAME: data, GOOD: good, WEIGHTS: weights()}.items():
        (folder / name).write_bytes(content)
    np.savez(folder / DATA, **_samples(good))  # type: ignore[arg-type]  # no option's names
    out = folder / "out"
    out.mkdir(exist_ok=True)
    paths = {"model": folder / NAME, "good": folder / GOOD, "data": folder / DATA, "out": out,
             "engine": folder / ENGINE, "output": _output(good)}  # fmt: skip
    return line.words.format(**paths).split()


def _output(good: bytes) -> str:
    return str(onnx.load_model_from_string(good).graph.output[0].name)


def _samples(good: bytes) -> dict[str, np.ndarray]:
    """Return one sample for the inputs of an undamaged model."""
    graph = onnx.load_model_from_string(good).graph
    constants = {tensor.name for tensor in graph.initializer}
    chance = np.random.default_rng(1)
    return {
        value.name: chance.standard_normal(
            [max(1, dim.dim_value) for dim in value.type.tensor_type.shape.dim], np.float32
        )
        for value in graph.input
        if value.name not in constants
    }
