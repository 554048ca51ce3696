"""What the planner's own reasons mean: choices and policies, not limits of the DLA."""

from collections.abc import Mapping

from toolkit.dla.rules.meanings import Meaning
from toolkit.partition.planning.refusals import POLICY

# fmt: off
MEANINGS: Mapping[str, Meaning] = {
    "P2": Meaning("The DLA would take the node, but the plan is better, or keeps its limits, with "
        "it on the GPU. The reason gives the objective with the node's island moved there.",
        "Nothing is wrong. Build with another --objective to weigh it otherwise; "
        "`tandem plan --rate` asks for a frame rate."),
    "F1": Meaning("The node is named with `tandem plan --force-gpu`.",
        "Leave it out to let the plan choose."),
    "K1": Meaning("INT8 costs too much accuracy at this node, so that the calibration table keeps "
        "it in floating point. What the DLA runs is INT8.",
        "Calibrate with a larger --budget, or without the node in --keep-float."),
    "K2": Meaning("The node reads or writes values beyond 65504, the largest of FP16, in which the "
        "DLA would compute it: they would become infinite. Samples show it, or a square, an "
        "exponential or a sum of attention in the graph. On the GPU such values are FP32.",
        "Nothing is wrong. Build with --data where the graph alone says so and your data "
        "stay below."),
    "S1": Meaning("INT8 on the DLA needs the range of every tensor that the node reads or writes, "
        "and the table has none for this one.",
        "Calibrate with --data, or take a table that holds the tensor."),
    "compare.pair": Meaning("The DLA offers a comparison together with the Cast behind it, so that "
        "both run there or neither does.",
        "Find out what keeps the other one off the DLA: `tandem plan --explain NODE`."),
}
# fmt: on

SOURCES: Mapping[str, str] = {
    "P2": "the solver (`toolkit/partition/planning/placement.py`)",
    "F1": "the command line",
    "K1": "the calibration table (`toolkit/quantize/trials/budget.py`)",
    "K2": "the largest FP16 (IEEE 754)",
    "S1": "TensorRT guide, INT8 on the DLA",
    "G4.cut": "rule G4",
    "compare.pair": "TensorRT DLA layer restrictions",
}
LIMITS: Mapping[str, str] = {
    **POLICY,
    "P2": "the plan is best with the node elsewhere",
    "F1": "nodes named with `tandem plan --force-gpu` run on the GPU",
}
