"""The fleet's page and API: who gets in, what each role may, what is escaped, what is live."""

import asyncio
import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args
from urllib.parse import urlencode

import pytest
from fleet_server_fixtures import device_row, report, write_fleet
from fleet_server_fixtures import release as release_of_letter
from jsonschema import Draft202012Validator
from mqtt_fixtures import make_bundle
from msgspec.structs import replace
from openapi_spec_validator import validate
from starlette.requests import Request
from web_fixtures import PASSWORD, Events, Visitor, WebProcess, add_people

from device.errors import BundleError
from device.protocol.documents import DeviceFacts, Reported, decode, encode
from toolkit.errors import FleetError, RolloutError
from toolkit.fleet.authority import Authority
from toolkit.fleet.client import Client
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.liveness import ListeningPeriod
from toolkit.fleet.server.history import history_of
from toolkit.fleet.server.operations import archive_log, make_plan, start_rollout
from toolkit.fleet.store import accounts, log, rollouts
from toolkit.fleet.store.changes import last_change
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.devices import save_devices, save_ear
from toolkit.fleet.trust import certificates
from toolkit.fleet.trust.publish import admit
from toolkit.fleet.web import forms, store_threads
from toolkit.fleet.web.access import RefusedError, SignInLimit, TrustedProxy, find_session
from toolkit.fleet.web.frame import own_path
from toolkit.fleet.web.live import Live, read_place, sse_message
from toolkit.fleet.web.pages import PAGES, release
from toolkit.fleet.web.pages.device import draw_device
from toolkit.fleet.web.pages.rollouts import PHASES, STATUS_KINDS
from toolkit.fleet.web.store_threads import StoreThreads
from toolkit.fleet.web.visit import Visit

LONG = "pause:" + "9" * 5000
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m'
PATHS = ("/", "/devices", "/devices/cam-1", "/rollouts", "/rollouts/1", "/rollouts/new", "/audit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet of three devices, one of which says what a hostile one would, and a rollout."""
    folder = write_fleet(tmp_path_factory.mktemp("web") / "fleet", 1)
    database = load_fleet(folder).open_store()
    now_s = database.now_s()
    rows = [
        device_row("cam-1", report("a", beat_s=30.0)),
        device_row("cam-2", report("b", beat_s=30.0)),
    ]
    labels = {f"key-{number}": HOSTILE for number in range(20)}
    bad = report(
        "c", "rolled_back", reason=HOSTILE, facts=DeviceFacts(module=HOSTILE, labels=labels)
    )
    rows.append(device_row("cam-3", bad))
    with database.write():
        save_devices(database, [replace(row, heard_s=now_s) for row in rows])
        save_ear(database, ListeningPeriod(now_s - 3600.0, now_s))
    begin_rollout(database, "otto (web)")
    database.close()
    return folder


def begin_rollout(database: Database, who: str) -> int:

    spec = v.RolloutSpec(key="k", release=release_of_letter("d"), groups=("rest",), approval=True)
    return start_rollout(database, spec, make_plan(database, spec), Path("app-d.bundle"), who)


@pytest.fixture(scope="module")
def token(folder: Path) -> str:
    return add_people(folder)


@pytest.fixture(scope="module")
def web(folder: Path, token: str) -> Iterator[WebProcess]:
    web = WebProcess(folder)
    yield web
    web.close()


@pytest.fixture
def database(folder: Path) -> Iterator[Database]:
    database = load_fleet(folder).open_store()
    yield database
    database.close()


def visitor(web: WebProcess, name: str) -> Visitor:
    """Somebody who has signed in, once for all tests: hashing passwords takes time by design."""
    if (web.url, name) not in SIGNED_IN:
        SIGNED_IN[web.url, name] = sign_in(web, name)
    return SIGNED_IN[web.url, name]


def sign_in(web: WebProcess, name: str) -> Visitor:
    person = Visitor(web)
    assert person.sign_in(name).status == 303
    return person


SIGNED_IN: dict[tuple[str, str], Visitor] = {}


# -- who gets in


@pytest.mark.parametrize("path", PATHS)
def test_a_page_asks_who_has_not_signed_in_to_do_so(web: WebProcess, path: str) -> None:
    answer = Visitor(web).get(path)
    assert (answer.status, answer.headers["location"]) == (
        303, f"/sign-in?back={path.replace('/', '%2F')}"
    )  # fmt: skip


@pytest.mark.parametrize(("name", "password"), [("otto", "wrong"), ("nobody", PASSWORD), ("", "")])
def test_a_wrong_name_or_password_gets_no_session(
    web: WebProcess, name: str, password: str
) -> None:
    person = Visitor(web)
    answer = person.sign_in(name, password)
    assert answer.status == 401
    assert "not right" in answer.text
    assert not person.cookies


def test_too_many_failures_have_to_wait() -> None:
    now_s = [0.0]
    limit = SignInLimit(lambda: now_s[0])
    for _ in range(7):
        limit.begin("otto", "10.0.0.1")
        limit.succeed("otto", "10.0.0.1")
    for _ in range(5):
        limit.begin("otto", "10.0.0.1")
    for name, address in (("otto", "10.0.0.2"), ("anna", "10.0.0.1")):
        with pytest.raises(RefusedError, match="5 attempts have failed: try again in 300 s"):
            limit.begin(name, address)
    limit.begin("anna", "10.0.0.2")
    now_s[0] = 300.0
    limit.begin("otto", "10.0.0.1")


def test_one_visitor_of_a_proxy_does_not_keep_the_others_out() -> None:
    limit = SignInLimit(lambda: 0.0)
    for number in range(9):
        limit.begin(f"nobody-{number}", "127.0.0.1")
    limit.begin("anna", "127.0.0.1")


def test_guesses_at_once_are_no_more_than_one_after_another(web: WebProcess) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: Visitor(web).sign_in("mallory"), range(12)))
    assert sorted(answer.status for answer in answers) == [401] * 5 + [429] * 7


