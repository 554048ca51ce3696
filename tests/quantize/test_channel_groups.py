"""Channels that Add, Concat, Split and several readers tie together are rescaled as one."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from model_fixtures import prepared, save
from onnx import helper

from toolkit.errors import BuildError
from toolkit.quantize.corrections.channel_groups import find_groups
from toolkit.quantize.corrections.equalise import (
    channel_ranges,
    equalise,
    link_tensors,
    scale_channels,
)
from toolkit.quantize.observe import ActivationRunner

SHAPE = [1, 4, 8, 8]
Nodes = Sequence[onnx.NodeProto]


def conv(inputs: Sequence[str], output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node("Conv", inputs, [output], f"conv_{output}", **attributes)


def node(
    op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: object
) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, f"node_{outputs[0]}", **attributes)


def network(
    path: Path, rng: np.random.Generator, between: Nodes, channels: int, widths: Mapping[str, int]
) -> ir.Model:
    """x -> convolutions a, b, .. of `widths` -> the nodes between -> h [channels] -> conv y."""
    constants = {"wy": rng.normal(size=(5, channels, 3, 3)), "by": rng.normal(size=5)}
    nodes = []
    for name, width in widths.items():
        rows = 10 ** rng.uniform(-1, 1, (width, 1, 1, 1))
        constants[f"w{name}"] = rng.normal(size=(width, 4, 3, 3)) * rows
        constants[f"b{name}"] = rng.normal(size=width) * rows.reshape(-1)
        nodes.append(conv(["x", f"w{name}", f"b{name}"], name, pads=[1, 1, 1, 1]))
    nodes += [*between, conv(["h", "wy", "by"], "y")]
    stored = {name: array.astype(np.float32) for name, array in constants.items()}
    stored["scales"] = np.array([1, 1, 2, 2], np.float32)
    return prepared(save(path, nodes, {"x": SHAPE}, {"y": [1, 5, None, None]}, stored))


def noise(rng: np.random.Generator, count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": rng.normal(size=SHAPE).astype(np.float32)} for _ in range(count)]


def factors_of(model: ir.Model, rng: np.random.Generator) -> dict[str, np.ndarray]:
    tensors, run = link_tensors(model), ActivationRunner
    observed = channel_ranges(run(model, tensors), noise(rng, 4), tensors)
    return dict(equalise(model, observed).factors)


def outputs(model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    """The outputs in onnxruntime without its optimisations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return np.concatenate([session.run(["y"], dict(sample))[0] for sample in samples])


RELU = node("Relu", ["m"], ["h"])
TIED: Mapping[str, tuple[Nodes, int, Mapping[str, int]]] = {
    "sum": ([node("Add", ["a", "b"], ["m"]), RELU], 6, {"a": 6, "b": 6}),
    "difference": ([node("Sub", ["a", "b"], ["m"]), RELU], 6, {"a": 6, "b": 6}),
    "two readers": ([node("Relu", ["a"], ["m"]), node("Add", ["m", "a"], ["h"])], 6, {"a": 6}),
    "row": ([node("Concat", ["a", "b"], ["m"], axis=1), RELU], 9, {"a": 6, "b": 3}),
    "row of space": ([node("Concat", ["a", "b"], ["h"], axis=2)], 6, {"a": 6, "b": 6}),
    "parts": (
        [node("Split", ["a"], ["p", "q"], axis=1, num_outputs=2), node("Add", ["p", "q"], ["h"])],
        3,
        {"a": 6},
    ),
    "parts that change places": (
        [
            node("Split", ["a"], ["p", "q"], axis=1, num_outputs=2),
            node("Concat", ["q", "p", "q"], ["h"], axis=1),
        ],
        9,
        {"a": 6},
    ),
    "larger": (
        [
            node("Resize", ["a", "", "scales"], ["m"], mode="linear"),
            node("Resize", ["b", "", "scales"], ["n"], mode="nearest"),
            node("Add", ["m", "n"], ["h"]),
        ],
        6,
        {"a": 6, "b": 6},
    ),
    "gate": (
        [
            node("GlobalAveragePool", ["b"], ["g"]),
            node("Sigmoid", ["g"], ["s"]),
            node("Mul", ["a", "s"], ["m"]),
            node("Add", ["m", "a"], ["h"]),
        ],
        6,
        {"a": 6, "b": 6},
    ),
}


@pytest.mark.parametrize("name", TIED)
def test_outputs_stay_the_same_where_channels_are_tied(
    tmp_path: Path, rng: np.random.Generator, name: str
) -> None:
    between, channels, widths = TIED[name]
    model = network(tmp_path / "m.onnx", rng, between, channels, widths)
    factors = factors_of(model, rng)
    assert factors.keys() == widths.keys() - ({"b"} if name == "gate" else set())
    assert all(factor.max() / factor.min() > 1.1 for factor in factors.values())
    changed, samples = scale_channels(model, factors), noise(rng, 3)
    before = outputs(model, samples)
    assert np.abs(outputs(changed, samples) - before).max() <= 1e-5 * np.abs(before).max()
    assert len(list(changed.graph)) == len(list(model.graph))


