"""Operators of fine-tuning against ONNX's own node tests, and against onnxruntime."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from backend_fixtures import stored_case, stored_cases
from onnx import TensorProto, helper

from device.dla_emulator.segment_graph import Node
from toolkit.finetune.operators import OPERATORS

REFUSALS = (RuntimeError, ValueError, IndexError)  # as toolkit/finetune/segment.py takes them


def computed(node: onnx.NodeProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return what PyTorch computes for a node. Raises REFUSALS."""
    attributes = {row.name: helper.get_attribute_value(row) for row in node.attribute}
    given = Node(node.op_type, "n", tuple(node.input), tuple(node.output), attributes)
    operands = [torch.from_numpy(feeds[name].copy()) if name else None for name in node.input]
    results = OPERATORS[node.op_type](given, operands)
    return [one.numpy() for one in (results if isinstance(results, tuple) else (results,))]


def agree(
    actual: list[np.ndarray], expected: list[np.ndarray], rtol: float = 1e-4, atol: float = 1e-5
) -> bool:
    return len(actual) == len(expected) and all(
        one.shape == second.shape and np.allclose(one, second, rtol, atol, equal_nan=True)
        for one, second in zip(actual, expected, strict=True)
    )


def test_node_tests_of_onnx_are_computed_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    equal, refused = set(), set()
    for path in sorted((stored_cases(tmp_path_factory) / "node").iterdir()):
        case = stored_case(path)
        node, *rest = case.model.graph.node
        inputs, outputs = case.data[0]
        if rest or node.domain or node.op_type not in OPERATORS:
            continue
        arrays = [*inputs, *outputs]
        if not all(isinstance(one, np.ndarray) for one in arrays) or any(
            one.dtype.name not in ("float32", "int64") for one in arrays
        ):
            continue
        names = [one.name for one in case.model.graph.input]
        try:
            results = computed(node, dict(zip(names, inputs, strict=True)))
        except REFUSALS:
            refused.add(case.name)
            continue
        shown = outputs[: len(results)]  # means of normalisations, which training does not need
        assert agree(results, shown, case.rtol, max(case.atol, 1e-5)), case.name
        equal.add(node.op_type)
    assert len(equal) >= 40, sorted(equal)
    assert {name.split("_")[1] for name in refused} <= {
        "averagepool", "batchnorm", "clip", "convtranspose", "reduce", "resize", "basic",
    }, sorted(refused)  # fmt: skip


SCALES = np.array([1, 1, 1.5, 1.5], np.float32)
# operator, shapes or values of its inputs, attributes; whether it is refused
CASES = [
    ("Flatten", [(2, 3, 4, 5)], {"axis": -1}, False),
    ("Max", [(2, 3)], {}, False),
    ("Min", [(2, 3), (2, 3), (3,)], {}, False),
    *(
        ("MaxPool", [(1, 2, size, size)], {
            "kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": pads, "ceil_mode": 1,
        }, refused)
        for size, kernel, stride, pads, refused in (
            (3, 2, 2, [1] * 4, False), (7, 3, 2, [1] * 4, False), (6, 2, 3, [1] * 4, False),
            (7, 3, 2, [0, 0, 1, 1], True),
        )
    ),
    ("AveragePool", [(1, 2, 7, 7)], {
        "kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4, "ceil_mode": 1,
    }, False),
    ("AveragePool", [(1, 2, 9, 9)], {"kernel_shape": [3, 3], "dilations": [2, 2]}, True),
    ("Resize", [(1, 2, 5, 5), None, SCALES], {"mode": "linear"}, True),
    ("Resize", [(1, 2, 4, 4), None, SCALES], {"mode": "linear"}, False),
    ("Resize", [(1, 2, 4, 4), None, SCALES], {"mode": "linear", "antialias": 1}, True),
    ("Resize", [(1, 2, 4, 4), None, SCALES], {
        "mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel",
    }, False),
    ("ReduceSum", [(2, 3, 4)], {"noop_with_empty_axes": 1}, False),
    ("LayerNormalization", [(2, 3, 4), (1,), (4,)], {}, False),
    ("LayerNormalization", [(2, 3, 4), (4,)], {}, False),
    ("Slice", [(3, 5), np.array([9]), np.array([12]), np.array([1])], {}, False),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "attributes", "refused"), CASES)
def test_numbers_are_onnxruntimes_or_the_node_is_refused(
    op: str, inputs: list, attributes: dict, refused: bool, rng: np.random.Generator
) -> None:
    feeds = {
        f"i{at}": one if isinstance(one, np.ndarray) else rng.normal(size=one).astype(np.float32)
        for at, one in enumerate(inputs)
        if one is not None
    }
    names = [f"i{at}" if one is not None else "" for at, one in enumerate(inputs)]
    node = helper.make_node(op, names, ["y"], **attributes)
    rows = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(one.dtype), one.shape)
        for name, one in feeds.items()
    ]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph([node], "g", rows, [result]),
        opset_imports=[helper.make_opsetid("", 19)], ir_version=9,
    )  # fmt: skip
    if refused:
        with pytest.raises(NotImplementedError):
            computed(node, feeds)
        return
    session = onnxruntime.InferenceSession(model.SerializeToString())
    assert agree(computed(node, feeds), session.run(None, feeds))
