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
from toolkit.late_imports import import_late
{first}
import_late()
import onnx_ir as ir
before = "sympy" in sys.modules
size = ir.SymbolicDim("N") * 2 + 1
import sympy
import sympy.core.expr
same = isinstance(sympy.Integer(2), sympy.core.expr.Expr)
print(before, size, size.evaluate({{"N": 3}}), ir.SymbolicDim(sympy.Symbol("M")), same)
"""


FOLDING = """
import sys
from toolkit.late_imports import import_late
import_late()
import onnx_ir as ir
from onnxscript import optimizer
before = "onnx.reference" in sys.modules
model = ir.from_onnx_text(
    "<ir_version: 9, opset_import: ['' : 18]> g (float[1] x) => (float[1] y) "
    "{ c = Constant <value_floats = [2.0]> () d = Constant <value_floats = [3.0]> () "
    "e = Add (c, d) y = Mul (x, e) }".replace("'", chr(34))
)
optimizer.optimize(model)
from onnx.reference import ReferenceEvaluator
(product,) = (node for node in model.graph if node.op_type == "Mul")
folded = product.inputs[1].const_value.numpy().tolist()
print(before, ReferenceEvaluator.__module__ in sys.modules, folded)
"""


@pytest.mark.parametrize(("first", "before"), [("", False), ("import sympy", True)])
def test_symbolic_sizes_are_computed_when_they_are_asked_for(first: str, before: bool) -> None:
    command = [sys.executable, "-c", FORMULA.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{before} 2*N + 1 7 M True\n"


def test_a_constant_is_folded_by_the_reference_that_is_imported_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FOLDING], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False True [5.0]\n"


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
    assert imported.isdisjoint({"sympy", "onnx.reference", "numpy.ma", "highspy", "rich.console"})
    planner = (
        "toolkit.partition.planning.plan",
        "toolkit.partition.costs.model",
        "toolkit.dla.legalize",
    )
    assert imported.isdisjoint(planner)
