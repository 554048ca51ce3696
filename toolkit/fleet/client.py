"""A client of a fleet's API (`tandem fleet web`) for programs.

with Client("https://fleet.example.com", token) as fleet:
    for device in fleet.devices(problem="any"):
        print(device["id"], device["problems"])
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3

from device.closing import Closing
from toolkit.errors import FleetError

__all__ = ["Client"]

ROOT = "/api/v1"
Json = dict[str, Any]


class Client(Closing):
    """The API of one fleet. Answers are what its OpenAPI document says, as dicts and lists.

    Each method raises FleetError: what was asked for was not done, and why.
    """

    def __init__(self, url: str, token: str, *, ca: Path | None = None) -> None:
        """`ca`: the certificates that are trusted, by default those of the system."""
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}
        timeout = urllib3.Timeout(connect=10.0, read=60.0)
        ca_certs = None if ca is None else str(ca)
        self._pool = urllib3.PoolManager(timeout=timeout, retries=False, ca_certs=ca_certs)

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def counts(self) -> Json:
        """Return the fleet in figures: devices by presence, problem and version."""
        return dict(self._ask("GET", "/fleet"))

    def devices(self, **query: str) -> Iterator[Json]:
        """Yield the devices that fulfil a query, reading pages as they are needed."""
        after = ""
        while True:
            page = self._ask("GET", "/devices", {**query, "after": after, "limit": "500"})
            yield from page["devices"]
            if not (after := page["after"]):
                return

    def device(self, device: str) -> Json:
        """Return one device."""
        return dict(self._ask("GET", f"/devices/{quote(device, safe='')}"))

    def label(self, device: str, changes: Mapping[str, str | None]) -> Json:
        """Set labels of a device, or with None take them away; return those that it has now."""
        path = f"/devices/{quote(device, safe='')}/labels"
        return dict(self._ask("PATCH", path, body={"changes": dict(changes)})["labels"])

    def bundles(self) -> list[Json]:
        """Return the bundles that can be rolled out."""
        return list(self._ask("GET", "/bundles"))

    def rollouts(self) -> list[Json]:
        """Return the newest rollouts."""
        return list(self._ask("GET", "/rollouts"))

    def rollout(self, number: int) -> Json:
        """Return one rollout."""
        return dict(self._ask("GET", f"/rollouts/{number}"))

    def plan(self, bundle: str, rollout: Json | None = None) -> Json:
        """Return what a rollout of a bundle (by its SHA-256) would do."""
        return dict(
            self._ask("POST", "/rollouts/plan", body={"bundle": bundle, "rollout": rollout or {}})
        )

    def start(self, bundle: str, devices: int, rollout: Json | None = None) -> int:
        """Start a rollout that was planned for so many devices; return its number."""
        body = {"bundle": bundle, "devices": devices, "rollout": rollout or {}}
        return int(self._ask("POST", "/rollouts", body=body)["number"])

    def order(self, number: int, word: str) -> Json:
        """Give a rollout an order: pause, resume, approve, abort or rollback."""
        return dict(self._ask("POST", f"/rollouts/{number}/orders", body={"order": word}))

    def events(self, last_id: str = "") -> Iterator[tuple[str, str, Json]]:
        """Yield (id, kind, content) of changes as they come; the id goes on after a lost one."""
        headers = {**self._headers, "last-event-id": last_id}
        url = f"{self._url}{ROOT}/events"
        try:
            with closing(
                self._pool.request("GET", url, headers=headers, preload_content=False)
            ) as answer:
                self._check(answer.status, b"" if answer.status == 200 else answer.read())
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    raise FleetError(f"{self._url} does not answer as a fleet's API")
                yield from _messages(answer)
        except urllib3.exceptions.HTTPError as error:
            raise FleetError(f"{self._url} cannot be reached: {error}") from error

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
    ) -> Any:  # noqa: ANN401  # JSON
        fields = {key: value for key, value in (query or {}).items() if value}
        try:
            answer = self._pool.request(
                method, f"{self._url}{ROOT}{path}", headers=self._headers,
                **({"fields": fields} if body is None else {"json": body}),
            )  # fmt: skip
        except urllib3.exceptions.HTTPError as error:
            raise FleetError(f"{self._url} cannot be reached: {error}") from error
        self._check(answer.status, answer.data)
        try:
            return json.loads(answer.data)
        except ValueError as error:
            raise FleetError(f"{self._url} does not answer as a fleet's API") from error

    def _check(self, status: int, body: bytes) -> None:
        if status == 200:
            return
        try:
            reason = json.loads(body)["reason"]
        except (ValueError, KeyError, TypeError):
            reason = body[:200].decode(errors="replace")
        raise FleetError(f"{self._url} answers {status}: {reason}")


def _messages(answer: urllib3.BaseHTTPResponse) -> Iterator[tuple[str, str, Json]]:
    """Yield the messages of a stream of server-sent events."""
    fields: dict[str, str] = {}
    pending = b""
    for piece in answer.stream(1024):
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            name, _, value = line.decode().partition(": ")
            if not line and "data" in fields:
                yield fields.get("id", ""), fields.get("event", ""), json.loads(fields["data"])
                fields = {}
            elif name in ("id", "event", "data"):
                fields[name] = value
