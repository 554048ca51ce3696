"""The frame around each page: navigation, who is signed in, where live changes come from."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from urllib.parse import quote, urlencode

from toolkit.fleet.store.accounts import Session
from toolkit.html.markup import Html, join, markup, paragraph

# Path -> what the navigation calls it.
NAVIGATION: Mapping[str, str] = {
    "/": "Overview",
    "/devices": "Devices",
    "/rollouts": "Rollouts",
    "/audit": "Audit log",
}
# What was done -> what the next page says of it.
NOTICES: Mapping[str, str] = {
    "pause": "The rollout is told to pause.",
    "resume": "The rollout is told to go on.",
    "approve": "The rollout is approved.",
    "abort": "The rollout is told to end.",
    "rollback": "The rollout is told to roll back.",
    "start": "The rollout has begun.",
    "label": "The labels have changed.",
    "decommission": "The device has left the fleet.",
    "enrol": "A board may enrol under this id, once.",
}
_STEERING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_CSRF_SLOT = "<!--csrf-->"  # no escaped text contains it
ORDERS_FORM = "orders"  # the form that buttons of the live part belong to; it has the CSRF token

# Nothing is written into pages that their policy forbids; a lost connection is tried again soon.
HTMX_CONFIG = '{"includeIndicatorCSS":false,"sse":{"reconnectMaxDelay":5000}}'

NOTHING = Html("")
LOST = Html(
    '<p id=lost role=status class="notice bad" hidden>The connection is lost, and what is shown '
    "here is old. The page tries again by itself.</p>"
)


@dataclass(frozen=True, slots=True)
class View:
    """What a page shows. `live`: the part that is sent anew when something changes; the same for
    all who have the role. `above` and `below`: forms, which stay as they are while somebody fills
    them in."""

    title: str
    live: Html
    above: Html = NOTHING
    below: Html = NOTHING


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds a view: the fleet's name, the address of the page, the state of the store
    that it shows, who reads it, and a row of NOTICES that is told to them once."""

    fleet: str
    path: str
    mark: str
    session: Session
    notice: str = ""


def draw_page(view: View, frame: Frame) -> str:
    """Return a whole page. Without script it is read as it is, and reloads each 30 s."""
    text = NOTICES.get(frame.notice, "")
    notice = Html(f'<p role=status class="notice good">{markup(text)}</p>' if text else "")
    address = f"/live?{urlencode({'page': frame.path, 'mark': frame.mark})}"
    connect = f' hx-sse:connect="{escape(address)}" hx-swap="innerMorph"' if view.live else ""
    body = join(
        [
            _header(frame),
            Html("<main id=main tabindex=-1>"),
            Html(f"<h1>{markup(view.title)}</h1>"),
            notice,
            _with_csrf(view.above, frame.session),
            Html(
                f'<form id={ORDERS_FORM} method=post action="/orders" hidden>'
                f"{csrf_field(frame.session)}{hidden('back', frame.path)}</form>"
            ),
            LOST if view.live else NOTHING,
            Html(f"<div id=live{connect}>{view.live}</div>"),
            _with_csrf(view.below, frame.session),
            Html("</main>"),
        ]
    )
    reload = f'<noscript><meta http-equiv=refresh content="30;url={escape(frame.path)}"></noscript>'
    return _document(f"{view.title} - {frame.fleet}", body, reload)


def draw_sign_in(fleet: str, path: str, problem: str = "") -> str:
    """Return the page on which people sign in; `path`: where they go then."""
    alert = paragraph(problem, "notice bad") if problem else Html("")
    body = Html(
        f"<main id=main class=narrow><h1>{markup(fleet)}</h1>{alert}"
        '<form method=post action="/sign-in" class=card>'
        f"{hidden('back', path)}"
        "<label for=name>Name</label>"
        "<input id=name name=name autocomplete=username required autofocus maxlength=64>"
        "<label for=password>Password</label>"
        "<input id=password name=password type=password autocomplete=current-password required"
        " maxlength=200><button class=primary>Sign in</button></form>"
        "<p class=muted>Accounts are made by <code>tandem fleet account add NAME</code>.</p></main>"
    )
    return _document(f"Sign in - {fleet}", body)


def draw_refusal(fleet: str, title: str, reason: str, back: str) -> str:
    """Return a page that says why something was not done; `back`: the page before."""
    body = Html(
        f"<main id=main class=narrow><h1>{markup(title)}</h1>"
        f"<p role=alert>{markup(reason)}</p>"
        f"<p>{link('Back', back) if back != '/' else ''} {link('Overview', '/')}</p></main>"
    )
    return _document(f"{title} - {fleet}", body)


def csrf_slot() -> Html:
    """Return the place of the CSRF field in a form of a view, which is drawn for all sessions."""
    return Html(_CSRF_SLOT)


def _with_csrf(forms: Html, session: Session) -> Html:
    return Html(forms.replace(_CSRF_SLOT, csrf_field(session)))


