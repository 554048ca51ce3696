"""The browser of the tests runs scripts, and tells what a page requests and what fails."""

from pathlib import Path

from browser_fixtures import open_browser

PAGE = """<!doctype html><title>A page</title><p id=sum></p>
<script>document.getElementById("sum").textContent = 20 + 22</script>
<script>console.error("one", 2)</script>
<img src="missing.png">
<script>throw new Error("three")</script>
"""


def test_a_page_is_read_and_its_errors_are_told(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGE)
    with open_browser(tmp_path) as browser:
        browser.open(page)
        assert browser.evaluate("document.title") == "A page"
        assert browser.evaluate("document.getElementById('sum').textContent") == "42"
        assert browser.evaluate("new Promise(done => setTimeout(() => done([1]), 10))") == [1]
    assert browser.requested == [page.as_uri(), (tmp_path / "missing.png").as_uri()]
    assert "one 2" in browser.errors
    assert any("three" in error for error in browser.errors)
    assert any("ERR_FILE_NOT_FOUND" in error for error in browser.errors)
