"""Requests to one registry: TLS, tokens, and a sentence for each refusal.

A registry answers 401 with where to get a token, or asks for a password (RFC 7235). Credentials go
to the registry and to the token server that it names, if that is reached over TLS, and nowhere
else: a redirect to another host is followed without them, and what that host asks for is not given.
"""

import io
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urljoin, urlsplit

import msgspec
import urllib3

from toolkit.errors import RegistryError, printable
from toolkit.fleet.registry.credentials import Credentials
from toolkit.fleet.registry.reference import Reference

TIMEOUT_S = 30.0  # without a byte
UPLOADED_S = 300.0  # after the last byte of a body, which may still be on its way for long
MAX_ANSWER_BYTES = 4 * 1024**2  # of what is no blob
MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_CUT_TLS = (ssl.SSLEOFError, ssl.SSLSyscallError, ssl.SSLZeroReturnError)
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_TOKEN = re.compile(r"[\x21-\x7e]*\Z")


class CutError(Exception):
    """The connection was cut or a server is in trouble: another try may go well."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that was read whole; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Problem(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Problems(msgspec.Struct):
    errors: tuple[_Problem, ...] = ()


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


class RegistryClient:
    """Speaks to the registry of one reference; `close` it."""

    def __init__(
        self,
        reference: Reference,
        credentials: Credentials | None = None,
        *,
        ca: Path | None = None,
        plain_http: bool = False,
    ) -> None:
        """`ca`: certificates to trust in place of the system's; `plain_http`: no TLS.

        Raises RegistryError: the certificates cannot be read.
        """
        self.reference = reference
        self._credentials = credentials
        self._base = f"{'http' if plain_http else 'https'}://{reference.host}"
        self._plain = plain_http
        self._authorization = ""
        try:
            context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        except (OSError, ssl.SSLError) as error:
            raise RegistryError(f"the certificates in {ca} cannot be read: {error}") from error
        self._pool = urllib3.PoolManager(ssl_context=context, retries=False)

    def close(self) -> None:
        """Close all connections."""
        self._pool.clear()

    def url(self, path: str) -> str:
        """Return the URL of a path below the repository, such as blobs/sha256:..."""
        return f"{self._base}/v2/{self.reference.name}/{path}"

    def ask(
        self,
        method: str,
        url: str,
        *,
        expect: tuple[int, ...],
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """Send a request and return its answer.

        Raises RegistryError: it has another status than those in `expect`; CutError: no whole
        answer came, or the server is in trouble.
        """
        answer = self.open(method, url, headers=headers, body=body)
        try:
            data = answer.read(MAX_ANSWER_BYTES + 1) if method != "HEAD" else b""
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise CutError(str(error)) from error
        finally:
            answer.release_conn()
        if len(data) > MAX_ANSWER_BYTES:
            raise RegistryError(
                f"{self.reference.host} answered {method} with more than {MAX_ANSWER_BYTES} bytes"
            )
        self.check(answer.status, data, method, url, expect)
        lower = {name.lower(): value for name, value in answer.headers.items()}
        return Answer(answer.status, lower, data)

    def open(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request, with a token if one is asked for, and return the open answer.

        Raises CutError: no answer came; RegistryError: TLS or the token server refuses.
        """
        answer, place = self._follow(method, url, headers or {}, body)
        challenge = answer.headers.get("WWW-Authenticate", "")
        if answer.status != 401 or not challenge or not self._is_own(place):
            return answer
        answer.drain_conn()
        self._authorization = self._authorize(challenge)
        return self._follow(method, url, headers or {}, body)[0]

    def check(
        self, status: int, body: bytes, method: str, url: str, expect: tuple[int, ...]
    ) -> None:
        """Raise unless a status is one of those expected; as `ask`."""
        if status in expect:
            return
        note = _detail(body)
        if status >= 500 or status == 429:
            raise CutError(f"the registry {self.reference.host} answered {status}{note}")
        what = self.reference
        if status in (401, 403):
            who = "nobody" if self._credentials is None else repr(self._credentials.user)
            raise RegistryError(
                f"{what.host} does not let {who} do this with {what.name} (status {status}{note}): "
                "log in with `docker login`, or set TANDEM_REGISTRY_USER and "
                "TANDEM_REGISTRY_PASSWORD"
            )
        if status == 404:
            raise RegistryError(
                f"{what.host} has no {what.name} {what.digest_or_tag} (status 404{note})"
            )
        place = urlsplit(url).path
        raise RegistryError(f"{what.host} answered {method} {place} with status {status}{note}")

    def target(self, method: str, url: str, location: str) -> str:
        """Return the URL that an answer's Location leads to.

        Raises RegistryError: it is none, or without TLS.
        """
        try:
            target = urljoin(url, location)
            scheme = _origin(target)[0]
        except ValueError as error:
            raise RegistryError(
                f"{self.reference.host} sends {method} on to {printable(location)!r}, which is no "
                f"address: {error}"
            ) from error
        if scheme not in _PORTS or (urlsplit(url).scheme == "https" and scheme != "https"):
            raise RegistryError(
                f"{self.reference.host} sends {method} on to {printable(target)}, which is not "
                "protected by TLS: nothing is sent there"
            )
        return target

    def _follow(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[urllib3.BaseHTTPResponse, str]:
        """Return the answer behind all redirects, and the URL that it is of."""
        for _ in range(MAX_REDIRECTS):
            at_registry = self._is_own(url)
            authorization = {"Authorization": self._authorization}
            sent = {**headers, **(authorization if at_registry and self._authorization else {})}
            answer = self._send(method, url, sent, body)
            location = answer.headers.get("Location")
            if answer.status not in _REDIRECTS or location is None:
                return answer, url
            answer.drain_conn()
            url = self.target(method, url, location)
        raise RegistryError(
            f"{self.reference.host} sends {method} on more than {MAX_REDIRECTS} times"
        )

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> urllib3.BaseHTTPResponse:
        sized = dict(headers) if body is None else {**headers, "Content-Length": str(len(body))}
        answer_s = UPLOADED_S if body else TIMEOUT_S
        try:
            # The body as a file: each block may then take TIMEOUT_S, and not all of it together.
            return self._pool.request(
                method, url, headers=sized, body=None if body is None else io.BytesIO(body),
                timeout=urllib3.Timeout(connect=TIMEOUT_S, read=answer_s),
                preload_content=False, redirect=False,
            )  # fmt: skip
        except urllib3.exceptions.SSLError as error:
            if isinstance(error.args[0], _CUT_TLS):
                raise CutError(f"{urlsplit(url).netloc}: {error}") from error
            raise RegistryError(
                f"{urlsplit(url).netloc} cannot be trusted ({error}): name the certificates of its "
                "CA with --ca, or use --plain-http for a registry without TLS"
            ) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise CutError(f"{urlsplit(url).netloc}: {error}") from error

    def _authorize(self, challenge: str) -> str:
        """Return the header that a challenge asks for."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            return "" if self._credentials is None else self._credentials.basic
        if scheme.lower() != "bearer":
            raise RegistryError(
                f"{self.reference.host} asks for {printable(scheme)!r} authentication; Basic and "
                "Bearer are known"
            )
        fields = dict(_PARAMETER.findall(rest))
        realm = fields.get("realm", "")
        schemes = ("https", "http") if self._plain else ("https",)
        if _scheme(realm) not in schemes:
            raise RegistryError(
                f"{self.reference.host} names the token server {printable(realm)!r}, which is not "
                "protected by TLS: no password is sent there"
            )
        query = {name: fields[name] for name in ("service", "scope") if name in fields}
        headers = {} if self._credentials is None else {"Authorization": self._credentials.basic}
        return f"Bearer {self._token(realm, query, headers)}"

    def _token(self, realm: str, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
        separator = "&" if urlsplit(realm).query else "?"
        url = realm + (separator + urlencode(query) if query else "")
        answer = self._send("GET", url, headers, None)
        try:
            body = answer.read(MAX_ANSWER_BYTES)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise CutError(str(error)) from error
        finally:
            answer.release_conn()
        self.check(answer.status, body, "GET", url, (200,))
        try:
            token = msgspec.json.decode(body, type=_Token)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RegistryError(
                f"the token server {urlsplit(realm).netloc} gives no token: {error}"
            ) from error
        text = token.token or token.access_token
        if not _TOKEN.match(text):
            raise RegistryError(
                f"the token server {urlsplit(realm).netloc} gives a token with characters that no "
                "header may have"
            )
        return text

    def _is_own(self, url: str) -> bool:
        """Whether a URL is one of the registry itself."""
        return _origin(self._base) == _origin(url)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of a URL. Raises ValueError: it is none."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _scheme(url: str) -> str:
    """Return the scheme of a URL, empty if it is none."""
    try:
        return _origin(url)[0]
    except ValueError:
        return ""


def _detail(body: bytes) -> str:
    """Return what a registry says of an error, as one line."""
    try:
        problems = msgspec.json.decode(body, type=_Problems).errors
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return "".join(f", {printable(f'{row.code} {row.message}'.strip())}" for row in problems[:3])
