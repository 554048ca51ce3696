"""What `build`, `plan` and `calibrate` of the library call the options of the commands.

Commands that a message names as a whole, such as `tandem plan --nodes`, can be run beside a script
and stay as they are.
"""

import re
from collections.abc import Sequence

from device.argument_names import ArgumentName

COMMAND = r"(?:\btandem (?:build|calibrate|plan) )?"
QUOTE = r"`?"


def _row(option: str, words: str, value: str = "") -> ArgumentName:
    """Return the row of an option; with or without the command that has it, and backticks."""
    return ArgumentName(rf"{QUOTE}{COMMAND}--{option}(?![\w-]){value}{QUOTE}", f"`{words}`")


def _shape(words: str) -> ArgumentName:
    def shown(match: re.Match[str]) -> str:
        shapes = {match["name"]: tuple(map(int, match["sizes"].split("x")))}
        return f"`{words.format(shapes)}`"

    return ArgumentName(
        rf"{QUOTE}{COMMAND}--shape (?P<name>[^\s=]+)=(?P<sizes>\d+(?:x\d+)*){QUOTE}", shown
    )


_RANGES = "RangeOptions"
_COMMON: Sequence[ArgumentName] = (
    _row("dim", r'BuildOptions(dims=(DimRange(name="\1", min=MIN, opt=OPT, max=MAX),))',
         r" ([^\s=]+)=MIN:OPT:MAX"),
    _row("dim", "BuildOptions(dims=...)"),
    _row("precision", r'precision="\1"', r" (int8|fp16|fp32|best|bf16|fp8)"),
    _row("precision", "precision"),
    _row("profile", r'profile="\1"', r" ([\w-]+)"),
    _row("jetpack", "jetpack"),
    _row("int4-weights", "BuildOptions(int4_weights=...)"),
    _row("dummy-ranges", "BuildOptions(dummy_ranges=True)"),
    _row("gpu-backend", r'BuildOptions(gpu_backend="\1")', r" (\w+)"),
    _row("no-fallback", "BuildOptions(fallback=False)"),
    _row("preprocess-on", r'BuildOptions(preprocess_on="\1")', r" (\w+)"),
    _row("workspace-mib", "BuildOptions(tactics=TacticOptions(workspace_bytes=...))"),
    _row("preprocess", f"{_RANGES}(preprocess=...)", r"(?: [a-z]+(?=[.,;]))?"),
    _row("strict", "StatedPreprocessing(strict=True)"),
    _row("scale", r"scale=\1", r" (\d+)"),
    _row("keep", rf'{_RANGES}(keep="none")', " none"),
    _row("keep", rf"{_RANGES}(most_float=0.\1)", r" (\d+)%"),
    _row("keep-float", f"{_RANGES}(keep_float=...)"),
    _row("resume", f"{_RANGES}(resume=...)"),
    _row("budget", f"{_RANGES}(budget=...)", r"(?: [\w:.]+\d)?"),
    _row("max-latency-ms", "PlanOptions(max_latency_ms=...)"),
    _row("min-gain", "PlanOptions(min_gain=...)"),
    _row("force-dla", "PlanOptions(forced=Forced(dla=...))"),
    _row("force-gpu", "PlanOptions(forced=Forced(gpu=...))"),
    _row("max-memory", "max_memory_bytes"),
    _row("inputs-as-nchw", "ModelPath(path, inputs_as_nchw=True)"),
)  # fmt: skip

BUILD: Sequence[ArgumentName] = (
    _shape("BuildOptions(shapes={})"),
    _row("shape", "BuildOptions(shapes=...)"),
    _row("data", "calibration"),
    _row("table", "calibration"),
    _row("plugin", "BuildOptions(plugins=...)"),
    _row("accept-loss", "BuildOptions(accept_loss=True)"),
    _row("measured", "BuildOptions(node_times=...)"),
    _row("method", rf'{_RANGES}(method="\1")', r" (\w+)"),
    *_COMMON,
)
PLAN: Sequence[ArgumentName] = (
    _shape("shapes={}"),
    _row("shape", "shapes"),
    _row("data", "data"),
    _row("table", "table"),
    _row("plugin", "plugins"),
    _row("accept-loss", "BuildOptions(accept_loss=True)"),
    _row("method", rf'{_RANGES}(method="\1")', r" (\w+)"),
    *_COMMON,
)
CALIBRATE: Sequence[ArgumentName] = (
    _shape("shapes={}"),
    _row("shape", "shapes"),
    _row("data", "data"),
    _row("table", "build(calibration=...)"),
    _row("plugin", "plugins"),
    _row("accept-loss", "accept_loss=True"),
    _row("method", r'method="\1"', r" (\w+)"),
    *_COMMON,
)
