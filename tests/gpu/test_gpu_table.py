"""The benchmark's tables: runs merged, and what is said of them."""

import json
import math
from pathlib import Path

import pytest

from scripts import gpu_table
from scripts.gpu_table import Ceilings, Cell, Run, means, merged, ratios, tables

CEILINGS = Ceilings(750.0, 1500.0, 4.2)


def cell(subject: str, batch: int, time_us: float, network: str = "resnet50") -> Cell:
    return Cell(network, batch, subject, error=2.5e-3, time_us=time_us, floor_us=50.0)


def test_a_later_run_counts_where_two_have_a_cell() -> None:
    first = Run(CEILINGS, (cell("fp16", 1, 200.0), cell("compiled", 1, 300.0)))
    second = Run(CEILINGS, (cell("fp16", 1, 100.0),))
    assert ratios(merged([first, second]), "fp16", "compiled") == {("resnet50", 1): 3.0}
    assert ratios(merged([second, first]), "fp16", "compiled") == {("resnet50", 1): 1.5}


def test_means_are_geometric_and_leave_out_cells_without_a_peer() -> None:
    cells = [cell("int8", 1, 100.0), cell("int8", 8, 100.0), cell("int8", 32, 100.0)]
    peers = [cell("compiled", 1, 200.0), cell("compiled", 8, 800.0)]
    whole, at_1, at_8 = means(merged([Run(CEILINGS, (*cells, *peers))]), "int8", "compiled")
    assert f"geometric mean {math.sqrt(2 * 8):.2f}x, least 2.00x, 2 cells" in whole
    assert "batch 1: geometric mean 2.00x" in at_1
    assert "batch 8: geometric mean 8.00x" in at_8


def test_every_row_has_the_columns_of_its_head() -> None:
    subjects = ("fp16", "int8", "compiled", "eager")
    cells = [
        cell(subject, batch, 100.0 * at + batch, network)
        for at, subject in enumerate(subjects, 1)
        for batch in (32, 8)
        for network in ("vit_small", "resnet50")
        if (subject, batch) != ("eager", 8)
    ]
    lines = tables(merged([Run(CEILINGS, tuple(cells))]))
    rows = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in rows[:6]} == {rows[0].count("|")}
    assert {line.count("|") for line in rows[6:]} == {rows[6].count("|")}
    assert [line.split("|")[1].strip() for line in rows[2:6]] == ["ResNet-50", "", "ViT-S", ""]
    batch_8 = "| ResNet-50 | 8 | 108 | 308 |  | 2.85x | 50 | 2.2 | 2.5e-03 | 2.5e-03 |"
    assert rows[2] == batch_8


def test_files_of_runs_become_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ceilings = {"fp16_tflops": 750.0, "int8_tops": 1500.0, "memory_tbps": 4.2}
    paths = []
    for subject, time_us in (("fp16", 100.0), ("compiled", 140.0)):
        row = {"network": "vit_small", "batch": 8, "subject": subject}
        row |= {"error": 1e-3, "time_us": time_us, "floor_us": 20.0}
        path = tmp_path / f"{subject}.json"
        path.write_text(json.dumps({"ceilings": ceilings, "cells": [row]}))
        paths.append(str(path))
    monkeypatch.setattr("sys.argv", ["gpu_table", *paths])
    gpu_table.main()
    output = capsys.readouterr().out
    assert "| ViT-S | 8 | 100 | 140 |  | 1.40x |" in output
    assert "fp16 against compiled, all batches: geometric mean 1.40x" in output


def test_a_table_without_rows_is_left_out() -> None:
    lines = tables(merged([Run(CEILINGS, (cell("fp16", 1, 100.0),))]))
    assert not any("INT8" in line for line in lines)