def test_behind_a_proxy_that_ends_tls_forms_work_and_the_cookie_is_for_tls(
    web: WebProcess,
) -> None:
    person = Visitor(web, headers={"host": "fleet.example", "origin": "https://fleet.example"})
    answer = person.sign_in("vera")
    assert answer.status == 303
    assert "; Secure" in answer.headers["set-cookie"]


def test_a_visitor_cannot_add_a_name_to_that_of_the_proxy(database: Database) -> None:
    proxy = TrustedProxy("x-user", frozenset(["127.0.0.1"]))

    def session(*names: str) -> object:
        headers = [(b"x-user", name.encode()) for name in names]
        scope = {"type": "http", "client": ("127.0.0.1", 1), "headers": headers}
        return find_session(database, Request(scope), proxy)

    assert session("otto")
    assert session("anna", "otto") is None


def test_the_cookie_is_for_this_site_alone_and_the_session_ends_with_it(web: WebProcess) -> None:
    person = Visitor(web)
    answer = person.sign_in("vera", back="/devices?q=x")
    assert answer.headers["location"] == "/devices?q=x"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    stolen = Visitor(web, dict(person.cookies))
    assert stolen.get("/").status == 200
    assert person.send("/sign-out").status == 303
    assert stolen.get("/").status == 303


@pytest.mark.parametrize(
    "path",
    ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)",
     "/\t/evil.example", "\n//evil.example", "http://["],
)  # fmt: skip
def test_nobody_is_sent_to_another_site(path: str) -> None:
    assert own_path(path) == "/"


