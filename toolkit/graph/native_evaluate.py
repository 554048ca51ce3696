"""A step of the child of `toolkit.graph.native`: one node on constants, in ONNX's reference."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator


def evaluate(proto: onnx.ModelProto, options: Mapping[str, Any]) -> bytes:
    """Run a graph of constants; return its results as the initializers of a GraphProto.

    Results that are no arrays are left out. Raises RuntimeError: they have more than `max_bytes`.
    """
    names = [value.name for value in proto.graph.output]
    results = ReferenceEvaluator(proto).run(None, {})
    total = sum(result.nbytes for result in results if isinstance(result, np.ndarray))
    if total > options["max_bytes"]:
        raise RuntimeError(f"{total} bytes, at most {options['max_bytes']} are taken")
    tensors = [
        numpy_helper.from_array(result, name)
        for name, result in zip(names, results, strict=True)
        if isinstance(result, np.ndarray)
    ]
    return bytes(helper.make_graph([], "results", [], [], tensors).SerializeToString())
