"""Classifiers."""

import numpy as np

from pipelines.config import PreprocessConfig
from pipelines.decode_config import Classification
from pipelines.results import ClassScores
from pipelines.stages.decoders.candidates import Outputs, output_of
from pipelines.stages.decoders.expected import CLASSES, Expected
from pipelines.stages.view import View


def classification_outputs(
    config: Classification, preprocess: PreprocessConfig
) -> tuple[Expected, ...]:
    """Return the output of `classification`."""
    return (Expected("scores", config.scores, (1, CLASSES), more_ones=True),)


def decode_classification(outputs: Outputs, config: Classification, view: View) -> ClassScores:
    """Return the best classes; those whose score is no number go."""
    scores = output_of(outputs, config.scores).reshape(-1).astype(np.float64)
    if config.softmax:
        powers = np.exp(scores - scores.max())
        scores = powers / powers.sum()
    order = np.argsort(-scores, kind="stable")[: config.top]  # NaN is last
    order = order[np.isfinite(scores[order])]
    return ClassScores(scores[order].astype(np.float32), order.astype(np.int64))
