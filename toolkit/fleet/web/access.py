"""Who asks: by the session's cookie, by a token, or by a proxy that is trusted to say so; and how
often somebody may try to sign in."""

import ipaddress
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from device.errors import TandemError
from toolkit.fleet.store.accounts import (
    MAX_NAME,
    Account,
    Role,
    Session,
    load_account,
    load_session,
    load_token,
)
from toolkit.fleet.store.database import Database

COOKIE = "tandem_session"
MAX_ATTEMPTS, ATTEMPTS_S = 5, 300.0  # of one name or address, and when they are forgotten
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
        names = request.headers.getlist(proxy.header)
        # Two are one of the proxy and one of its visitor, and nothing tells which.
        account = load_account(database, names[0]) if len(names) == 1 else None
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
    host = request.headers.get("host", "")
    origins = {f"https://{host}", f"{request.url.scheme}://{host}"}  # a proxy may end TLS
    if site not in ("same-origin", "none") or origin not in (None, *origins):
        raise RefusedError(403, f"the form comes from {origin or site}, not from this site")


@dataclass(slots=True)
class SignInLimit:
    """Counts attempts to sign in that have not succeeded, by name and by address; that of this
    machine is the address of all who come through a proxy, and is not counted. `now_s`: a clock
    that never goes back."""

    now_s: Callable[[], float] = time.monotonic
    _attempts: dict[str, list[float]] = field(default_factory=dict)

    def begin(self, name: str, address: str) -> None:
        """Count an attempt before it is judged, so that many at once are no more than one after
        another. Raises RefusedError: there were too many."""
        now_s, keys = self.now_s(), _keys(name, address)
        recent = {
            key: [at_s for at_s in self._attempts.get(key, ()) if now_s - at_s < ATTEMPTS_S]
            for key in keys
        }
        for times in recent.values():
            if len(times) >= MAX_ATTEMPTS:
                wait_s = math.ceil(ATTEMPTS_S - (now_s - times[0]))
                raise RefusedError(
                    429, f"{MAX_ATTEMPTS} attempts have failed: try again in {wait_s} s", wait_s
                )
        for key, times in recent.items():
            self._attempts.pop(key, None)
            self._attempts[key] = [*times, now_s]  # the youngest is last
        while len(self._attempts) > MAX_KEYS:
            del self._attempts[next(iter(self._attempts))]

    def succeed(self, name: str, address: str) -> None:
        """Take back the last attempt, which was none to guess."""
        for key in _keys(name, address):
            if times := self._attempts.get(key):
                times.pop()


def _keys(name: str, address: str) -> tuple[str, ...]:
    names = (f"name {name[:MAX_NAME]}",)
    return names if is_loopback(address) else (*names, f"address {address}")


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
