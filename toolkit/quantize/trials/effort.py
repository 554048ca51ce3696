"""How much a search for INT8 ranges may run a model: less if one run computes more.

A detector of 134 G multiplications takes 0.8 s for a run on 8 cores, a classifier of 4 G a fortieth
of that, and a search of a thousand runs would end in minutes for one and in half an hour for the
other. The limits depend on the model alone, so that every computer chooses the same.
"""

import onnx_ir as ir

from toolkit.quantize.trials.metrics import int8_macs

MAX_WORK = 1e13
"""Multiplications of the runs of one search; models below 12 G have the largest search of all."""
RUNS_OF_A_SAMPLE = 25
"""Runs of each sample that validates, about, beside those of the searches."""


def affordable_runs(model: ir.Model, most: int, least: int = 1) -> int:
    """Return how many runs of a model one search may take, from `least` to `most`."""
    macs = sum(int8_macs(model).values())
    return max(least, min(most, int(MAX_WORK / macs))) if macs else most


def affordable_samples(model: ir.Model, most: int, least: int) -> int:
    """Return how many samples may validate a model, from `least` to `most`."""
    runs = affordable_runs(model, most * RUNS_OF_A_SAMPLE, least * RUNS_OF_A_SAMPLE)
    return runs // RUNS_OF_A_SAMPLE
