"""Run a model or an engine on the inputs of `tandem infer`. For an engine it loads no onnx."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from device.runtime.executors.protocol import ExecutorName
from device.runtime.session import Dla
from toolkit.cli.actions.inputs import input_request
from toolkit.cli.commands.infer import Infer
from toolkit.evaluate.infer.inputs import InputRequest, describe, make_samples
from toolkit.evaluate.infer.open import open_runner
from toolkit.evaluate.infer.runner import Array, Arrays
from toolkit.evaluate.infer.saved import save_samples

if TYPE_CHECKING:
    from toolkit.plugins import Plugin


@dataclass(frozen=True, slots=True)
class InferResult:
    """What ran, on what, the outputs of each sample, and how long each took, in ms."""

    title: str
    remarks: tuple[str, ...]
    inputs: tuple[Arrays, ...]
    described: str
    outputs: tuple[Arrays, ...]
    times_ms: tuple[float, ...]


def infer(options: Infer) -> None:
    """Run a file on the inputs, write and print its outputs. Raises TandemError, UsageError."""
    request = input_request(options.inputs)
    result = infer_file(
        options.file,
        request,
        everything=options.everything,
        dla=options.dla,
        executor=options.executor,
        plugins=options.plugins,
    )
    files = ((options.save, result.outputs), (options.save_inputs, result.inputs))
    for path, samples in files:
        if path is not None:
            save_samples(path, samples)
    if options.as_json:
        click.echo(json.dumps(_builtins(result)))
        return
    click.echo(_text(result))
    for path, _ in files:
        if path is not None:
            click.echo(f"wrote {path}")


def infer_file(
    path: Path,
    request: InputRequest,
    *,
    everything: bool = False,
    dla: Dla = "portable",
    executor: ExecutorName = "auto",
    plugins: "Sequence[Plugin]" = (),
) -> InferResult:
    """Run a file on every sample. Raises TandemError."""
    runner = open_runner(path, dla=dla, executor=executor, plugins=plugins)
    try:
        samples = make_samples(request, runner.inputs, runner.title)
        outputs, times_ms = [], []
        for sample in samples:
            begin = time.perf_counter()
            outputs.append(runner.tensors(sample) if everything else runner.run(sample))
            times_ms.append(1000 * (time.perf_counter() - begin))
        return InferResult(
            runner.title,
            runner.remarks,
            tuple(samples),
            describe(request, len(samples)),
            tuple(outputs),
            tuple(times_ms),
        )
    finally:
        runner.close()


def _text(result: InferResult) -> str:
    """Return a line for each output: its type, shape and range."""
    lines = [f"{result.title} on {result.described}", *result.remarks]
    for number, sample in enumerate(result.outputs):
        if len(result.outputs) > 1:
            lines.append(f"sample {number}")
        width = max((len(name) for name in sample), default=0)
        lines += [f"  {name:{width}}  {_summary(array)}" for name, array in sample.items()]
    first, *rest = result.times_ms
    later = f", then {sum(rest) / len(rest):.2f} ms" if rest else ""
    return "\n".join([*lines, f"took {first:.2f} ms{later} (`tandem bench` measures)"])


def _builtins(result: InferResult) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "title": result.title,
        "remarks": list(result.remarks),
        "inputs": result.described,
        "times_ms": list(result.times_ms),
        "samples": [
            {name: _figures(array) for name, array in sample.items()} for sample in result.outputs
        ],
    }


def _summary(array: Array) -> str:
    figures = _figures(array)
    shape = "x".join(map(str, array.shape)) or "1 number"
    if figures["min"] is None:
        return f"{array.dtype} {shape}"
    text = f"{array.dtype} {shape}, {figures['min']:.6g} to {figures['max']:.6g}"
    text += f", mean {figures['mean']:.6g}"
    return text + (f", {figures['not_finite']} not finite" if figures["not_finite"] else "")


def _figures(array: Array) -> dict[str, Any]:
    """Return type, shape and the range of the finite numbers."""
    figures: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    numbers = array.astype(np.float64).reshape(-1) if array.dtype.kind in "fiub" else np.zeros(0)
    finite = numbers[np.isfinite(numbers)]
    limits = (float(finite.min()), float(finite.max()), float(finite.mean())) if finite.size else ()
    low, high, mean = limits or (None, None, None)
    return {
        **figures,
        "min": low,
        "max": high,
        "mean": mean,
        "not_finite": int(numbers.size - finite.size),
    }
