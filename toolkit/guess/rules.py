"""The table of guesses: the first rule that matches answers. `ask`: it never answers alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.errors import GuessError
from toolkit.guess import by_names, by_shapes, ultralytics
from toolkit.guess.facts import ModelFacts, read_facts
from toolkit.guess.proposal import Candidate, Proposal, Sureness, labels_of, takes_outputs


@dataclass(frozen=True, slots=True)
class Rule:
    """`read` gives the readings of a model, none if the rule does not match."""

    name: str
    sureness: Sureness
    read: Callable[[ModelFacts], tuple[Candidate, ...]]


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("metadata of Ultralytics",          "certain", ultralytics.candidates),
    Rule("names of EfficientNMS",            "certain", by_names.efficient_nms),
    Rule("names of YOLO-NAS",                "certain", by_names.yolo_nas),
    Rule("names of TensorFlow's detectors",  "certain", by_names.detection_boxes),
    Rule("names of DETR",                    "likely",  by_names.queries),
    Rule("names of RT-DETR",                 "certain", by_names.labels_boxes_scores),
    Rule("names of mmdeploy and RF-DETR",    "likely",  by_names.dets_labels),
    Rule("distances from every cell",        "likely",  by_names.ltrb),
    Rule("names of SSD and UltraFace",       "likely",  by_names.scores_boxes),
    Rule("names of DetectNet_v2",            "certain", by_names.coverage),
    Rule("names of YuNet",                   "certain", by_names.yunet),
    Rule("names of one family",              "likely",  by_names.names_alone),
    Rule("channels before cells",            "likely",  by_shapes.channels_first),
    Rule("three anchors a cell",             "likely",  by_shapes.anchor_rows),
    Rule("six columns for each cell",        "ask",     by_shapes.six_columns),
    Rule("a row for each cell",              "likely",  by_shapes.cell_rows),
    Rule("300 rows of six columns",          "likely",  by_shapes.finished_rows),
    Rule("rows of seven columns",            "ask",     by_shapes.seven_columns),
    Rule("levels of 1, 4 and 10 columns",    "likely",  by_shapes.scrfd),
    Rule("three heads of three anchors",     "likely",  by_shapes.raw_heads),
    Rule("rows of 4, 2 and 10 columns",      "likely",  by_shapes.retinaface),
    Rule("rows of 16 and 1 columns",         "likely",  by_shapes.blazeface),
    Rule("a vector of integers and boxes",   "likely",  by_shapes.torchvision),
    Rule("characters of a line",             "likely",  by_shapes.text_recognition),
    Rule("a map of one channel",             "ask",     by_shapes.one_channel),
    Rule("a map for each class",             "likely",  by_shapes.segmentation),
    Rule("one vector",                       "likely",  by_shapes.classifier),
)
# fmt: on


def guess(path: Path, input_size: tuple[int, int] | None = None) -> tuple[ModelFacts, Proposal]:
    """Return what a model says and how it is fed and read.

    `input_size`: (height, width) of a dynamic input. Raises GuessError if no rule matches; other
    TandemError where the file cannot be read.
    """
    facts = read_facts(path, input_size)
    proposal = propose(facts)
    return replace(facts, usual_size=proposal.best.usual_size), proposal


def propose(facts: ModelFacts) -> Proposal:
    """Return the answer of the first rule that matches and whose decoder takes the outputs."""
    for rule in RULES:
        candidates = rule.read(facts)
        fitting = tuple(candidate for candidate in candidates if takes_outputs(facts, candidate))
        if fitting:
            sureness: Sureness = "likely" if rule.sureness == "ask" else rule.sureness
            sureness = "ask" if len(fitting) > 1 or not fitting[0].sure else sureness
            return Proposal(rule.name, sureness, fitting, labels_of(facts))
    raise GuessError(_nothing(facts))


def _nothing(facts: ModelFacts) -> str:
    outputs = "; ".join(
        f"{output.name!r} {output.dtype} [{', '.join(str(d or '?') for d in output.shape)}]"
        + (f" from {node.op}" if (node := facts.producers.get(output.name)) is not None else "")
        for output in facts.outputs
    )
    ranks = [len(output.shape) for output in facts.outputs]
    hint = "write [decode] by hand (docs/decoders.md), or add a decoder (CONTRIBUTING.md)"
    if ranks and all(rank == 5 for rank in ranks[:3]):
        hint = "raw heads of a YOLO, whose anchors are not in the file: export it with its grid"
    elif {output.name for output in facts.outputs} == {"scores", "boxes"}:
        hint = "its boxes are offsets from priors: use the file of UltraFace with post-processing"
    return f"{facts.path.name}: no rule knows such outputs: {outputs}; {hint}."