def with_notice(path: str, done: str) -> str:
    """Return a path whose page says what was done (a row of NOTICES)."""
    return f"{path}{'&' if '?' in path else '?'}done={done}"


def own_path(path: str) -> str:
    """Return a path of this site; the address of another site becomes that of the overview."""
    # Browsers leave tabs and line ends out, and take a backslash for a slash.
    plain = "".join(c for c in path if c.isprintable()).replace("\\", "/")
    return path if plain.startswith("/") and not plain.startswith("//") else "/"


def csrf_field(session: Session) -> Html:
    """Return the hidden field by which a form shows that this site made it. It differs from page to
    page, so that a compressed page does not give it away."""
    nonce = secrets.token_urlsafe(12)
    return hidden("csrf", f"{nonce}.{_csrf_of(session, nonce)}")


def is_csrf(session: Session, field: str) -> bool:
    """Whether a form's field is one of this session."""
    nonce, _, code = field.partition(".")
    return hmac.compare_digest(code.encode(), _csrf_of(session, nonce).encode())


def _csrf_of(session: Session, nonce: str) -> str:
    return hmac.new(session.csrf.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def hidden(name: str, value: str) -> Html:
    """Return a hidden field of a form."""
    return Html(f'<input type=hidden name="{escape(name)}" value="{escape(value)}">')


def link(text: str, path: str, query: Mapping[str, str] | None = None) -> Html:
    """Return a link within the site; parts of `path` are escaped by the caller (`part`)."""
    values = {key: value for key, value in (query or {}).items() if value}
    address = f"{path}?{urlencode(values)}" if values else path
    return Html(f'<a href="{escape(address)}">{markup(text)}</a>')


def part(text: str) -> str:
    """Return text as one part of a path."""
    return quote(text, safe="")


def order_button(text: str, order: str, number: int) -> Html:
    """Return the button that gives an order to a rollout."""
    return Html(
        f'<button form={ORDERS_FORM} name=order value="{escape(order)}:{number}"'
        f' aria-label="{escape(text)} rollout {number}">{markup(text)}</button>'
    )


def field(label: str, name: str, value: str = "", *, hint: str = "") -> Html:
    """Return a field of a form with its label, and a line that says what may stand in it."""
    about = f" aria-describedby={name}-hint" if hint else ""
    line = f"<small id={name}-hint>{markup(hint)}</small>" if hint else ""
    return Html(
        f'<p class=field><label for="{name}">{markup(label)}</label><input id="{name}"'
        f' name="{name}" type=text value="{escape(value)}"{about} maxlength=500>{line}</p>'
    )


def choice(label: str, name: str, options: Iterable[tuple[str, str]], chosen: str = "") -> Html:
    """Return a field with a choice of (value, text)."""
    rows = "".join(
        f'<option value="{escape(value)}"{" selected" if value == chosen else ""}>'
        f"{markup(text)}</option>"
        for value, text in options
    )
    return Html(
        f'<p class=field><label for="{name}">{markup(label)}</label>'
        f'<select id="{name}" name="{name}">{rows}</select></p>'
    )


def tick(label: str, name: str, *, ticked: bool = False) -> Html:
    """Return a box to tick."""
    mark = " checked" if ticked else ""
    return Html(
        f'<p class=field><label><input type=checkbox name="{name}" value=yes{mark}> '
        f"{markup(label)}</label></p>"
    )


def _header(frame: Frame) -> Html:
    here = frame.path.partition("?")[0]
    links = "".join(
        f'<li><a href="{path}"{" aria-current=page" if _is_below(here, path) else ""}>'
        f"{markup(text)}</a></li>"
        for path, text in NAVIGATION.items()
    )
    account = frame.session.account
    return Html(
        '<a class=skip href="#main">Skip to content</a>'
        f"<header><nav aria-label=Main><strong>{markup(frame.fleet)}</strong><ul>{links}</ul></nav>"
        f'<form method=post action="/sign-out">{csrf_field(frame.session)}'
        f"<span>{markup(account.name)} <span class=muted>({account.role})</span></span>"
        "<button>Sign out</button></form></header>"
    )


def _is_below(here: str, path: str) -> bool:
    return here == path or (path != "/" and here.startswith(f"{path}/"))


def seen(text: str) -> str:
    """Return a page without what nobody sees: characters that steer a terminal, or that turn the
    direction of the text around them, in what devices say."""
    return _STEERING.sub("\ufffd", text)


def _document(title: str, body: Html, head: str = "") -> str:
    return seen(
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<meta name=htmx-config content='{HTMX_CONFIG}'>"
        f"<title>{markup(title)}</title><link rel=stylesheet href=/static/style.css>{head}"
        "<link rel=icon href=/static/icon.svg>"
        "<script src=/static/page.js defer></script>"
        f"</head><body>{body}</body></html>\n"
    )