def test_random_networks_stay_the_same_in_float(tmp_path: Path, rng: np.random.Generator) -> None:
    scaled = 0
    for number in range(12):
        between, last = [], ["a", "b", "c"]
        for step in range(6):
            first, second = (str(name) for name in rng.choice(last, 2))
            op = rng.choice(
                ["Add", "Relu", "MaxPool", "Sigmoid", "Conv", "Mean"],
                p=[0.35, 0.25, 0.1, 0.05, 0.15, 0.1],
            )
            result = f"t{step}"
            if op == "Add":
                between.append(node("Add", [first, second], [result]))
            elif op == "MaxPool":
                between.append(
                    node("MaxPool", [first], [result], kernel_shape=[3, 3], pads=[1] * 4)
                )
            elif op == "Mean":
                between += [
                    node("Concat", [first, second], [f"{result}_row"], axis=1),
                    node(
                        "Split",
                        [f"{result}_row"],
                        [result, f"{result}_rest"],
                        axis=1,
                        num_outputs=2,
                    ),
                ]
            elif op == "Conv":
                between.append(conv([first, "wd"], result, group=4, pads=[1] * 4))
            else:
                between.append(node(str(op), [first], [result]))
            last.append(result)
        between.append(node("Concat", last[-3:], ["h"], axis=1))
        path = tmp_path / f"{number}.onnx"
        model = network_with_depthwise(path, rng, between)
        factors, samples = factors_of(model, rng), noise(rng, 2)
        scaled += bool(factors)
        before = outputs(model, samples)
        after = outputs(scale_channels(model, factors), samples)
        assert np.abs(after - before).max() <= 3e-5 * np.abs(before).max()
    assert scaled >= 6


def network_with_depthwise(path: Path, rng: np.random.Generator, between: Nodes) -> ir.Model:
    constants = {"wd": rng.normal(size=(4, 1, 3, 3)), "wy": rng.normal(size=(5, 12, 3, 3))}
    nodes = []
    for name in "abc":
        rows = 10 ** rng.uniform(-1, 1, (4, 1, 1, 1))
        constants[f"w{name}"] = rng.normal(size=(4, 4, 1, 1)) * rows
        nodes.append(conv(["x", f"w{name}"], name))
    nodes += [*between, conv(["h", "wy"], "y")]
    stored = {name: array.astype(np.float32) for name, array in constants.items()}
    return prepared(save(path, nodes, {"x": SHAPE}, {"y": [1, 5, None, None]}, stored))


@pytest.mark.parametrize(
    "between",
    [
        [node("Sigmoid", ["a"], ["s"]), node("Mul", ["a", "s"], ["h"])],
        [node("Add", ["a", "x6"], ["h"])],
        [
            node("Concat", ["a", "b"], ["m"], axis=1),
            node("Sigmoid", ["m"], ["n"]),
            node("Split", ["n"], ["h", "r"], axis=1, num_outputs=2),
        ],
    ],
    ids=["silu", "computed elsewhere", "behind a function"],
)
def test_channels_that_something_else_reads_are_left_alone(
    tmp_path: Path, rng: np.random.Generator, between: Nodes
) -> None:
    widths = {"a": 6, "b": 6, "c": 6}
    extra = [node("Sigmoid", ["c"], ["x6"])]
    model = network(tmp_path / "m.onnx", rng, [*extra, *between], 6, widths)
    groups = find_groups(model.graph)
    assert not groups.producers
    assert not groups.readers


def test_factors_that_part_tied_channels_are_refused(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    between, channels, widths = TIED["sum"]
    model = network(tmp_path / "m.onnx", rng, between, channels, widths)
    factors = factors_of(model, rng)
    factors["b"] = factors["b"] * 2.0
    with pytest.raises(BuildError, match="'a' has channels that other tensors share"):
        scale_channels(model, factors)


def test_channels_of_a_resize_along_them_are_fixed(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Its result has more channels than it reads; what is added to it has others."""
    between = [
        node("Resize", ["a", "", "scales"], ["r"], mode="nearest"),
        node("Add", ["r", "b"], ["m"]),
        RELU,
    ]
    model = network(tmp_path / "m.onnx", rng, between, 6, {"a": 3, "b": 6})
    model.graph.initializers["scales"].const_value = ir.tensor(
        np.array([1, 2, 1, 1], np.float32), name="scales"
    )
    groups = find_groups(model.graph)
    assert not groups.producers
    assert "a" not in link_tensors(model)
