"""Run a graph with every activation as an output: what calibration observes."""

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from toolkit.errors import BuildError
from toolkit.lower import external_weights


def activation_runner(
    model: ir.Model, tensors: tuple[str, ...], threads: int | None = None
) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return a function from inputs to the named float32 activations, inputs included.

    Raises BuildError: onnxruntime cannot load the model.
    """
    import onnxruntime as ort

    observed = model.clone()
    inputs = {str(value.name) for value in observed.graph.inputs}
    declared = {str(value.name) for value in observed.graph.outputs}
    wanted = [name for name in tensors if name not in inputs]
    made = {str(value.name): value for node in observed.graph for value in node.outputs}
    observed.graph.outputs.extend(made[name] for name in wanted if name not in declared)
    weights = external_weights(observed.graph)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    if weights:
        options.add_external_initializers(
            list(weights), [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        )
    try:
        session = ort.InferenceSession(
            ir.to_proto(observed).SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
        )
    except Exception as err:
        raise BuildError(f"onnxruntime cannot run the model for calibration: {err}") from err

    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = session.run(wanted, dict(feeds)) if wanted else []
        result = dict(zip(wanted, arrays, strict=True))
        result.update({name: np.asarray(feeds[name]) for name in tensors if name in inputs})
        return result

    return run
