"""The audit log: who did what, the newest first, and whether its chain holds."""

import msgspec

from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.server.times import utc
from toolkit.fleet.store import log
from toolkit.fleet.store.database import Database
from toolkit.fleet.web.frame import View, link
from toolkit.fleet.web.visit import Visit
from toolkit.html.markup import Html, join, paragraph, table

PAGE_ROWS = 100
MAX_BODY = 300  # characters of a row that are shown
SHA256_CHARS = 64
COLUMNS = ("Row", "At", "Who", "Rollout", "What")


def draw_audit(database: Database, _fleet: Fleet, visit: Visit) -> View:
    """Return a page of the log. The chain is verified where `verify=yes` asks for it, not with each
    change: it reads the whole log."""
    before = visit.number("before")
    rows = log.page_before(database, before or None, PAGE_ROWS)
    parts = [
        table("Audit log, the newest first", COLUMNS, [
            (str(row.seq), utc(row.at_s), row.who,
                link(str(row.rollout), f"/rollouts/{row.rollout}") if row.rollout else "",
                _what(row))
            for row in rows
        ], sortable=False)
    ]  # fmt: skip
    if len(rows) == PAGE_ROWS and rows[-1].seq > 1:
        parts.append(Html(f"<p>{link('Older', '/audit', {'before': str(rows[-1].seq)})}</p>"))
    chain = _chain(database, verify=visit.text("verify") == "yes")
    return View("Audit log", join(parts), above=chain)


def _what(row: log.LogRow) -> str:
    """Return what a row says, in words."""
    try:
        body = msgspec.json.decode(row.body, type=dict[str, object])
    except msgspec.DecodeError:  # of a long one the beginning is here
        return f"{row.kind}: {row.body[:MAX_BODY]}..."
    kind = body.pop("event", row.kind)
    body.pop("at_s", None)  # a column has it
    text = ", ".join(f"{name} {_word(value)}" for name, value in body.items() if _is_said(value))
    return f"{kind}: {text}"[:MAX_BODY] if text else f"{kind}"


def _is_said(value: object) -> bool:
    return value is not None and value not in ("", {}, [])


def _word(value: object) -> str:
    """Return a value of a row as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return " ".join(f"{key}={_word(one)}" for key, one in value.items() if _is_said(one))
    if isinstance(value, list):
        return " ".join(map(_word, value))
    text = str(value)
    return f"{text[:12]}..." if len(text) == SHA256_CHARS else text


def _chain(database: Database, *, verify: bool) -> Html:
    if not verify:
        return Html('<p><a class=button href="/audit?verify=yes">Verify the chain</a></p>')
    verified = log.verify(database)
    return paragraph(
        f"The chain is verified to row {verified.rows:,}; its hash is {verified.head}",
        "notice good",
    )
