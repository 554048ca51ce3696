"""The view of a node: shapes, resolved attributes, constants and work."""

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper
from planning_graphs import constant, graph_of, numbers, one_node

from toolkit.graph.node_view import views


def test_defaults_of_onnx_are_filled_in():
    node = one_node("Conv", [(1, 4, 8, 8), constant(8, 4, 3, 3)], (1, 8, 6, 6))
    assert node.window is not None
    assert node.window.kernel == (3, 3)
    assert node.window.strides == (1, 1)
    assert node.window.dilations == (1, 1)
    assert node.window.pads == (0, 0, 0, 0)
    assert node.attribute("group") == 1
    assert one_node("Gemm", [(1, 4), constant(4, 2)], (1, 2)).attribute("alpha") == 1.0


def test_defaults_follow_the_opset():
    old = one_node("Softmax", [(1, 4)], (1, 4), opset=11)
    new = one_node("Softmax", [(1, 4)], (1, 4), opset=13)
    assert (old.attribute("axis"), new.attribute("axis")) == (1, -1)


def test_automatic_padding_is_resolved():
    def pads(mode: str, stride: int) -> tuple[int, ...] | None:
        operands = [(1, 4, 8, 7), constant(8, 4, 3, 2)]
        node = one_node("Conv", operands, None, auto_pad=mode, strides=[stride, stride])
        return None if node.window is None else node.window.pads

    assert pads("SAME_UPPER", 1) == (1, 0, 1, 1)
    assert pads("SAME_LOWER", 1) == (1, 1, 1, 0)
    assert pads("SAME_UPPER", 2) == (0, 0, 1, 1)
    assert pads("VALID", 2) == (0, 0, 0, 0)


def test_automatic_padding_of_an_unknown_size_is_unknown():
    node = one_node("Conv", [None, constant(8, 4, 3, 3)], None, auto_pad="SAME_UPPER")
    assert node.window is not None
    assert node.window.pads is None


def test_constants_keep_small_values_and_shape():
    node = one_node("Reshape", [(2, 4), numbers(4, 2)], (4, 2))
    shape = node.input(1)
    assert shape is not None
    assert (shape.constant, shape.shape, shape.values) == (True, (2,), (4.0, 2.0))
    assert [tensor.name for tensor in node.activations] == ["in0"]
    assert node.weight_bytes == 16


def test_left_out_operands_are_none():
    node = one_node("Clip", [(2, 4), "", np.array(6, np.float32)], (2, 4))
    assert node.input(1) is None
    assert node.input(2) is not None
    assert node.input(3) is None


def test_multiply_accumulates_by_operator():
    def macs(op, operands, result, **attributes):
        return one_node(op, operands, result, **attributes).macs

    data = (2, 4, 8, 8)
    assert macs("Conv", [data, constant(8, 4, 3, 3)], (2, 8, 6, 6)) == 2 * 8 * 36 * 4 * 9
    depthwise = macs("Conv", [data, constant(4, 1, 3, 3)], (2, 4, 6, 6), group=4)
    assert depthwise == 2 * 4 * 36 * 9
    transposed = macs("ConvTranspose", [data, constant(4, 8, 2, 2)], (2, 8, 16, 16))
    assert transposed == 2 * 4 * 64 * 8 * 4
    assert macs("Gemm", [(3, 5), constant(5, 7)], (3, 7)) == 105
    assert macs("Gemm", [(5, 3), constant(5, 7)], (3, 7), transA=1) == 105
    assert macs("MatMul", [(2, 3, 5), constant(5, 7)], (2, 3, 7)) == 210
    assert macs("MaxPool", [data], (2, 4, 4, 4), kernel_shape=[2, 2]) == 2 * 4 * 16 * 4
    assert macs("GlobalAveragePool", [data], (2, 4, 1, 1)) == 512
    assert macs("Relu", [data], data) == 512
    assert macs("Reshape", [data, numbers(2, 256)], (2, 256)) == 0


def test_a_dynamic_batch_counts_as_one():
    assert one_node("Relu", [("N", 4, 8, 8)], ("N", 4, 8, 8)).macs == 256


def test_unknown_shapes_leave_the_work_unknown():
    assert one_node("Relu", [None], None).macs is None
    assert one_node("Relu", [(1, "C", 8, 8)], (1, "C", 8, 8)).macs is None


def test_views_come_in_topological_order_without_constants():
    nodes = [
        helper.make_node("Relu", ["b"], ["c"], name="second"),
        helper.make_node("Add", ["x", "k"], ["b"], name="first"),
        helper.make_node("Constant", [], ["k"], name="k", value_float=2.0),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 2))]
    outputs = [helper.make_tensor_value_info("c", TensorProto.FLOAT, (1, 2))]
    graph = helper.make_graph(nodes, "unsorted", inputs, outputs)
    model = ir.from_proto(helper.make_model(graph))
    assert [node.name for node in views(model.graph)] == ["first", "second"]


def test_tensors_that_a_subgraph_captures_are_read():
    def branch(name: str, op: str) -> object:
        body = [helper.make_node(op, ["y"], [name], name=name)]
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 2))
        return helper.make_graph(body, name, [], [out])

    nodes = [
        helper.make_node("Relu", ["x"], ["y"], name="made"),
        helper.make_node(
            "If",
            ["flag"],
            ["z"],
            name="choice",
            then_branch=branch("a", "Abs"),
            else_branch=branch("b", "Neg"),
        ),
    ]
    weights = {"flag": np.array(True)}
    result, choice = views(graph_of(nodes, {"x": (1, 2)}, ["z"], weights).graph)
    assert choice.reads == ("y",)
    assert choice.has_subgraph
    assert result.after == ("Abs", "Neg")


def test_neighbours_are_named_by_operator():
    node = one_node("Reshape", [(1, 4), numbers(4, 1)], (4, 1), before="Slice", after="Concat")
    assert node.before == ("Slice",)
    assert node.after == ("Concat",)
