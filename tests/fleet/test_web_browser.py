"""The fleet's page in a real browser, over a real broker, server and agents: a rollout that is
planned, started, paused, approved and taken back by mouse and by keyboard alone."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from browser_fixtures import Browser, open_browser
from fleet_process_fixtures import Fleet
from foreign_models import axe_script
from mqtt_fixtures import make_bundle
from web_fixtures import PASSWORD, WebProcess, add_people

from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.store import log
from toolkit.fleet.trust.publish import admit

WAIT_S = 90.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), 3)
    fleet.start()
    fleet.run("device", "label", "board-1", "group=canary")
    for version in ("1", "2", "3"):
        admit(fleet.fleet, make_bundle(fleet.folder / "in", version=version))
    add_people(fleet.fleet)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def web(fleet: Fleet) -> Iterator[WebProcess]:
    web = WebProcess(fleet.fleet)
    yield web
    web.close()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.renew()
    chromium.resize(1280, 900)
    yield chromium
    assert chromium.errors == []


def wait_for(browser: Browser, expression: str) -> None:
    """Wait until an expression is true on the page, which changes by itself."""
    until_s = time.monotonic() + WAIT_S
    while not browser.evaluate(f"document.readyState == 'complete' && !!({expression})"):
        assert time.monotonic() < until_s, browser.evaluate("document.body.innerText")
        time.sleep(0.1)


def text_is_there(text: str) -> str:
    return f"document.body.innerText.includes({json.dumps(text)})"


def sign_in(browser: Browser, web: WebProcess, name: str) -> None:
    browser.open(f"{web.url}/")
    browser.click("#name")
    browser.type(name)
    browser.click("#password")
    browser.type(PASSWORD)
    browser.click("form button")
    wait_for(browser, text_is_there("Sign out"))


def test_a_rollout_is_driven_by_the_mouse(fleet: Fleet, web: WebProcess, browser: Browser) -> None:
    sign_in(browser, web, "otto")
    browser.click('a[href="/rollouts"]')
    wait_for(browser, text_is_there("New rollout"))
    browser.click('a[href="/rollouts/new"]')
    wait_for(browser, "document.querySelector('#bundle')")
    set_fields(browser, bundle="good 1", groups="canary,rest")
    browser.click('input[name="approval"]')
    browser.click("form.card button")
    wait_for(browser, text_is_there("Start on 3 devices"))
    browser.click('form[action="/rollouts"] button')
    wait_for(browser, text_is_there("waiting for approval"))  # the canary is live; nobody reloads
    assert text_of(browser, ".groups").count("1 live") == 1
    assert not browser.evaluate("!!document.querySelector('button[value^=approve]')")
    sign_out(browser)

    sign_in(browser, web, "anna")
    wait_for(browser, "document.querySelector('button[value=\"approve:1\"]')")
    browser.click('button[value="approve:1"]')
    wait_for(browser, text_is_there("The rollout is approved."))
    browser.open(f"{web.url}/rollouts/1")
    wait_for(browser, text_is_there("2 live"))
    browser.click('button[value="approve:1"]') if browser.evaluate(
        "!!document.querySelector('button[value=\"approve:1\"]')"
    ) else None
    wait_for(browser, text_is_there("finished"))
    browser.open(f"{web.url}/rollouts/1")
    browser.click('a[href="/rollouts/1/rollback"]')
    wait_for(browser, text_is_there("Go back to what they ran before"))
    browser.click("button.dangerous")
    wait_for(browser, text_is_there("rolled back"))
    assert fleet.json("rollout", "status", "1")["status"] == "rolled_back"


def set_fields(browser: Browser, bundle: str, **texts: str) -> None:
    """Choose a bundle by its text, and write fields."""
    browser.evaluate(
        "(() => {const s = document.querySelector('#bundle');"
        f"s.value = [...s.options].find(o => o.text.startsWith({json.dumps(bundle)})).value}})()"
    )
    for name, text in texts.items():
        browser.click(f"#{name}")
        browser.evaluate(f"document.querySelector('#{name}').select()")
        browser.type(text)


def sign_out(browser: Browser) -> None:
    browser.click('form[action="/sign-out"] button')
    wait_for(browser, "document.querySelector('#password')")


def text_of(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector('{selector}').innerText"))


def test_a_rollout_is_driven_by_the_keyboard_alone(
    fleet: Fleet, web: WebProcess, browser: Browser
) -> None:
    browser.open(f"{web.url}/rollouts/new")
    wait_for(browser, "document.querySelector('#name')")
    browser.type("olga")  # the name has the focus
    browser.press("Tab")
    browser.type(PASSWORD)
    browser.press("Enter")
    wait_for(browser, "document.querySelector('#bundle')")
    tab_to(browser, "e => e.id == 'bundle'")
    browser.type("good 2")
    tab_to(browser, "e => e.innerText == 'Plan'")
    browser.press("Enter")
    wait_for(browser, text_is_there("Start on 3 devices"))
    tab_to(browser, "e => e.innerText == 'Start on 3 devices'")
    browser.press("Enter")
    wait_for(browser, "location.pathname.match('^/rollouts/[0-9]+$')")
    number = int(browser.evaluate("location.pathname.split('/')[2]"))
    wait_for(browser, text_is_there("finished"))
    tab_to(browser, "e => e.innerText == 'Roll back...'")
    browser.press("Enter")
    wait_for(browser, "document.querySelector('button.dangerous')")
    tab_to(browser, f"e => e.innerText == 'Roll back rollout {number}'")
    browser.press(" ")
    wait_for(browser, text_is_there("rolled back"))
    rows = fleet.json("rollout", "status", str(number))
    assert rows["status"] == "rolled_back"


def tab_to(browser: Browser, is_it: str) -> None:
    """Press Tab until the focus is where a function says; each stop shows that it has the focus."""
    for _ in range(60):
        browser.press("Tab")
        if browser.evaluate(f"({is_it})(document.activeElement)"):
            shown = "getComputedStyle(document.activeElement)"
            assert browser.evaluate(f"{shown}.outlineStyle") != "none"
            return
    raise AssertionError(f"no Tab leads to {is_it}")


@pytest.mark.slow  # test_fleet.py kills one, too
def test_a_server_that_is_killed_in_the_middle_of_a_rollout_loses_nothing(
    fleet: Fleet, web: WebProcess, browser: Browser
) -> None:
    sign_in(browser, web, "otto")
    browser.open(f"{web.url}/rollouts/new")
    set_fields(browser, bundle="good 3", groups="canary,rest", soak="5s")
    browser.click("form.card button")
    wait_for(browser, text_is_there("Start on 3 devices"))
    browser.click('form[action="/rollouts"] button')
    wait_for(browser, "location.pathname.match('^/rollouts/[0-9]+$')")
    wait_for(browser, f"{text_is_there('1 sent')} || {text_is_there('1 live')}")
    number = int(browser.evaluate("location.pathname.split('/')[2]"))
    fleet.server.kill()
    wait_for(browser, text_is_there("No server runs"))  # nobody reloads
    for order, page_text in (("pause", "told to pause"), ("resume", "told to go on")):
        browser.click(f'button[value="{order}:{number}"]')  # orders wait in the store
        wait_for(browser, text_is_there(page_text))
    fleet.server.start()
    wait_for(browser, f"!({text_is_there('No server runs')})")
    wait_for(browser, text_is_there("1 live"))
    fleet.server.kill()
    fleet.server.start()  # and once more, between the groups
    wait_for(browser, text_is_there("finished"))
    assert text_of(browser, ".groups").count("live") == 2
    assert "The audit log holds" in fleet.run("audit", "verify")
    kinds = Counter(event_kind(row) for row in audit_rows(fleet) if row.rollout == number)
    assert kinds["started"] == 1
    assert kinds["answered"] == 3
    assert kinds["ordered"] == 2


def audit_rows(fleet: Fleet) -> list[log.LogRow]:
    with contextlib.closing(load_fleet(fleet.fleet).open_store()) as database:
        return list(log.rows_after(database, 0))


def event_kind(row: log.LogRow) -> str:
    return str(json.loads(row.body)["event"]) if row.kind == log.EVENT else row.kind


def test_a_page_says_that_it_is_old_while_its_connection_is_lost(
    fleet: Fleet, browser: Browser
) -> None:
    web = WebProcess(fleet.fleet)
    sign_in(browser, web, "vera")
    shown = "getComputedStyle(document.querySelector('#lost')).display != 'none'"
    time.sleep(3.0)
    assert not browser.evaluate(shown)
    web.process.kill()
    web.process.wait()
    wait_for(browser, shown)
    again = WebProcess(fleet.fleet, port=web.port)
    wait_for(browser, f"!({shown})")
    again.close()
    browser.errors.clear()  # connections that were refused


def test_a_device_is_asked_for_the_last_lines_of_its_log(
    fleet: Fleet, web: WebProcess, browser: Browser
) -> None:
    sign_in(browser, web, "otto")
    browser.open(f"{web.url}/devices/board-0")
    browser.click('button[name="op"][value="log"]')
    wait_for(browser, "document.querySelector('.log')")
    assert "connected" in text_of(browser, ".log")
    assert "otto (web) gave the command log" in fleet.run("logs", "board-0")


def test_a_change_is_shown_without_loss_of_focus_or_of_what_is_typed(
    fleet: Fleet, web: WebProcess, browser: Browser
) -> None:
    sign_in(browser, web, "otto")
    browser.open(f"{web.url}/devices")
    browser.click("#q")
    browser.type("board")
    fleet.run("device", "label", "board-2", "site=harbour")
    wait_for(browser, text_is_there("site=harbour"))
    assert browser.evaluate("[document.activeElement.id, document.activeElement.value]") == [
        "q", "board"
    ]  # fmt: skip


PAGES = (
    "/sign-in",
    "/",
    "/devices",
    "/devices/board-0",
    "/devices/board-0/decommission",
    "/rollouts",
    "/rollouts/new",
    "/audit",
)


@pytest.mark.parametrize(
    ("width", "scheme"), [pytest.param(1280, "light", marks=pytest.mark.slow), (360, "dark")]
)
def test_pages_can_be_used_by_everyone_and_fit(
    fleet: Fleet, web: WebProcess, browser: Browser, width: int, scheme: str
) -> None:
    browser.resize(width, 800)
    browser.prefer(scheme)
    sign_in(browser, web, "otto")
    axe = axe_script().read_text()
    for page in PAGES:
        browser.open(f"{web.url}{page}")
        browser.evaluate(f"(() => {{{axe}\n}})()")
        actual = browser.evaluate(
            "axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))"
        )
        assert actual == [], (page, scheme, actual)
        wide = browser.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, (page, wide)
    assert all(address.startswith(web.url) for address in browser.requested)


def test_no_page_moves_when_a_change_arrives(
    fleet: Fleet, web: WebProcess, browser: Browser
) -> None:
    """Cumulative layout shift, as browsers measure it, while a device changes."""
    sign_in(browser, web, "otto")
    browser.open(f"{web.url}/devices")
    browser.evaluate(
        "window.shift = 0; new PerformanceObserver(l => {for (const e of l.getEntries())"
        " if (!e.hadRecentInput) window.shift += e.value})"
        ".observe({type: 'layout-shift', buffered: true})"
    )
    for number in range(3):
        fleet.run("device", "label", "board-0", f"n={number}")
        wait_for(browser, text_is_there(f"n={number}"))
    assert browser.evaluate("window.shift") < 0.01
