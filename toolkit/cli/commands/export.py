"""`tandem export` and `tandem import-triton`: engines for tools of others, and models of theirs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.cli.command import FILE, argument, command, json_option, option


@dataclass(frozen=True, slots=True)
class Export:
    """Write ENGINE as ONNX, calibration caches and trtexec scripts, or for a Triton server.

    There is a folder for each era of TensorRT: with calibration caches (8.5 to 10.7), and strongly
    typed, with Q/DQ in INT8 (from 10.8 on). Each release that the JetPacks of the engine's profile
    bring has a script whose flags its trtexec knows; engines in BF16 have none. --to triton adds
    the model to the repository --output: config.pbtxt, ONNX for its onnxruntime, and the same
    scripts for TensorRT.

    Examples: tandem export person.engine --to trtexec -o person-trtexec
    tandem export person.engine --to triton -o repository
    """

    engine: Path = argument(type=FILE)
    to: Literal["trtexec", "triton"] = option("The tool that builds from it.", default="trtexec")
    output: Path = option(
        "The folder to write; it must not exist, but for triton.", "-o", "--output", required=True
    )
    profile: Path | None = option(
        "The file of the engine's profile, if it is a custom one.", type=FILE
    )
    as_json: bool = json_option("Print what was written as JSON.")


export = command(Export, "export:export")  # fmt: skip
