"""A model.onnx of a Triton repository, run by onnxruntime on the CPU without a build."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from device.closing import Closing
from device.errors import SessionError, shortened
from device.install_advice import pip_install
from pipelines.serving.model_config import Port
from pipelines.serving.protocol import BY_NUMPY, BYTES, Array, refuse

_TYPES = {"float": "FP32", "double": "FP64", "string": BYTES, "float16": "FP16"}


class OnnxFile(Closing):
    """A session of onnxruntime on a file; `share`: another one of the same file, whose session,
    and so weights, it uses too."""

    def __init__(self, path: Path, share: "OnnxFile | None" = None) -> None:
        """Raises SessionError: onnxruntime is missing, or refuses the model."""
        self._session: Any
        self.inputs: tuple[Port, ...]
        self.outputs: tuple[Port, ...]
        self._names: list[str]
        if share is not None:
            self._session, self.inputs, self.outputs = share._session, share.inputs, share.outputs
            self._names = share._names
            return
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise SessionError(f"{path} needs onnxruntime: {pip_install('portable')}") from error
        from device.runtime.exact_products import exact_session

        onnxruntime.set_default_logger_severity(4)
        try:
            self._session = exact_session(str(path), onnxruntime.SessionOptions())
        except Exception as error:  # onnxruntime's errors have no base of their own
            raise SessionError(
                f"{path} cannot be loaded by onnxruntime: {shortened(str(error))}"
            ) from error
        self.inputs = tuple(map(_port, self._session.get_inputs()))
        self.outputs = tuple(map(_port, self._session.get_outputs()))
        self._names = [port.name for port in self.outputs]

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run it; several threads may. BYTES are texts here."""
        try:
            values = self._session.run(self._names, dict(feeds))
        except Exception as error:  # as above
            raise SessionError(f"onnxruntime failed: {shortened(str(error))}") from error
        return dict(zip(self._names, values, strict=True))

    def close(self) -> None:
        """Give the session back."""
        del self._session


def texts_of(name: str, elements: Array) -> Array:
    """Return BYTES as texts, which is what onnxruntime takes. Raises Refusal: no UTF-8."""
    try:
        texts: Array = np.vectorize(_text, [object])(elements)
        return texts
    except UnicodeDecodeError:
        refuse(f"input {name!r} holds bytes that are no UTF-8, which onnxruntime does not take")


def _text(element: bytes | str) -> str:
    return element if isinstance(element, str) else element.decode()  # str: from another step


def _port(node: Any) -> Port:  # noqa: ANN401
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    datatype = _TYPES.get(kind) or BY_NUMPY.get(kind)
    if datatype is None:
        raise SessionError(
            f"{node.name!r} is a {node.type}, which the protocol has no datatype for"
        )
    return Port(node.name, datatype, tuple(node.shape))  # int, a symbol's name, or None
