"""The layout of graphs: rows in the direction of the data, no boxes that overlap."""

import itertools
import re
import time
from pathlib import Path

import numpy as np
import pytest

from device.errors import TandemError
from toolkit.html.charts import WorkPoint, roofline
from toolkit.html.layout import lay_out
from toolkit.html.markup import Number, table
from toolkit.html.page import write_page


def random_graph(rng: np.random.Generator, count: int):
    sizes = [(float(rng.integers(40, 200)), float(rng.integers(20, 60))) for _ in range(count)]
    edges = {(int(rng.integers(max(0, at - 30), at)), at) for at in range(1, count)}
    edges |= {(int(rng.integers(0, at)), at) for at in range(1, count, 5)}
    return sizes, sorted(edges)


def test_boxes_keep_apart_and_edges_run_down() -> None:
    sizes, edges = random_graph(np.random.default_rng(), 80)
    layout = lay_out(sizes, edges)
    boxes = list(zip(layout.centres, sizes, strict=True))
    for ((ax, ay), (aw, ah)), ((bx, by), (bw, bh)) in itertools.combinations(boxes, 2):
        assert abs(ax - bx) >= (aw + bw) / 2 - 1e-6 or abs(ay - by) >= (ah + bh) / 2 - 1e-6
    for (x, y), (w, h) in boxes:
        assert x - w / 2 >= 0
        assert x + w / 2 <= layout.width
        assert y + h / 2 <= layout.height
    for (source, target), route in zip(edges, layout.routes, strict=True):
        (x, y), (to_x, to_y) = layout.centres[source], layout.centres[target]
        assert route[0] == (x, y + sizes[source][1] / 2)
        assert route[-1] == (to_x, to_y - sizes[target][1] / 2)
        heights = [y for _, y in route]
        assert heights == sorted(heights)


def test_a_chain_is_straight_and_an_empty_graph_is_nothing() -> None:
    layout = lay_out([(100.0, 30.0)] * 4, [(0, 1), (1, 2), (2, 3)])
    assert len({x for x, _ in layout.centres}) == 1
    assert lay_out([], []).centres == ()


def test_five_hundred_nodes_take_moments() -> None:
    sizes, edges = random_graph(np.random.default_rng(), 500)
    begin = time.process_time()
    lay_out(sizes, edges)
    assert time.process_time() - begin < 5


def test_texts_are_escaped_and_unknown_numbers_are_dashes() -> None:
    text = table("<a>", ["<b>"], [["<script>"], [Number(None)], [Number(2.5)]])
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert 'data-v="">-' in text
    assert 'data-v="2.5">2.5' in text


def test_a_point_lies_where_its_work_says() -> None:
    """Ten operations a byte at 1e9 a second: one decade from the left, at its own height."""
    title = roofline("r", [WorkPoint("conv", "gpu", 1e6, 1e5, 1000.0)], [], 1e9)
    assert "conv: 1 Gop/s at 10 operations a byte" in title


def test_numbers_without_an_order_or_a_limit_are_sorted() -> None:
    cells = [(Number(value),) for value in (float("inf"), float("-inf"), float("nan"), None)]
    text = table("t", ("v",), cells)
    assert re.findall(r'data-v="(.*?)"', text) == ["Infinity", "-Infinity", "", ""]


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TandemError, match="cannot be written"):
        write_page(tmp_path / "none" / "page.html", "")