def test_a_hash_of_a_password_costs_what_owasp_asks_for(
    product_scrypt_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all other tests hashes are cheap."""
    assert product_scrypt_n * accounts._SCRYPT_P >= 3 << 15
    monkeypatch.setattr(accounts, "_SCRYPT_N", product_scrypt_n)
    assert accounts.check_password(PASSWORD, accounts.hash_password(PASSWORD))


def test_a_password_ends_the_sessions_of_its_person(folder: Path, web: WebProcess) -> None:
    database = load_fleet(folder).open_store()
    accounts.add_account(database, "ola", "viewer", PASSWORD)
    person = sign_in(web, "ola")
    accounts.add_account(database, "ola", "viewer", f"{PASSWORD}!")
    assert person.get("/").status == 303
    accounts.remove_account(database, "ola")
    with pytest.raises(RolloutError, match="nobody is called 'ola': the accounts are"):
        accounts.remove_account(database, "ola")
    database.close()


@pytest.mark.parametrize(
    ("name", "password", "reason"),
    [("x" * 65, PASSWORD, "cannot be the name"), (" a", PASSWORD, "cannot be the name"),
     ("\n", PASSWORD, "cannot be the name"), ("x", "short", "has 5 characters")],
)  # fmt: skip
def test_an_account_that_cannot_be_is_refused(
    database: Database, name: str, password: str, reason: str
) -> None:
    with pytest.raises(RolloutError, match=reason):
        accounts.add_account(database, name, "viewer", password)


def test_a_copy_of_the_store_opens_nothing(database: Database, web: WebProcess, token: str) -> None:
    person = visitor(web, "vera")
    dump = json.dumps([database.rows(f"SELECT * FROM {table}") for table in
        ("accounts", "sessions", "tokens")])  # fmt: skip
    assert PASSWORD not in dump
    assert token not in dump
    assert person.cookies["tandem_session"] not in dump


# -- what each may


@pytest.mark.parametrize(
    ("name", "order", "status"),
    [("vera", "pause", 403), ("otto", "pause", 303), ("otto", "resume", 409),
     ("otto", "approve", 403), ("otto", "nonsense", 409), ("otto", LONG, 409),
     ("olga", "abort", 303)],
)  # fmt: skip
def test_an_order_needs_its_role(
    web: WebProcess, database: Database, name: str, order: str, status: int
) -> None:
    number = begin_rollout(database, "cli")
    answer = visitor(web, name).send("/orders", order=f"{order}:{number}", back="/rollouts")
    assert answer.status == status, answer.text
    events = database.rows(
        "SELECT who, body FROM log WHERE rollout = ? ORDER BY seq DESC LIMIT 1", number
    )
    is_noted = events[0][0] == f"{name} (web)" and f'"{order}"' in events[0][1]
    assert is_noted == (status == 303)


def test_who_has_begun_a_rollout_does_not_approve_it(web: WebProcess, database: Database) -> None:
    number = begin_rollout(database, "anna (web)")
    answer = visitor(web, "anna").send("/orders", order=f"approve:{number}", back="/")
    assert answer.status == 409
    assert "somebody else approves its groups" in answer.text


def test_who_has_begun_a_rollout_does_not_approve_it_after_the_log_was_archived_either(
    web: WebProcess, database: Database, tmp_path: Path
) -> None:
    number = begin_rollout(database, "anna (web)")
    with database.write():  # as the server does
        rollouts.set_applied(database, log.head(database)[0])
    archive_log(database, tmp_path / "log.jsonl", keep_s=-1.0, who="ana")
    answer = visitor(web, "anna").send("/orders", order=f"approve:{number}", back="/")
    assert answer.status == 409
    assert "somebody else approves its groups" in answer.text


@pytest.mark.parametrize(
    ("headers", "field", "reason"),
    [({"origin": "https://evil.example"}, "", "not from this site"),
     ({"sec-fetch-site": "cross-site"}, "", "not from this site"),
     ({}, "", "of another session"), ({}, "x.y", "of another session")],
)  # fmt: skip
def test_a_form_of_another_site_does_nothing(
    web: WebProcess, headers: dict[str, str], field: str, reason: str
) -> None:
    person = visitor(web, "otto")
    answer = person.ask("POST", "/orders", f"order=pause:1&csrf={field}", **headers)
    assert answer.status == 403
    assert reason in answer.text


def test_the_field_of_one_session_is_not_that_of_another(web: WebProcess) -> None:
    first, second = visitor(web, "otto"), visitor(web, "olga")
    match = re.search(r'name="csrf" value="([^"]+)"', first.get("/").text)
    assert match
    assert second.ask("POST", "/orders", f"order=pause:1&csrf={match[1]}").status == 403


def test_a_form_that_is_too_large_is_refused(web: WebProcess) -> None:
    assert visitor(web, "otto").ask("POST", "/orders", "x=" + "a" * 300_000).status == 413


def test_a_proxy_is_believed_from_its_address_alone(folder: Path, token: str) -> None:
    for address, status in (("127.0.0.1", 200), ("192.0.2.1", 303)):
        web = WebProcess(folder, "--trust-header", "X-User", "--trust-from", address)
        try:
            person = Visitor(web, headers={"x-user": "otto"})
            assert person.get("/").status == status
            if status == 200:
                assert person.send("/orders", order="nonsense:1").status == 409
                assert Visitor(web, headers={"x-user": "mallory"}).get("/").status == 303
        finally:
            web.close()


# -- what is shown


class Markup(HTMLParser):
    """What a page is made of that could do something."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed"):
            self.scripts.append(dict(attrs).get("src") or "inline")
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]


