"""Makes TensorFlow models with random weights, an input of each and what TensorFlow computes.

    python tensorflow_models.py FOLDER KIND...

Runs in the interpreter that has TensorFlow. Writes the model of each kind to FOLDER/KIND, and
run.npz: the arrays `in:NAME` and `out:NAME` of inputs and outputs.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

applications = keras.applications
OPTIONS = {"weights": None, "classes": 10, "classifier_activation": None}


def as_trained(model: Any) -> Any:
    """Give the batch normalizations statistics other than 0 and 1."""
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.moving_mean.assign(np.random.normal(0, 0.1, layer.moving_mean.shape))
            layer.moving_variance.assign(np.random.uniform(0.5, 1.5, layer.moving_mean.shape))
    return model


def mobilenet(size: int = 64) -> Any:
    return as_trained(applications.MobileNet(input_shape=(size, size, 3), alpha=0.25, **OPTIONS))


def mobilenet_v3(size: int = 64) -> Any:
    return as_trained(applications.MobileNetV3Small(input_shape=(size, size, 3), **OPTIONS))


def picture(size: int = 64) -> np.ndarray:
    return np.random.uniform(-1, 1, (1, size, size, 3)).astype(np.float32)


def of_keras(model: Any, path: Path) -> dict[str, np.ndarray]:
    x = picture()
    model.save(path)
    return {
        f"in:{model.layers[0].name}": x,
        f"out:{model.output_names[0]}": model(x, training=False).numpy(),
    }


def make_keras(folder: Path) -> dict[str, np.ndarray]:
    return of_keras(mobilenet_v3(), folder / "model.keras")


def make_h5(folder: Path) -> dict[str, np.ndarray]:
    return of_keras(mobilenet(), folder / "model.h5")


def make_saved_model(folder: Path) -> dict[str, np.ndarray]:
    """Save a function of TensorFlow alone, with two inputs and two outputs."""
    backbone = applications.MobileNetV2(input_shape=(64, 64, 3), alpha=0.35, **OPTIONS)
    as_trained(backbone)

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone

        @tf.function(
            input_signature=[
                tf.TensorSpec((None, 64, 64, 3), tf.float32, "image"),
                tf.TensorSpec((None, 10), tf.float32, "bias"),
            ]
        )
        def run(self, image: Any, bias: Any) -> dict[str, Any]:
            logits = self.backbone(image, training=False) + bias
            return {"logits": logits, "scores": tf.nn.softmax(logits)}

    net, bias = Net(), np.random.normal(size=(1, 10)).astype(np.float32)
    tf.saved_model.save(net, folder / "saved_model", signatures={"serving_default": net.run})
    x = picture()
    outputs = {f"out:{key}": value.numpy() for key, value in net.run(x, bias).items()}
    return {"in:image": x, "in:bias": bias, **outputs}


def make_tflite(folder: Path) -> dict[str, np.ndarray]:
    return of_tflite(tf.lite.TFLiteConverter.from_keras_model(mobilenet()), folder, picture())


def make_int8_tflite(folder: Path) -> dict[str, np.ndarray]:
    """Quantize to INT8, with inputs and outputs in float32."""
    converter = tf.lite.TFLiteConverter.from_keras_model(mobilenet())
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([picture()] for _ in range(8))
    return of_tflite(converter, folder, picture())


def of_tflite(converter: Any, folder: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    content = converter.convert()
    (folder / "model.tflite").write_bytes(content)
    interpreter = tf.lite.Interpreter(model_content=content)
    interpreter.allocate_tensors()
    (source,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.set_tensor(source["index"], x)
    interpreter.invoke()
    return {
        f"in:{source['name']}": x,
        f"out:{result['name']}": interpreter.get_tensor(result["index"]),
    }


def make_eigenvalues(folder: Path) -> dict[str, np.ndarray]:
    """Save a function with an operator that ONNX lacks."""

    class Net(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((3, 3), tf.float32, "x")])
        def run(self, x: Any) -> Any:
            return tf.linalg.eigvalsh(x)

    net = Net()
    tf.saved_model.save(net, folder / "saved_model", signatures={"serving_default": net.run})
    return {}


MAKERS: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
    "keras": make_keras,
    "h5": make_h5,
    "saved_model": make_saved_model,
    "tflite": make_tflite,
    "int8_tflite": make_int8_tflite,
    "eigenvalues": make_eigenvalues,
}


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        target = Path(sys.argv[1]) / kind
        target.mkdir()
        np.savez(target / "run.npz", **MAKERS[kind](target))
