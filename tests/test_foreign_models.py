"""Models made by others, from wheels: what the table says of them is what they say themselves."""

import numpy as np
import onnxruntime
import pytest
from foreign_models import MODELS, ForeignModel, foreign_model

by_name = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


@by_name
def test_onnxruntime_takes_the_inputs_of_the_table(
    model: ForeignModel, rng: np.random.Generator
) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        foreign_model(model.name), options, providers=["CPUExecutionProvider"]
    )
    assert {value.name for value in session.get_inputs()} == set(model.feeds(rng))
    outputs = session.run(None, model.feeds(rng))
    assert all(np.isfinite(output).all() for output in outputs)