@pytest.mark.parametrize("path", [*PATHS, "/devices/cam-3", "/devices?q=<b>&label=a%3D<i>"])
def test_what_a_device_says_is_text_on_every_page(web: WebProcess, path: str) -> None:
    answer = visitor(web, "otto").get(path)
    page = Markup()
    page.feed(answer.text)
    assert page.scripts == ["/static/page.js"] * (answer.status == 200)
    assert page.handlers == []
    assert "<img" not in answer.text
    assert not [c for c in answer.text if c in "\u202e\x1b"]
    assert "<b>" not in answer.text
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"


def test_a_report_with_ten_thousand_labels_is_not_taken(
    web: WebProcess, database: Database
) -> None:
    labels = {f"{number}{HOSTILE}": HOSTILE for number in range(10_000)}
    reported = report("a", facts=DeviceFacts(labels=labels))
    with pytest.raises(ValueError, match="length <= 64"):
        decode(encode(reported), Reported)
    with database.write():  # nor is it where a store has it
        save_devices(database, [device_row("wide-1", reported)])
    for path in ("/devices?q=wide-1", "/devices/wide-1"):
        page = visitor(web, "vera").get(path)
        assert page.status == 200
        assert len(page.text) < 20_000
    with database.write():
        database.run("DELETE FROM devices WHERE id = 'wide-1'")


@pytest.mark.parametrize(
    ("order", "reason"),
    [("rollback", "Go back to what they ran before"), ("abort", "Keep what they have")],
)
def test_what_takes_something_back_is_planned_first(
    web: WebProcess, database: Database, order: str, reason: str
) -> None:
    number = begin_rollout(database, "cli")
    person = visitor(web, "otto")
    assert f'href="/rollouts/{number}/{order}"' in person.get(f"/rollouts/{number}").text
    page = person.get(f"/rollouts/{number}/{order}").text
    assert reason in page
    assert "Do not get the release" in page
    assert f'value="{order}:{number}"' in page
    assert visitor(web, "vera").get(f"/rollouts/{number}/{order}").status == 403
    assert person.get(f"/rollouts/{number}/dance").status == 400
    assert person.send("/orders", order=f"{order}:{number}", back="/").status == 303
    if order == "abort":
        assert "takes no" in person.get(f"/rollouts/{number}/abort").text


@pytest.mark.parametrize(
    ("body", "text"),
    [('{"event":"answered","at_s":1.5,"device":"d1","live":false,"reason":""}',
      "answered: device d1, live no"),
     ('{"device":"d1","labels":{"a":"b","c":"d"}}', "test: device d1, labels a=b c=d"),
     ('{"event":"tick","at_s":1.5}', "tick"),
     (f'{{"sha256":"{"a" * 64}","n":["x","y"]}}', "test: sha256 aaaaaaaaaaaa..., n x y"),
     (f'{{"long":"{"b" * 500}"}}', "test: {")],
)  # fmt: skip
def test_the_audit_log_is_read_in_words(
    web: WebProcess, database: Database, body: str, text: str
) -> None:
    with database.write():
        log.append(database, [log.Note("ci", "test", body)], database.now_s())
    row = visitor(web, "vera").get("/audit").text.partition("<tbody>")[2].partition("</tr>")[0]
    assert f">{text}" in row


def test_a_rollout_that_cannot_be_planned_keeps_what_was_written(
    folder: Path, web: WebProcess
) -> None:
    (folder / "bundles").mkdir()
    admit(folder, make_bundle(folder / "in"))
    try:
        query = {"groups": "canary,nonsense!,rest", "soak": "30m", "bundle": "f" * 64}
        page = visitor(web, "otto").get(f"/rollouts/new?{urlencode(query)}")
        assert page.status == 200
        assert "the fleet has no bundle" in page.text
        assert 'value="canary,nonsense!,rest"' in page.text
    finally:
        shutil.rmtree(folder / "bundles")


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [("/devices?state=asleep", 400, "none of online"), ("/devices?sort=size", 400, "sorted by"),
     ("/devices?label=lab", 400, "KEY=VALUE"), ("/devices?after=x", 400, "no place in a list"),
     ("/devices/cam-9", 404, "no device"), ("/rollouts/99", 404, "no rollout 99"),
     ("/rollouts/x", 404, "no number"), ("/audit?before=-1", 400, "no number"),
     ("/sign-in?back=http://[", 200, "Sign in"), ("/live?page=http://[", 404, "no such page"),
     ("/nowhere", 404, "no such page"), ("/releases/abc", 404, "no rollout of this fleet")],
)  # fmt: skip
def test_what_is_not_there_is_said(web: WebProcess, path: str, status: int, reason: str) -> None:
    answer = visitor(web, "vera").get(path)
    assert (answer.status, reason in answer.text) == (status, True), answer.text


