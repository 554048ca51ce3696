"""Who asks: by the session's cookie, by a token, or by a proxy that is trusted to say so; and how
often somebody may try to sign in."""

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from device.errors import TandemError
from toolkit.fleet.store.accounts import (
    Account,
    Role,
    Session,
    load_account,
    load_session,
    load_token,
)
from toolkit.fleet.store.database import Database

COOKIE = "tandem_session"
MAX_ATTEMPTS, ATTEMPTS_S = 5, 300.0  # failures of one name or address, and when they are forgotten
MAX_KEYS = 10_000  # names and addresses that are remembered


@dataclass(frozen=True, slots=True)
class TrustedProxy:
    """A proxy in front of the site, which has signed people in: the header that it sets, and the
    addresses that it comes from. A request from elsewhere cannot use the header."""

    header: str
    addresses: frozenset[str]
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)  # of forms


class RefusedError(TandemError):
    """A request that is not done: the status of HTTP, and why."""

    def __init__(self, status: int, reason: str, retry_after_s: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after_s = retry_after_s


def find_session(
    database: Database, request: Request, proxy: TrustedProxy | None
) -> Session | None:
    """Return the session of a person, None if nobody has signed in."""
    if proxy is not None and request.client and request.client.host in proxy.addresses:
        account = load_account(database, request.headers.get(proxy.header, ""))
        return None if account is None else Session(account, f"{proxy.secret} {account.name}")
    secret = request.cookies.get(COOKIE, "")
    return load_session(database, secret) if secret else None


def find_token(database: Database, request: Request) -> Account:
    """Return the program that a request's token is of. Raises RefusedError."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    account = load_token(database, token) if scheme.lower() == "bearer" and token else None
    if account is None:
        raise RefusedError(
            401, "send `Authorization: Bearer TOKEN`; `tandem fleet account token NAME` makes one"
        )
    return account


def check_role(account: Account, role: Role) -> None:
    """Raises RefusedError: the account may not do what a role may."""
    if not account.may(role):
        raise RefusedError(403, f"{account.name} is {account.role}, this needs {role}")


def check_origin(request: Request) -> None:
    """Raises RefusedError: a form was sent from a page of another site."""
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "same-origin")
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    if site not in ("same-origin", "none") or origin not in (None, own):
        raise RefusedError(403, f"the form comes from {origin or site}, not from this site")


@dataclass(slots=True)
class SignInLimit:
    """Counts failures to sign in, by name and by address. `now_s`: a clock that never goes back."""

    now_s: Callable[[], float] = time.monotonic
    _failures: dict[str, list[float]] = field(default_factory=dict)

    def check(self, name: str, address: str) -> None:
        """Raises RefusedError: there were too many failures."""
        now_s = self.now_s()
        for key in (f"name {name}", f"address {address}"):
            times = [at_s for at_s in self._failures.get(key, ()) if now_s - at_s < ATTEMPTS_S]
            if len(times) >= MAX_ATTEMPTS:
                wait_s = math.ceil(ATTEMPTS_S - (now_s - times[0]))
                raise RefusedError(
                    429, f"{MAX_ATTEMPTS} attempts have failed: try again in {wait_s} s", wait_s
                )

    def note_failure(self, name: str, address: str) -> None:
        """Count a failure."""
        now_s = self.now_s()
        for key in (f"name {name}", f"address {address}"):
            times = [at_s for at_s in self._failures.pop(key, ()) if now_s - at_s < ATTEMPTS_S]
            self._failures[key] = [*times, now_s]
        while len(self._failures) > MAX_KEYS:
            del self._failures[next(iter(self._failures))]
