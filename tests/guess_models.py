"""What 160 and more models of others say of themselves, and how each has to be read.

`data/guess_models.json` holds the facts of exports of transformers, timm and torchvision with small
random weights, of networks that are no detectors, and of models in wheels: names, shapes,
operators, last nodes and telling names of constants. `python tests/guess_models.py MODEL.onnx...`
prints the facts of files as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from device.engine.manifest import TensorInfo
from toolkit.guess.facts import ModelFacts, Producer, read_facts

TABLE = Path(__file__).parent / "data" / "guess_models.json"
TELLING = (
    *("encoder_input_proj", "enc_score_head", "enc_bbox_head", "input_proj.0.0"),
    *("query_position_embeddings", "class_labels_classifier", "class_embed", "bbox_predictor"),
)
"""Words in names of constants that rules look for."""


class Recorded(msgspec.Struct, frozen=True):
    """The facts of a file. `truth`: `kind` of the decoder, settings and `recipe` that count; None
    where no decoder reads the model. `asks`: whether the user is asked."""

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    operators: tuple[str, ...]
    producers: dict[str, Producer]
    weights: tuple[str, ...]
    truth: dict[str, Any] | None = None
    asks: bool = True

    def facts(self) -> ModelFacts:
        return ModelFacts(
            Path(self.name),
            self.inputs,
            self.outputs,
            self.metadata,
            frozenset(self.operators),
            self.producers,
            weights=frozenset(self.weights),
        )


def record(path: Path) -> Recorded:
    """Return what the rules can know of a file."""
    facts = read_facts(path)
    return Recorded(
        path.stem,
        facts.inputs,
        facts.outputs,
        dict(facts.metadata),
        tuple(sorted(facts.operators)),
        dict(facts.producers),
        tuple(sorted(n for n in facts.weights if any(word in n for word in TELLING))),
    )


def read_table() -> tuple[Recorded, ...]:
    return msgspec.json.decode(TABLE.read_bytes(), type=tuple[Recorded, ...])


def write_table(rows: tuple[Recorded, ...], path: Path = TABLE) -> None:
    """Write a line for each model."""
    lines = (msgspec.json.encode(row).decode() for row in rows)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    print(json.dumps([msgspec.to_builtins(record(Path(name))) for name in sys.argv[1:]], indent=1))
