"""Pages in a real browser: they load alone, search, tell, sort, and cut nothing off."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from browser_fixtures import Browser, open_browser
from click.testing import CliRunner
from onnx import helper
from planning_graphs import constant, graph_of

from toolkit.cli.main import tandem

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&amp;"
LONG = "/model.22/" + "cv2_very_long_name/" * 20

# Elements whose content is wider than they are, and that do not scroll by themselves.
CUT_OFF = """
Array.from(document.querySelectorAll("body, body *:not(svg *)")).filter(element => {
  const overflow = getComputedStyle(element).overflowX;
  return element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1
    && overflow !== "auto" && overflow !== "scroll" && !(element.tagName === "INPUT");
}).map(element => `${element.tagName}.${element.className}: ${element.scrollWidth}`)
"""


# Texts of charts that reach beyond the drawing.
OUTSIDE = """
Array.from(document.querySelectorAll("svg.chart text")).filter(text => {
  const [box, frame] = [text.getBBox(), text.ownerSVGElement.viewBox.baseVal];
  return box.x < -1 || box.y < -1 || box.x + box.width > frame.width + 1
    || box.y + box.height > frame.height + 1;
}).map(text => text.textContent)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def model(folder):
    """Convolutions with hostile and long names around a branch."""
    names = ["first", HOSTILE, LONG, "last"]
    nodes, weights, data = [], {}, "x"
    for index, name in enumerate(names):
        weights[f"w{index}"] = constant(8, 8, 3, 3)
        nodes.append(helper.make_node("Conv", [data, f"w{index}"], [f"t{index}"], name=name,
                                      pads=[1] * 4))  # fmt: skip
        data = f"t{index}"
    nodes.append(helper.make_node("Add", ["t0", data], ["s"], name="branch"))
    nodes.append(helper.make_node("Erf", ["s"], ["y"], name="erf"))
    path = folder / "model.onnx"
    onnx.save(ir.to_proto(graph_of(nodes, {"x": (1, 8, 16, 16)}, ["y"], weights)), path)
    return path


@pytest.fixture(scope="module")
def engine(model, folder):
    path, page = folder / "a.engine", folder / "build.html"
    run("build", model, "--precision", "fp32", "-o", path, "--html", page)
    return path


@pytest.fixture(scope="module")
def browser(folder):
    with open_browser(folder) as opened:
        yield opened


