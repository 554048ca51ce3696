"""The site as an ASGI application: a row for each page and each form, and what guards them all."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from device.errors import TandemError
from pipelines.metrics import CONTENT_TYPE, Figures, render
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.store.accounts import (
    Account,
    Role,
    Session,
    check_password,
    close_session,
    hash_of,
    open_session,
)
from toolkit.fleet.store.database import Database
from toolkit.fleet.web import api
from toolkit.fleet.web.access import (
    COOKIE,
    RefusedError,
    SignInLimit,
    TrustedProxy,
    check_origin,
    check_role,
    find_session,
    find_token,
)
from toolkit.fleet.web.forms import COMMAND_WAIT_S, FORMS, Form, run_command
from toolkit.fleet.web.frame import (
    Frame,
    draw_page,
    draw_refusal,
    draw_sign_in,
    is_csrf,
    own_path,
    part,
    seen,
)
from toolkit.fleet.web.live import Live, events_after, read_place
from toolkit.fleet.web.meters import Meters, MetersMiddleware
from toolkit.fleet.web.pages import PAGES, Page
from toolkit.fleet.web.pages.answer import command_of, draw_answer
from toolkit.fleet.web.store_threads import StoreThreads
from toolkit.fleet.web.visit import Visit
from toolkit.html.markup import paragraph

LOG = logging.getLogger("tandem.fleet")
STATIC = Path(__file__).parent / "static"
# Path -> its media type and the files that it is made of. htmx looks at a page as soon as it runs:
# an extension that comes in a second file may come too late.
ASSETS: Mapping[str, tuple[str, tuple[Path, ...]]] = {
    "/static/style.css": (
        "text/css",
        (Path(__file__).parents[2] / "html" / "style.css", STATIC / "web.css"),
    ),
    "/static/page.js": (
        "text/javascript",
        tuple(STATIC / name for name in ("htmx.min.js", "hx-sse.min.js", "lost.js")),
    ),
}
MAX_BODY = 256 << 10  # bytes of a form
MAX_FIELDS = 200
MAX_TOLD = 200  # characters of a path that is told back
ONCE = ("done", "verify")  # parameters of a page that do not stay in its address
MAX_STREAMS = 100  # of live events that one account follows at a time
MAX_HASHING = 2  # passwords at once; each takes 32 MiB and a core

# What every response says. Nothing is loaded from elsewhere, and nobody frames the site.
HEADERS: Mapping[bytes, bytes] = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """How the site is reached: over TLS, behind a proxy that signs people in."""

    tls: bool = False
    proxy: TrustedProxy | None = None


class Site:
    """The site of one fleet."""

    def __init__(self, fleet: Fleet, settings: SiteSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._store = StoreThreads(fleet)
        self._live = Live(self._store)
        self._limit = SignInLimit()
        self._streams: Counter[str] = Counter()
        self._meters = Meters()
        self._hashing = asyncio.Semaphore(MAX_HASHING)

    def application(self) -> ASGIApp:
        """Return what a server runs."""
        routes = [
            Route("/sign-in", self._guarded(self._show_sign_in), methods=["GET"]),
            Route("/sign-in", self._guarded(self._sign_in), methods=["POST"]),
            Route("/sign-out", self._guarded(self._sign_out), methods=["POST"]),
            Route("/metrics", self._answered(self._metrics), methods=["GET"]),
            Route("/live", self._guarded(self._follow), methods=["GET"]),
            *(Route(path, _send_asset, methods=["GET"]) for path in ASSETS),
            Mount("/static", StaticFiles(directory=STATIC)),
            *(Route(page.path, self._guarded(partial(self._show, page)), methods=["GET"])
                for page in PAGES),
            *(Route(form.path, self._guarded(partial(self._take, form)), methods=["POST"])
                for form in FORMS),
            Route("/devices/{device}/commands", self._guarded(self._command), methods=["POST"]),
            Route(f"{api.ROOT}/openapi.json", self._openapi, methods=["GET"]),
            Route(f"{api.ROOT}/events", self._answered(self._events), methods=["GET"]),
            *(Route(api.ROOT + row.path, self._answered(partial(self._operate, row)),
                methods=[row.method]) for row in api.OPERATIONS),
        ]  # fmt: skip
        return Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={404: self._refuse, 405: self._refuse},
            middleware=[Middleware(MetersMiddleware, meters=self._meters),
                Middleware(HeadersMiddleware, tls=self._settings.tls),
                Middleware(GZipMiddleware, minimum_size=1000)],
        )  # fmt: skip

    def end(self) -> None:
        """End the streams of live events, which would go on for ever."""
        self._live.is_ending = True

    def figures(self) -> Figures:
        """Return what the site counts and times of itself."""
        return self._meters.read(sum(self._streams.copy().values()), self._live.changed_s)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        polling = asyncio.create_task(self._live.poll())
        try:
            yield
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling
            self._store.close()

    # -- pages

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Return the answer to what no route takes: a wrong path, or a wrong method there."""
        path = request.url.path[:MAX_TOLD]
        if isinstance(error, HTTPException) and error.status_code == 405:
            refusal = RefusedError(405, f"{path} takes no {request.method}")
        else:
            refusal = RefusedError(404, f"there is no such page: {path}")
        return await self._answer_to(request, refusal)

    async def _answer_to(self, request: Request, refusal: RefusedError) -> Response:
        async def refuse(_request: Request) -> Response:
            raise refusal

        is_api = request.url.path.startswith(f"{api.ROOT}/")
        return await (self._answered if is_api else self._guarded)(refuse)(request)

    async def _show(self, page: Page, request: Request) -> Response:
        """Return a page to somebody who has signed in; others sign in first."""
        session = await self._session(request)
        if session is None:
            back = urlencode({"back": _address(request)})
            return RedirectResponse(f"/sign-in?{back}", 303)
        check_role(session.account, page.role)
        visit = _visit(request.path_params, request.query_params.multi_items(), session)
        mark = await self._live.mark()
        view = await self._store.run(page.draw, self._fleet, visit)
        frame = Frame(
            fleet=self._fleet.file.name,
            path=_address(request),
            mark=mark,
            session=session,
            notice=request.query_params.get("done", ""),
        )
        return HTMLResponse(draw_page(view, frame))

    async def _follow(self, request: Request) -> Response:
        """Send the live part of a page whenever it changes, for as long as the session holds."""
        session = await self._session(request)
        if session is None:
            raise RefusedError(401, "sign in first")
        if self._live.is_stale:
            raise RefusedError(503, "the fleet's store does not answer")
        path, _, query = request.query_params.get("page", "").partition("?")
        page, params = _match(path)
        check_role(session.account, page.role)
        self._check_streams(session.account)
        lasting = [row for row in parse_qsl(query) if row[0] not in ONCE]
        visit = _visit(params, lasting, session)
        key = (f"{path}?{urlencode(lasting)}", session.account.role)
        mark = request.headers.get("last-event-id") or request.query_params.get("mark", "")
        fleet = self._fleet

        async def messages() -> AsyncIterator[str]:
            draw = partial(_draw_live, page, fleet, visit)
            with self._following(session.account):
                async for message in self._live.follow(key, draw, mark):
                    if await self._session(request) is None:
                        return
                    yield message

        return StreamingResponse(messages(), media_type="text/event-stream")

    # -- forms

    async def _take(self, form: Form, request: Request) -> Response:
        """Do what a form asks for, then show the page that it names."""
        session, fields = await self._sent(request, form.role)
        try:
            where = await self._store.write(form.take, self._fleet, session.account, fields)
        except RefusedError:
            raise
        except TandemError as error:
            raise RefusedError(409, str(error)) from error
        return RedirectResponse(where, 303)

    async def _command(self, request: Request) -> Response:
        """Have a device do something once, and show what it answers."""
        session, fields = await self._sent(request, "operator")
        command = command_of(fields["device"], fields.get("op", ""))
        try:
            state = await run_command(self._store, self._fleet, session.account, command)
        except TandemError as error:
            raise RefusedError(409, str(error)) from error
        path = f"/devices/{part(command.device)}"
        frame = Frame(self._fleet.file.name, path, await self._live.mark(), session)
        return HTMLResponse(draw_page(draw_answer(command, state, COMMAND_WAIT_S), frame))

    async def _sent(self, request: Request, role: Role) -> tuple[Session, dict[str, str]]:
        """Return who sent a form, and its fields with those of the path. Raises RefusedError."""
        session = await self._session(request)
        if session is None:
            raise RefusedError(401, "the session has ended: sign in, and send it again")
        fields = await _fields(request)
        if not is_csrf(session, fields.pop("csrf", "")):
            raise RefusedError(403, "the form is of another session: load the page again")
        check_role(session.account, role)
        return session, fields | request.path_params

    # -- the API

    async def _openapi(self, _request: Request) -> Response:
        return Response(
            msgspec.json.encode(api.openapi(self._fleet.file.name)), media_type="application/json"
        )

    async def _operate(self, operation: api.Operation, request: Request) -> Response:
        """Do an operation of the API for a program that has a token."""
        account = await self._store.run(find_token, request)
        check_role(account, operation.role)
        query = api.check_query(operation, dict(request.query_params))
        body = api.check_body(operation, await _body(request))
        call = api.Call(self._fleet, account, request.path_params, query, body)
        use = self._store.run if operation.method == "GET" else self._store.write
        answer = await use(api.run_operation, operation, call)
        return Response(answer, media_type="application/json")

    async def _events(self, request: Request) -> Response:
        """Send rows of the log and changed devices to a program, for as long as its token holds."""
        account = await self._store.run(find_token, request)
        self._check_streams(account)
        place = await self._store.run(read_place, request.headers.get("last-event-id", ""))

        async def messages() -> AsyncIterator[str]:
            at = place
            with self._following(account):
                while not (self._live.is_ending or self._live.is_stale):
                    mark = await self._live.mark()
                    events, at = await self._store.run(events_after, at)
                    for event in events:
                        yield event
                    if not events and await self._live.mark() == mark:
                        yield await self._live.await_change()
                    await self._store.run(find_token, request)  # it may have been removed

        return StreamingResponse(messages(), media_type="text/event-stream")

    def _check_streams(self, account: Account) -> None:
        """Raises RefusedError: the account follows as many streams as one may."""
        if self._streams[account.name] >= MAX_STREAMS:
            raise RefusedError(429, f"{account.name} follows {MAX_STREAMS} streams: close some", 5)

    @contextlib.contextmanager
    def _following(self, account: Account) -> Iterator[None]:
        """Count a stream; an error ends it, as the answer has begun, and who reads asks again."""
        self._streams[account.name] += 1
        try:
            with contextlib.suppress(TandemError):
                yield
        finally:
            self._streams[account.name] -= 1

    def _answered(self, handler: Handler) -> Handler:
        """Return a handler whose refusals are JSON that says why."""

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:  # noqa: BLE001  (each is answered)
                refusal = _refusal_of(error)
            problem = api.Problem(status=refusal.status, reason=str(refusal))
            return Response(
                msgspec.json.encode(problem),
                refusal.status,
                _retry_after(refusal),
                "application/json",
            )

        return answered

    async def _metrics(self, request: Request) -> Response:
        """Answer Prometheus, which has a token."""
        await self._store.run(find_token, request)
        return Response(render(self.figures()), media_type=CONTENT_TYPE)

    # -- people

    async def _show_sign_in(self, request: Request) -> Response:
        return HTMLResponse(
            draw_sign_in(self._fleet.file.name, own_path(request.query_params.get("back", "/")))
        )

    async def _sign_in(self, request: Request) -> Response:
        check_origin(request)
        fields = await _fields(request)
        name, password = fields.get("name", ""), fields.get("password", "")
        back = own_path(fields.get("back", "/"))
        address = request.client.host if request.client else ""
        self._limit.begin(name, address)
        hashed = await self._store.run(hash_of, name)
        async with self._hashing:
            is_right = await asyncio.to_thread(check_password, password, hashed)
        if not is_right:
            page = draw_sign_in(self._fleet.file.name, back, "Name or password is not right.")
            return HTMLResponse(page, 401)
        self._limit.succeed(name, address)
        secret = await self._store.write(open_session, name)
        response = RedirectResponse(back, 303)
        # Behind a proxy that ends TLS the browser says where it is.
        is_tls = self._settings.tls or request.headers.get("origin", "").startswith("https:")
        response.set_cookie(COOKIE, secret, httponly=True, samesite="strict", secure=is_tls)
        return response

    async def _sign_out(self, request: Request) -> Response:
        session = await self._session(request)
        fields = await _fields(request)
        if session is not None and is_csrf(session, fields.get("csrf", "")):
            await self._store.write(close_session, request.cookies.get(COOKIE, ""))
        response = RedirectResponse("/sign-in", 303)
        response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=self._settings.tls)
        return response

    async def _session(self, request: Request) -> Session | None:
        return await self._store.run(find_session, request, self._settings.proxy)

    # -- what guards all of it

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler whose refusals are pages that say why."""

        async def guarded(request: Request) -> Response:
            try:
                if request.method == "POST":
                    check_origin(request)
                return await handler(request)
            except Exception as error:  # noqa: BLE001  (each is answered)
                refusal = _refusal_of(error)
            title = TITLES.get(refusal.status, "Not done")
            back = own_path(_path_of(request.headers.get("referer", "")))
            page = draw_refusal(self._fleet.file.name, title, str(refusal), back)
            return HTMLResponse(page, refusal.status, _retry_after(refusal))

        return guarded


# Status -> the title of the page that says why.
TITLES: Mapping[int, str] = {
    400: "Not understood",
    401: "Sign in first",
    403: "Not allowed",
    404: "Not found",
    405: "Not found",
    409: "Not done",
    413: "Too large",
    429: "Too often",
    500: "A fault",
    503: "Not now",
}


class HeadersMiddleware:
    """Adds the headers that every response has; `tls`: browsers come back over TLS only."""

    def __init__(self, app: ASGIApp, *, tls: bool) -> None:
        self._app = app
        self._headers = dict(HEADERS)
        if tls:
            self._headers[b"strict-transport-security"] = b"max-age=31536000"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                more = [row for row in self._headers.items() if row[0] not in present]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _refusal_of(error: Exception) -> RefusedError:
    """Return what is answered where something was not done; a fault of the site is logged."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, TandemError):
        return RefusedError(400, str(error))
    LOG.error("the fleet's page has a fault", exc_info=error)
    return RefusedError(500, "the page has a fault here; what `tandem fleet web` prints tells it")