def test_the_list_is_searched_filtered_sorted_and_turned(web: WebProcess) -> None:
    person = visitor(web, "vera")

    def devices(query: str) -> list[str]:
        return re.findall(r'href="/devices/(cam-\d)"', person.get(f"/devices?{query}").text)

    assert devices("") == ["cam-1", "cam-2", "cam-3"]
    assert devices("sort=id&down=yes") == ["cam-3", "cam-2", "cam-1"]
    assert devices("problem=update") == ["cam-3"]
    assert devices("q=app-b") == ["cam-2"]
    assert devices("release=app-a") == ["cam-1"]
    assert devices("q=nothing") == []


@pytest.mark.parametrize(
    ("count", "labels", "status", "reason"),
    [("2", "wing=east", 303, ""), ("3", "wing=east", 409, "type 2"),
     ("2", "wing", 409, "is no label")],
)  # fmt: skip
def test_all_devices_of_a_filter_are_labelled_once_their_number_is_typed(
    web: WebProcess, database: Database, count: str, labels: str, status: int, reason: str
) -> None:
    person, query = visitor(web, "otto"), "release=app-e"
    change(database, "east-1", "e")
    change(database, "east-2", "e")
    plan = person.get(f"/bulk/labels?{query}&labels={labels}")
    assert "east-1, east-2" in plan.text
    answer = person.send("/bulk/labels", page=f"/bulk/labels?{query}&labels={labels}",
        release="app-e", labels=labels, planned="2", count=count)  # fmt: skip
    assert answer.status == status
    assert reason in answer.text
    listed = set(
        re.findall(r'href="/devices/(east-\d)"', person.get("/devices?label=wing%3Deast").text)
    )
    assert listed == ({"east-1", "east-2"} if status == 303 else listed)


@pytest.mark.parametrize(
    ("name", "typed", "status", "reason"),
    [("vera", "gone-1", 403, "operator"), ("otto", "gone-2", 409, "type gone-1"),
     ("otto", "gone-1", 303, "")],
)  # fmt: skip
def test_a_device_leaves_the_fleet_once_its_id_is_typed(
    web: WebProcess, database: Database, name: str, typed: str, status: int, reason: str
) -> None:
    change(database, "gone-1", "a")
    person, path = visitor(web, name), "/devices/gone-1/decommission"
    plan = visitor(web, "otto").get(path).text
    assert "app-a 1, and goes on with it" in plan
    assert "it comes back as soon as it reports again" in plan
    answer = person.send(path, typed=typed)
    assert answer.status == status
    assert reason in answer.text
    page = person.get("/devices/gone-1").text
    assert ("It has left the fleet" in page) == (status == 303)
    if status == 303:
        assert "decommissioned by otto (web)" in page
        assert visitor(web, "otto").get(path).status == 404
        assert visitor(web, "anna").send("/devices/gone-1/enrol").status == 409  # it has no keys


