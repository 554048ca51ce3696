"""The child process that makes ONNX of a TensorFlow or Keras model with tf2onnx.

    python tensorflow_export.py KIND MODEL OUT.onnx [--inputs-as-nchw]

It imports nothing of Tandem: its interpreter may have nothing but tensorflow and tf2onnx. Each line
on standard output is a JSON object: {"step", "share"} as it goes on, at the end {"versions"} or
{"error"}. Standard error is the log.
"""

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

HERE = os.path.dirname(os.path.abspath(__file__))
# Python searches this folder first when it runs this file, and onnx.py is not the package here.
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]

OPSET = 18  # the newest that tf2onnx 1.17 writes
# Older ones run code that is in a file: CVE-2025-9905 (.h5), -9906 and -1550 (.keras).
SAFE_KERAS = (3, 12)
# What is raised where nobody thought of a model, without a word of it.
SLIPS = (IndexError, KeyError, AttributeError, TypeError, AssertionError)
Say = Callable[[str, float], None]


def main() -> int:
    """Export, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(EXPORTERS))
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--inputs-as-nchw", action="store_true")
    options = parser.parse_args()
    answers = _own_stdout()

    def say(step: str, share: float) -> None:
        print(json.dumps({"step": step, "share": share}), file=answers, flush=True)

    try:
        say("load TensorFlow", 0.0)
        import tensorflow as tf
        import tf2onnx

        EXPORTERS[options.kind](options.model, options.out, options.inputs_as_nchw, say)
    except Exception as err:  # noqa: BLE001  (every error of these libraries is a message here)
        traceback.print_exc()
        print(json.dumps({"error": _reason(err)}), file=answers, flush=True)
        return 1
    versions = {"TensorFlow": tf.__version__, "tf2onnx": tf2onnx.__version__}
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    return 0


def _own_stdout() -> TextIO:
    """Keep standard output for answers; what libraries print there goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _reason(err: Exception) -> str:
    """Say what went wrong and at which operator; of a slip of the converter where in its code."""
    first = next((line.strip() for line in str(err).splitlines() if line.strip()), "")
    message = f"{type(err).__name__}: {first[:300]}" if first else type(err).__name__
    frames = [frame for frame, _ in traceback.walk_tb(err.__traceback__)]
    operator = next(filter(None, (_operator(frame.f_locals) for frame in reversed(frames))), None)
    if operator is not None:
        return f"tf2onnx cannot convert the operator {operator} ({message})"
    if isinstance(err, SLIPS):
        code = traceback.extract_tb(err.__traceback__)[-1]
        place = f"{code.name} ({os.path.basename(code.filename)}, line {code.lineno})"
        return f"the file is damaged, or of a kind that {place} does not know ({message})"
    return message


def _operator(names: Mapping[str, Any]) -> str | None:
    """Return the operator that a function of tf2onnx works on, by its local names."""
    for name in ("node", "op"):
        node = names.get(name)
        kind = getattr(node, "type", None)
        if isinstance(kind, str) and kind:
            title = getattr(node, "name", None)
            return f"{kind} (node {title!r})" if isinstance(title, str) else kind
    kind = names.get("optype")
    return kind if isinstance(kind, str) else None


def export_saved_model(folder: str, out: str, nchw: bool, say: Say) -> None:
    """Export a signature under the names that it gives to inputs and outputs."""
    import tensorflow as tf

    say("read the SavedModel", 0.2)
    model = tf.saved_model.load(folder)
    signatures = dict(model.signatures)
    name = "serving_default" if "serving_default" in signatures else next(iter(signatures), None)
    if name is None or (name != "serving_default" and len(signatures) > 1):
        raise ValueError(
            f"it has the signatures {sorted(signatures)}, but one called serving_default, or a "
            "single one, says what to run: save it with "
            "tf.saved_model.save(model, folder, signatures=model.call)"
        )
    arguments = signatures[name].structured_input_signature[1]
    inputs = [key for key, spec in arguments.items() if _is_picture(spec.shape)]
    del model
    say("export to ONNX", 0.4)
    _convert(
        {"--saved-model": folder, "--signature_def": name, "--tag": "serve"},
        out,
        [f"{key}:0" for key in inputs] if nchw else [],
    )


def export_keras(path: str, out: str, nchw: bool, say: Say) -> None:
    """Export a Keras file under the names of its input and output layers."""
    import keras
    import tensorflow as tf

    if tuple(int(part) for part in keras.__version__.split(".")[:2]) < SAFE_KERAS:
        needed = ".".join(map(str, SAFE_KERAS))
        raise ValueError(
            f"Keras {keras.__version__} can run code that is in a model file; "
            f"pip install 'keras>={needed}' there"
        )
    say("read the Keras model", 0.2)
    model = keras.models.load_model(path, compile=False, safe_mode=True)
    specs = [tf.TensorSpec(item.shape, item.dtype, item.name) for item in model.inputs]
    names = list(model.output_names)

    def serve(*inputs: Any) -> dict[str, Any]:  # noqa: ANN401  (tensors)
        outputs = model(list(inputs) if len(inputs) > 1 else inputs[0], training=False)
        return dict(zip(names, tf.nest.flatten(outputs), strict=True))

    signature = {"serving_default": tf.function(serve, input_signature=specs)}
    with tempfile.TemporaryDirectory(prefix="tandem-keras-") as folder:
        tf.saved_model.save(model, folder, signatures=signature)
        export_saved_model(folder, out, nchw, say)


def export_tflite(path: str, out: str, nchw: bool, say: Say) -> None:
    """Export a TensorFlow Lite file under the names of its tensors."""
    import tensorflow as tf

    say("read the TensorFlow Lite file", 0.2)
    interpreter = tf.lite.Interpreter(model_path=path)
    details = interpreter.get_input_details()
    inputs = [item["name"] for item in details if _is_picture(item["shape"])]
    say("export to ONNX", 0.4)
    _convert({"--tflite": path}, out, inputs if nchw else [])


def _is_picture(shape: Any) -> bool:  # noqa: ANN401  (TensorShape or an array)
    return len(shape) == 4


def _convert(source: dict[str, str], out: str, as_nchw: list[str]) -> None:
    """Run tf2onnx's own command line in this process."""
    from tf2onnx import convert

    arguments = [part for pair in source.items() for part in pair]
    arguments += ["--opset", str(OPSET), "--output", out]
    if as_nchw:
        arguments += ["--inputs-as-nchw", ",".join(as_nchw)]
    sys.argv = ["tf2onnx", *arguments]
    convert.main()
    _refuse_foreign(out)


def _refuse_foreign(out: str) -> None:
    """Refuse what tf2onnx writes under TensorFlow's name because ONNX has no such operator."""
    import onnx

    graph = onnx.load(out).graph
    foreign = [node for node in graph.node if not node.domain and not onnx.defs.has(node.op_type)]
    if foreign:
        kinds = ", ".join(sorted({node.op_type for node in foreign}))
        raise ValueError(
            f"tf2onnx has no ONNX for the operators {kinds} (first at node {foreign[0].name!r}); "
            "make the model without them"
        )


EXPORTERS: dict[str, Callable[[str, str, bool, Say], None]] = {
    "keras": export_keras,
    "saved-model": export_saved_model,
    "tflite": export_tflite,
}


if __name__ == "__main__":
    sys.exit(main())
