"""`tandem infer`: run a model or an engine once and keep its outputs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.cli.command import argument, command, json_option, option, part
from toolkit.cli.options.choices import Dla, Executor
from toolkit.cli.options.inputs import InputOptions
from toolkit.cli.options.model import executor_option, memory_option, plugins_option


@dataclass(frozen=True, slots=True)
class Infer:
    """Run an ONNX MODEL (in onnxruntime) or an ENGINE on inputs, and show its outputs.

    Example: tandem infer model.onnx --input x.npz --save y.npz; tandem infer model.engine
    --random 1 --save z.npz
    """

    file: Path = argument("MODEL_OR_ENGINE")
    inputs: InputOptions = part()
    save: Path | None = option(
        "Write the outputs by name; of several samples as 0:NAME, 1:NAME, ...", metavar="OUT.npz"
    )
    save_inputs: Path | None = option("Write the inputs too, for --input.", metavar="OUT.npz")
    everything: bool = option(
        "Also write intermediate tensors: all of a model, or those between an engine's segments.",
        "--all",
    )
    dla: Dla = option("Engine: the DLA's INT8 arithmetic in software, or not.", default="portable")
    executor: Executor = executor_option()
    max_memory: int | None = memory_option()
    plugins: tuple[Any, ...] = plugins_option()
    as_json: bool = json_option("Print the outputs' figures as JSON.")


infer = command(Infer, "infer:infer")  # fmt: skip