def test_a_board_may_enrol_under_the_id_of_one_that_left(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    make_fleet(folder, name="farm", broker="127.0.0.1:8883")
    fleet, anna = load_fleet(folder), accounts.Account("anna", "approver")
    with contextlib.closing(fleet.open_store()) as store:
        change(store, "cam-1")
        with pytest.raises(RolloutError, match="has not left the fleet"):
            forms.let_enrol(store, fleet, anna, {"device": "cam-1"})
        forms.leave(store, fleet, anna, {"device": "cam-1", "typed": "cam-1"})
        for account, shown in ((anna, True), (accounts.Account("otto", "operator"), False)):
            view = draw_device(store, fleet, Visit({"device": "cam-1"}, {}, account))
            assert ("Let a board enrol" in view.below) == shown
        forms.let_enrol(store, fleet, anna, {"device": "cam-1"})
        texts = [entry.text for entry in history_of(store, "cam-1")]
    assert texts[-1] == "may enrol anew, says anna (web)"
    rows = certificates.identities(Authority(folder / "identity"))
    assert {row.device: row.state for row in rows} == {"cam-1": "expected"}


def test_a_change_arrives_within_a_second_and_nothing_is_lost_with_a_connection(
    web: WebProcess, database: Database
) -> None:
    person = visitor(web, "vera")
    mark = re.search(r"mark=([^&\"]+)", person.get("/devices").text)
    assert mark
    stream = person.events(f"/live?page=/devices&mark={mark[1]}")
    change(database, "cam-new-1")
    begun_s = time.monotonic()
    message = stream.next()
    while "cam-new-1" not in message["data"]:
        message = stream.next()
    assert time.monotonic() - begun_s < 5.0  # under load, too; the bench measures it
    stream.close()
    change(database, "cam-new-2")
    again = person.events("/live?page=/devices", **{"last-event-id": message["id"]})
    assert "cam-new-2" in again.next()["data"]
    again.close()
    assert person.events("/live?page=/nowhere").status == 404


def test_a_stream_says_why_its_page_is_gone(web: WebProcess) -> None:
    stream = visitor(web, "vera").events("/live?page=/devices/cam-9")
    assert "no device &#x27;cam-9&#x27;" in stream.next()["data"]
    stream.close()


def test_the_chain_is_verified_once_and_not_with_each_change(web: WebProcess) -> None:
    person = visitor(web, "vera")
    page = person.get("/audit?verify=yes").text
    assert "The chain is verified to row" in page
    assert "verify%3Dyes" not in page
    stream = person.events("/live?page=%2Faudit%3Fverify%3Dyes")
    assert "verified" not in stream.next()["data"]
    stream.close()


@pytest.mark.parametrize("path", ["/rollouts/new", "/bulk/labels?labels=a%3Db"])
def test_a_plan_is_not_made_anew_with_each_change(web: WebProcess, path: str) -> None:
    person = visitor(web, "otto")
    answer = person.get(path)
    assert answer.status == 200
    assert "hx-sse:connect" not in answer.text
    assert person.get(f"/live?{urlencode({'page': path})}").status == 404


def test_one_account_follows_so_many_streams(web: WebProcess) -> None:
    person = visitor(web, "olga")
    streams = [person.events("/live?page=/devices") for _ in range(100)]
    for stream in streams:
        stream.next()
    assert person.get("/live?page=/devices").status == 429
    for stream in streams:
        stream.close()
    until_s = time.monotonic() + 30.0
    while (again := person.events("/live?page=/devices")).status == 429:
        assert time.monotonic() < until_s
        time.sleep(0.1)
    again.close()


def test_the_stream_of_a_token_ends_with_it(web: WebProcess, database: Database) -> None:
    log_length = len(web.log_file.read_text())
    token = accounts.add_token(database, "short", "viewer", lifetime_s=3600.0)
    stream = Visitor(web, headers={"authorization": f"Bearer {token}"}).events("/api/v1/events")
    accounts.remove_account(database, "short")
    change(database, "cam-new-3")
    with pytest.raises(AssertionError, match="the stream has ended"):
        read_to_end(stream)
    assert "Traceback" not in web.log_file.read_text()[log_length:]


def test_a_program_that_was_away_is_not_kept_waiting(
    web: WebProcess, token: str, database: Database
) -> None:
    head = log.head(database)[0]
    with database.write():
        log.append(database, [log.Note("ci", "test", "{}")] * 6000, database.now_s())
    events = Visitor(web, headers={"authorization": f"Bearer {token}"}).events(
        "/api/v1/events", **{"last-event-id": f"{head}-{last_change(database)}"}
    )
    begun_s = time.monotonic()
    for _ in range(6000):
        message = events.next()
    assert message["id"].startswith(f"{head + 6000}-")
    assert time.monotonic() - begun_s < 12.0  # each batch of 1000 waited up to 5 s
    events.close()


def read_to_end(stream: Events) -> None:
    while True:
        stream.next()


def test_events_go_on_after_the_store_was_away(folder: Path) -> None:
    async def follow() -> None:
        store = StoreThreads(load_fleet(folder))
        live = Live(store)
        await asyncio.gather(  # as a database does that is started anew
            *(store.run(Database.close) for _ in range(2 * store_threads.READERS))
        )
        polling = asyncio.create_task(live.poll())
        assert await asyncio.wait_for(live.await_change(), 10.0)
        polling.cancel()
        store.close()

    asyncio.run(follow())


def test_a_stream_ends_while_the_store_is_away_so_that_its_page_says_so(folder: Path) -> None:
    class Away(StoreThreads):
        async def run(self, *_: object) -> object:
            raise RolloutError("the store is away")

    async def follow() -> None:
        store = StoreThreads(load_fleet(folder))
        live = Live(store)
        mark = await live.mark()
        stream = live.follow(("/", "viewer"), lambda _store: "", mark)
        message = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.1)
        live._store = Away(load_fleet(folder))
        polling = asyncio.create_task(live.poll())
        assert await asyncio.wait_for(message, 5.0) == ": alive\n\n"
        assert live.is_stale
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        live._store = store
        while live.is_stale:
            await asyncio.sleep(0.05)
        polling.cancel()
        store.close()

    asyncio.run(follow())


