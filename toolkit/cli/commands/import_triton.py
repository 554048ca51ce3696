"""`tandem import-triton`: engines of the models of a Triton repository."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.cli.command import FOLDER, NEW_FOLDER, argument, command, json_option, option
from toolkit.cli.options.model import profile_option


@dataclass(frozen=True, slots=True)
class ImportTriton:
    """Build engines of the ONNX models of a Triton REPOSITORY, for `tandem serve`.

    Configurations, labels and ensembles are taken over. A model that cannot be built stays ONNX,
    and onnxruntime runs it; models of other kinds are named, and left out.

    Example: tandem import-triton repository/ --profile orin-nano-8gb -o models/
    """

    repository: Path = argument("REPOSITORY", type=FOLDER)
    output: Path = option(
        "The folder to write; it must not exist.", "-o", "--output", required=True, type=NEW_FOLDER
    )
    profile: str = profile_option()
    precision: Literal["fp32", "fp16"] | None = option("Precision of the engines.")
    as_json: bool = json_option()


import_triton = command(
    ImportTriton, "import_triton:import_triton", name="import-triton"
)  # fmt: skip
