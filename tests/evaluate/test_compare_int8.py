"""The comparison with onnxruntime's INT8: its figures and its verdicts."""

import math
import sys
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from scripts.compare_int8 import (
    ASYMMETRIC,
    PEER,
    SAME_DB,
    SYMMETRIC,
    TANDEM,
    Row,
    closeness,
    int8_products,
    judge,
    table,
)


def _row(who, method, form, sqnr_db, output="logits"):
    return Row("net", output, who, method, form, 0.99, sqnr_db, 3, 4, 1.0)


def _rows(**changes):
    """Tandem is ahead of the symmetric peer by 1 dB and behind the asymmetric one by 1 dB."""
    rows = {
        "entropy": _row(TANDEM, "entropy", SYMMETRIC, 20.0),
        "minmax": _row(TANDEM, "minmax", SYMMETRIC, 21.0),
        "auto": _row(TANDEM, "auto", SYMMETRIC, 22.0),
        "peer_entropy": _row(PEER, "entropy", SYMMETRIC, 19.0),
        "peer_minmax": _row(PEER, "minmax", SYMMETRIC, 20.0),
        "peer_best": _row(PEER, "minmax", ASYMMETRIC, 23.0),
    }
    return [replace(row, sqnr_db=changes.get(name, row.sqnr_db)) for name, row in rows.items()]


def test_closeness_is_that_of_all_images_together():
    rng = np.random.default_rng()
    exact = [rng.normal(size=(1, 7)).astype(np.float32) * scale for scale in (1, 10, 100)]
    results = [one + rng.normal(size=one.shape).astype(np.float32) for one in exact]
    cosine, sqnr_db = closeness(exact, results)
    pairs = [
        (float(y), float(z))
        for one, second in zip(exact, results, strict=True)
        for y, z in zip(one.flat, second.flat, strict=True)
    ]
    signal = math.fsum(y * y for y, _ in pairs)
    noise = math.fsum((z - y) ** 2 for y, z in pairs)
    product = math.fsum(y * z for y, z in pairs)
    power = math.fsum(z * z for _, z in pairs)
    assert sqnr_db == pytest.approx(10 * math.log10(signal / noise))
    assert cosine == pytest.approx(product / math.sqrt(signal * power))


def test_equal_outputs_have_no_noise():
    one = [np.array([[1.0, -2.0]], np.float32)]
    assert closeness(one, one) == (pytest.approx(1.0), math.inf)


def test_a_product_is_int8_when_both_operands_are():
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["x"]),
        helper.make_node("DequantizeLinear", ["p", "s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["both"]),
        helper.make_node("MatMul", ["x", "float"], ["first"]),
        helper.make_node("Gemm", ["float", "w"], ["second"]),
        helper.make_node("Add", ["x", "w"], ["none"]),
    ]
    out = helper.make_tensor_value_info("both", TensorProto.FLOAT, None)
    graph: onnx.GraphProto = helper.make_graph(nodes, "g", [], [out])
    assert int8_products([graph]) == (1, 3)
    assert int8_products([graph, graph]) == (2, 6)


def test_symmetric_rows_are_compared_with_symmetric_rows():
    verdicts = judge(_rows())
    assert [line.rpartition(": ")[2] for line in verdicts[:3]] == ["loses on none of 1"] * 3
    assert verdicts[3].endswith("net logits by 1.0 dB to minmax asymmetric")


def test_auto_is_held_against_the_best_of_both_methods():
    verdicts = judge(_rows(peer_entropy=24.5))
    assert verdicts[0].endswith("loses on net logits by 4.5 dB to entropy symmetric")
    assert verdicts[1].endswith("loses on none of 1")
    assert verdicts[2].endswith("loses on net logits by 2.5 dB to entropy symmetric")


@pytest.mark.parametrize(("behind_db", "loses"), [(0.9 * SAME_DB, False), (1.1 * SAME_DB, True)])
def test_a_difference_that_the_table_does_not_show_is_no_loss(behind_db, loses):
    verdict = judge(_rows(minmax=20.0 - behind_db))[1]
    assert ("loses on net" in verdict) == loses


def test_every_output_is_judged_for_itself():
    second = [replace(row, output="boxes") for row in _rows(entropy=1.0)]
    verdict = judge([*_rows(), *second])[0]
    assert "net boxes by 18.0 dB" in verdict
    assert "logits" not in verdict


def test_the_table_lists_the_applied_corrections():
    row = replace(_row(TANDEM, "auto", SYMMETRIC, 22.04), corrections=("equalisation",))
    line = table([row])[-1]
    assert line == (
        "| net | logits | Tandem | auto + equalisation | symmetric | 0.99000 | 22.0 | 3 of 4 |"
    )


@pytest.mark.parametrize("missing", ["torch", "timm"])
def test_the_export_names_what_to_install(monkeypatch, missing):
    from scripts import export_models

    for name in ("torch", "torchvision", "timm"):
        present = type(sys)(name)
        monkeypatch.setitem(sys.modules, name, None if name == missing else present)
    with pytest.raises(SystemExit, match=rf"needs {missing}, .* pip install"):
        export_models._import_libraries()