@pytest.mark.parametrize("steps", range(6))
def test_following_the_store_ends_though_it_answers_at_that_moment(
    folder: Path, steps: int
) -> None:
    """`steps` of the event loop lie between the store's answer and the end of the site."""

    async def follow() -> None:
        store = StoreThreads(load_fleet(folder))
        polling = asyncio.create_task(Live(store).poll())
        await asyncio.sleep(0)
        time.sleep(0.1)  # the store answers, which the loop has not seen
        for _ in range(steps):
            await asyncio.sleep(0)
        polling.cancel()
        ended, _ = await asyncio.wait({polling}, timeout=5.0)
        assert ended
        store.close()

    asyncio.run(asyncio.wait_for(follow(), 10.0))


@pytest.mark.parametrize("end", ["\u2028", "\x85"])
def test_a_device_cannot_cut_a_message(end: str) -> None:
    body = json.dumps({"warning": f"a{end}b"}, ensure_ascii=False)
    assert sse_message(body, "1-2", "device") == f"id: 1-2\nevent: device\ndata: {body}\n\n"


def test_the_site_stops_at_once_though_somebody_looks_at_it(folder: Path, token: str) -> None:
    web = WebProcess(folder)
    stream = sign_in(web, "vera").events("/live?page=/devices")
    stream.next()
    begun_s = time.monotonic()
    web.close()
    assert time.monotonic() - begun_s < 4.0
    assert "Traceback" not in web.log_file.read_text()
    stream.close()


def change(database: Database, device: str, running: str = "") -> None:
    row = device_row(device, report(running))
    with database.write():
        save_devices(database, [replace(row, heard_s=database.now_s())])


# -- the API


def test_the_document_is_valid_and_every_answer_is_as_it_says(web: WebProcess, token: str) -> None:
    program = Visitor(web, headers={"authorization": f"Bearer {token}"})
    document = json.loads(Visitor(web).get("/api/v1/openapi.json").text)
    validate(document)
    count = 0
    for path, methods in document["paths"].items():
        if "get" not in methods or path.endswith("/events"):
            continue
        answer = program.get(path.replace("{device}", "cam-1").replace("{number}", "1"))
        assert answer.status == 200, answer.text
        schema = methods["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        whole = {**schema, "components": document["components"]}
        Draft202012Validator(whole).validate(json.loads(answer.text))
        count += 1
    assert count >= 8


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [("GET", "/devices?limit=5000", None, 400, "limit"),
     ("GET", "/devices?colour=red", None, 400, "colour"),
     ("GET", "/fleet?x=1", None, 400, "takes no query"),
     ("GET", "/devices/cam-9", None, 404, "no device"),
     ("GET", "/rollouts/99", None, 404, "no rollout 99"),
     ("POST", "/rollouts/1/orders", '{"order": "dance"}', 400, "order"),
     ("POST", "/rollouts/1/orders", "{", 400, "cannot be read"),
     ("POST", "/rollouts/1/orders", '{"order": "approve"}', 403, "approver"),
     ("GET", f"/audit?before={10**30}", None, 400, "query"),
     ("POST", "/rollouts/plan", '{"bundle": "abc"}', 409, "no bundle"),
     ("PATCH", "/devices/cam-1/labels", '{"changes": {"a,b": "c"}}', 409, "no label"),
     ("PATCH", "/devices/cam-1/labels", '{"changes": {"a=b": "c"}}', 409, "no key of a label")],
)  # fmt: skip
def test_the_api_says_why_not(
    web: WebProcess, token: str, method: str, path: str, body: str | None, status: int, reason: str
) -> None:
    program = Visitor(web, headers={"authorization": f"Bearer {token}"})
    answer = program.ask(method, f"/api/v1{path}", body)
    problem = json.loads(answer.text)
    assert (answer.status, problem["status"]) == (status, status), answer.text
    assert reason in problem["reason"]


