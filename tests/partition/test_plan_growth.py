"""The work of a plan, counted in calls of Python: twice the nodes take about twice the calls."""

import sys
from pathlib import Path
from types import FrameType

import numpy as np
from model_fixtures import save
from onnx import helper

from toolkit.engine.plan_models import PlanMember, PlanRequest, make_plan
from toolkit.partition.planning.plan import PlanOptions


def _islands(path: Path, blocks: int) -> Path:
    """Write a chain whose blocks the DLA takes in part, and in part after a rewrite."""
    title, nodes, value = f"n{blocks}", [], "x"
    weights = {
        "w": np.ones((8, 8, 3, 3), np.float32),
        "three": np.full((1, 1, 1, 1), 3, np.float32),
    }
    for i in range(blocks):
        rows = (
            ("Conv", [value, "w"], {"pads": [1, 1, 1, 1]}),
            ("Relu", [f"{title}_{i}_Conv"], {}),
            ("Sin", [f"{title}_{i}_Relu"], {}),  # no DLA takes it
            ("Conv", [f"{title}_{i}_Sin", "w"], {"pads": [2, 2, 2, 2], "dilations": [2, 2]}),
            ("Div", [f"{title}_{i}_Conv2", "three"], {}),  # it becomes a Mul
        )
        for at, (op, inputs, attributes) in enumerate(rows):
            value = f"{title}_{i}_{op}{2 if at == 3 else ''}"
            nodes.append(helper.make_node(op, inputs, [value], value, **attributes))
    size = [1, 8, 28, 28]
    return save(path, nodes, {"x": size}, {value: size}, weights)


def _calls_of_plan(path: Path) -> int:
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    request = PlanRequest(
        (PlanMember("m", path),), "agx-orin-64gb", options=PlanOptions(seconds=0.1)
    )
    sys.setprofile(on_event)
    try:
        make_plan(request)
    finally:
        sys.setprofile(None)
    return count


def test_twice_the_nodes_take_about_twice_the_calls(tmp_path: Path) -> None:
    _calls_of_plan(_islands(tmp_path / "first.onnx", 2))  # imports, and what is found once
    short, long = (_calls_of_plan(_islands(tmp_path / "m.onnx", n)) for n in (12, 24))
    assert long <= 2.3 * short
