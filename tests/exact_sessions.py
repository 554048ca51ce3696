"""Sessions of onnxruntime that are a reference: products of INT8 are exact on every CPU."""

import onnx
import onnxruntime as ort

from device.runtime.executors.portable import start_exact


def exact_session(model: onnx.ModelProto) -> ort.InferenceSession:
    """As anybody would load a model, but on a CPU whose fast products of INT8 saturate."""
    content = model.SerializeToString()

    def start(keys: tuple[tuple[str, str], ...]) -> ort.InferenceSession:
        options = ort.SessionOptions()
        for key, value in keys:
            options.add_session_config_entry(key, value)
        return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    return start_exact(start)