@pytest.mark.parametrize("place", ["x", "1", "\u00b2-1", f"1-{10**30}"])
def test_a_place_that_is_none_is_refused(database: Database, place: str) -> None:
    with pytest.raises(RefusedError, match="none of this fleet"):
        read_place(database, place)


@pytest.mark.parametrize("header", ["", "Bearer ", "Bearer wrong", "Basic b3R0bzp4"])
def test_the_api_needs_a_token_and_takes_no_cookie(web: WebProcess, header: str) -> None:
    person = visitor(web, "otto")
    answer = person.ask("GET", "/api/v1/fleet", authorization=header)
    assert answer.status == 401


def test_the_client_lists_labels_and_follows(
    web: WebProcess, token: str, database: Database
) -> None:
    with Client(web.url, token) as fleet:
        assert fleet.counts()["devices"] >= 3
        assert [row["id"] for row in fleet.devices(q="app-a")] == ["cam-1"]
        assert fleet.label("cam-2", {"site": "lab", "none": None}) == {"site": "lab"}
        assert fleet.device("cam-2")["labels"]["site"] == "lab"
        assert fleet.label("cam-2", {"site": None}) == {}
        assert fleet.rollout(1)["name"] == "app-d"
        assert fleet.rollouts()[-1]["number"] == 1
        assert fleet.bundles() == []
        events = fleet.events("0-0")
        kinds = {next(events)[1] for _ in range(4)}
        assert kinds <= {"log", "device"}
        with pytest.raises(FleetError, match="answers 404: the fleet has no device 'x'"):
            fleet.device("x")
        with pytest.raises(FleetError, match="answers 409: rollout 1"):
            fleet.order(1, "resume")
    with Client("http://127.0.0.1:9", token) as nobody, pytest.raises(FleetError, match="reached"):
        nobody.counts()


def test_the_extension_comes_with_htmx_in_one_file(web: WebProcess) -> None:
    """In two files the second was now and then too late, and the page never followed the store."""
    text = Visitor(web).get("/static/page.js").text
    assert text.index("var htmx=") < text.index("hx-sse:connect")


def test_each_page_has_a_row() -> None:
    assert {page.path for page in PAGES} >= {"/", "/devices", "/rollouts", "/audit"}


def test_each_status_and_each_phase_has_a_colour() -> None:
    assert set(STATUS_KINDS) == set(v.STATUSES)
    assert set(PHASES) == set(get_args(v.DevicePhase))


# -- bundles that are broken


def test_a_bundle_that_is_missing_or_broken_is_named_and_stops_nothing(
    folder: Path, web: WebProcess, token: str
) -> None:
    bundles = folder / "bundles"
    bundles.mkdir()
    try:
        (bundles / f"{'e' * 64}.bundle").symlink_to(folder / "gone")
        (bundles / f"{'f' * 64}.bundle").write_bytes(b"broken")
        page = visitor(web, "otto").get("/rollouts/new")
        assert page.status == 200
        assert f"{'e' * 64}.bundle: No such file" in page.text
        assert f"{'f' * 64}.bundle" in page.text
        program = Visitor(web, headers={"authorization": f"Bearer {token}"})
        assert program.get("/api/v1/bundles").text == "[]"
    finally:
        shutil.rmtree(bundles)


def test_a_broken_bundle_is_unpacked_once(
    folder: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "broken.bundle"
    path.write_bytes(b"broken")
    spec = release_of_letter("9")
    with database.write():
        rollouts.save_release(database, spec, path)
    reads: list[Path] = []

    def read(path: Path) -> None:
        reads.append(path)
        raise BundleError("it is broken")

    monkeypatch.setattr(release, "unpacked", read)
    visit = Visit({"sha256": spec.blob.sha256}, {}, accounts.Account("vera", "viewer"))
    for _ in range(3):
        view = release.draw_release(database, load_fleet(folder), visit)
        assert "not known here: it is broken" in view.live
    assert reads == [path]
    path.write_bytes(b"another one")
    release.draw_release(database, load_fleet(folder), visit)
    assert reads == [path, path]