def run(*arguments: object) -> str:
    done = CliRunner().invoke(tandem, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def opened(browser: Browser, page: Path, width: int = 1280) -> Browser:
    browser.errors.clear()
    browser.requested.clear()
    browser.resize(width, 900)
    browser.open(page)
    return browser


def check_page(browser: Browser, page: Path) -> None:
    """The page asks for nothing, fails nowhere, and cuts nothing at two widths."""
    for width in (1280, 400):
        opened(browser, page, width)
        assert browser.evaluate("innerWidth") == width
        assert browser.errors == []
        assert browser.requested == [page.as_uri()]
        assert browser.evaluate(CUT_OFF) == []
        assert browser.evaluate(OUTSIDE) == []
        assert browser.evaluate("document.querySelectorAll('th:not([scope])').length") == 0
        unlabelled = "svg:not([aria-label]), .scroll:not([aria-label])"
        assert browser.evaluate(f"document.querySelectorAll('{unlabelled}').length") == 0
        assert browser.evaluate("document.title") != "owned"


def pages(model: Path, engine: Path, folder: Path) -> dict[str, Path]:
    second = folder / "b.engine"
    run("build", model, "--profile", "orin-nx-16gb", "--precision", "int8", "--dummy-ranges",
        "-o", second)  # fmt: skip
    written = {
        name: folder / f"{name}.html" for name in ("inspect", "model", "bench", "two", "plan")
    }
    run("inspect", second, "--html", written["inspect"])
    run("inspect", model, "--profile", "orin-nx-16gb", "--html", written["model"])
    run("bench", engine, "--iterations", "20", "--warmup", "0", "--profile", "--html",
        written["bench"])  # fmt: skip
    run("compare", engine, second, "--random", "1", "--html", written["two"])
    run("plan", model, "--profile", "orin-nx-16gb", "--html", written["plan"])
    return {**written, "build": folder / "build.html"}


def test_every_page_is_whole_alone_and_cuts_nothing(browser, model, engine, folder):
    for page in pages(model, engine, folder).values():
        check_page(browser, page)
        assert browser.evaluate("document.querySelectorAll('svg .node').length") >= 6


def test_search_centres_what_it_finds(browser, engine, folder):
    opened(browser, folder / "build.html")
    browser.evaluate(
        "(() => { const field = document.querySelector('.graph input'); field.value = 'ERF';"
        "field.dispatchEvent(new Event('input')); })()"
    )
    assert browser.evaluate("document.querySelector('[role=status]').textContent") == "1 of 1"
    assert browser.evaluate("document.querySelector('.node.hit').dataset.search").startswith("erf")
    away = """(() => {
      const field = document.querySelector(".graph svg").getBoundingClientRect();
      const node = document.querySelector(".node.hit").getBoundingClientRect();
      return Math.hypot(node.x + node.width / 2 - field.x - field.width / 2,
                        node.y + node.height / 2 - field.y - field.height / 2);
    })()"""
    assert browser.evaluate(away) < 20


def test_the_panel_tells_reason_shape_precision_and_time(browser, engine, folder):
    opened(browser, folder / "build.html")
    panel_text = browser.evaluate("""(() => {
      const node = document.querySelectorAll(".node")[1];
      node.dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
      return document.querySelector(".about").innerText;
    })()""")
    for word in (HOSTILE, "why there", "precision", "FP32", "1x8x16x16", "predicted time"):
        assert word in panel_text


def test_buttons_and_wheel_zoom(browser, engine, folder):
    opened(browser, folder / "build.html")
    width = "Number(document.querySelector('.graph svg').getAttribute('viewBox').split(' ')[2])"
    before = browser.evaluate(width)
    browser.evaluate("document.querySelector('[data-do=in]').click()")
    nearer = browser.evaluate(width)
    browser.evaluate(
        "document.querySelector('.graph svg').dispatchEvent("
        "new WheelEvent('wheel', {deltaY: 500, cancelable: true}))"
    )
    assert nearer < before
    assert browser.evaluate(width) > nearer


def test_a_click_on_a_head_sorts_numbers_as_numbers(browser, engine, folder):
    opened(browser, folder / "build.html")
    column = """(() => {
      const table = Array.from(document.querySelectorAll("table"))
        .find(one => one.caption.textContent.includes("layers in running order"));
      const head = Array.from(table.tHead.rows[0].cells)
        .find(cell => cell.textContent.startsWith("predicted"));
      head.querySelector("button").click();
      return JSON.stringify([head.getAttribute("aria-sort"),
        Array.from(table.tBodies[0].rows, row => Number(row.cells[head.cellIndex].dataset.v))]);
    })()"""
    order, rising = json.loads(browser.evaluate(column))
    assert order == "ascending"
    assert rising == sorted(rising)
    order, falling = json.loads(browser.evaluate(column))
    assert order == "descending"
    assert falling == rising[::-1]


def test_json_stays_alone_on_standard_output(model, folder):
    output = run("inspect", model, "--html", folder / "json.html", "--json")
    assert json.loads(output)["macs"] > 0


def test_arrays_have_no_page(folder):
    np.savez(folder / "x.npz", x=np.zeros(3, np.float32))
    arguments = ["inspect", str(folder / "x.npz"), "--html", str(folder / "x.html")]
    done = CliRunner().invoke(tandem, arguments)
    assert done.exit_code == 2
    assert "holds arrays" in done.output
