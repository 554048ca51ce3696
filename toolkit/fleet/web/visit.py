"""What a page is asked for, and the words that all pages share."""

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.fleet.store.accounts import Account
from toolkit.fleet.web.access import RefusedError
from toolkit.html.markup import Html, markup


@dataclass(frozen=True, slots=True)
class Visit:
    """The parameters of the path, those of the query, and who asks."""

    params: Mapping[str, str]
    query: Mapping[str, str]
    account: Account

    def text(self, name: str) -> str:
        """Return a text of the query, empty if it is not there."""
        return self.query.get(name, "").strip()

    def number(self, name: str, *, least: int = 0) -> int:
        """Return a number of the path or the query, `least` without it. Raises RefusedError."""
        text = self.params.get(name) or self.text(name)
        if not text:
            return least
        if not (text.isascii() and text.isdigit()) or len(text) > 15 or int(text) < least:
            raise RefusedError(404 if name in self.params else 400, f"{name}={text!r} is no number")
        return int(text)


def badge(text: str, kind: str = "") -> Html:
    """Return a word with a colour and a shape; `kind`: good, bad, waits or old."""
    return Html(f'<span class="badge {kind}">{markup(text)}</span>')