def _retry_after(refusal: RefusedError) -> dict[str, str]:
    return {"retry-after": str(refusal.retry_after_s)} if refusal.retry_after_s else {}


async def _send_asset(request: Request) -> Response:
    media_type, files = ASSETS[request.url.path]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return Response(text, media_type=media_type, headers={"cache-control": "max-age=300"})


async def _body(request: Request) -> bytes:
    """Return the body of a request. Raises RefusedError: it is too large."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY:
                raise RefusedError(413, f"a request may have {MAX_BODY >> 10} KiB")
    except ClientDisconnect as error:
        raise RefusedError(400, "the request has no end") from error  # nobody is there to read it
    return bytes(body)


async def _fields(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises RefusedError: it is too large, or no form."""
    try:
        rows = parse_qsl(
            (await _body(request)).decode(),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError as error:
        raise RefusedError(400, f"the form cannot be read: {error}") from error
    fields: dict[str, str] = {}
    for name, value in rows:  # boxes of one name are one field
        fields[name] = f"{fields[name]},{value}" if name in fields else value
    return fields


def _visit(params: Mapping[str, str], query: list[tuple[str, str]], session: Session) -> Visit:
    return Visit(dict(params), dict(query), session.account)


def _draw_live(page: Page, fleet: Fleet, visit: Visit, database: Database) -> str:
    """Return the live part of a page, or why there is none any more."""
    try:
        return seen(page.draw(database, fleet, visit).live)
    except TandemError as error:
        return paragraph(str(error), "notice bad")


def _match(path: str) -> tuple[Page, dict[str, str]]:
    """Return the live page of a path. Raises RefusedError: there is none."""
    for page in PAGES:
        if match := page.pattern.fullmatch(path):
            if page.is_live:
                return page, match.groupdict()
            break
    raise RefusedError(404, "there is no such page")


def _path_of(referrer: str) -> str:
    try:
        return urlsplit(referrer).path or "/"
    except ValueError:  # "http://["
        return "/"


def _address(request: Request) -> str:
    """Return path and query of a request, without what is told once."""
    query = [row for row in request.query_params.multi_items() if row[0] not in ONCE]
    return f"{request.url.path}?{urlencode(query)}" if query else request.url.path
