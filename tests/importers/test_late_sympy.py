"""A command imports what it uses: sympy with the first formula, the solver with the first plan."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_fixtures import small_convnet

FORMULA = """
import sys
from toolkit.cli.late_sympy import import_sympy_late
{first}
import_sympy_late()
import onnx_ir as ir
before = "sympy" in sys.modules
size = ir.SymbolicDim("N") * 2 + 1
import sympy
import sympy.core.expr
same = isinstance(sympy.Integer(2), sympy.core.expr.Expr)
print(before, size, size.evaluate({{"N": 3}}), ir.SymbolicDim(sympy.Symbol("M")), same)
"""


@pytest.mark.parametrize(("first", "before"), [("", False), ("import sympy", True)])
def test_symbolic_sizes_are_computed_when_they_are_asked_for(first: str, before: bool) -> None:
    command = [sys.executable, "-c", FORMULA.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{before} 2*N + 1 7 M True\n"


def test_a_calibration_without_a_dla_imports_no_planner(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    np.save(tmp_path / "data.npy", rng.normal(size=(8, 3, 32, 32)).astype(np.float32))
    command = ["calibrate", str(model), "--data", str(tmp_path / "data.npy"), "--method", "entropy"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "toolkit.cli", *command, "--accept-loss"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert {"onnx_ir", "onnxscript", "onnxruntime"} <= imported
    assert imported.isdisjoint({"sympy", "highspy", "rich.console"})
    planner = (
        "toolkit.partition.planning.plan",
        "toolkit.partition.costs.model",
        "toolkit.dla.legalize",
    )
    assert imported.isdisjoint(planner)
