"""A real registry (Debian's docker-registry) with TLS, passwords or tokens; a line that is cut."""

import base64
import json
import math
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID
from mqtt_fixtures import free_port

USER, PASSWORD = "robot", "swordfish"
# bcrypt of PASSWORD, the only form of htpasswd that the registry reads.
HTPASSWD = "robot:$2b$05$abcdefghijklmnopqrstuupWDwJQeCHYIBQy8WvkVB6ImhZ476YYy\n"
PATIENCE_S = 30.0


class Authority:
    """A key with a certificate for 127.0.0.1 that has signed itself."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
        now = datetime.now(timezone.utc)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.key.public_key())
            .serial_number(7)
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=30))
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
            .sign(self.key, hashes.SHA256())
        )
        self.pem, self.key_pem = folder / "ca.pem", folder / "key.pem"
        self.pem.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        self.key_pem.write_bytes(
            self.key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )

    def token(self, claims: dict[str, object]) -> str:
        """Return a JSON web token as the registry reads it, with the certificate in its head."""
        der = self.certificate.public_bytes(serialization.Encoding.DER)
        head = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(der).decode()]}
        signed = b".".join(_plain(json.dumps(part).encode()) for part in (head, claims))
        signature = self.key.sign(signed, padding.PKCS1v15(), hashes.SHA256())
        return (signed + b"." + _plain(signature)).decode()


def _plain(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


@contextmanager
def registry(
    folder: Path,
    *,
    tls: Authority | None = None,
    passwords: bool = False,
    tokens: tuple[Authority, str] | None = None,
) -> Iterator[str]:
    """Yield HOST:PORT of a registry. `tokens`: who signs them, and where they are given."""
    folder.mkdir(parents=True, exist_ok=True)
    host = f"127.0.0.1:{free_port()}"
    settings: dict[str, object] = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": host},
    }
    if tls is not None:
        settings["http"] = {
            "addr": host, "tls": {"certificate": str(tls.pem), "key": str(tls.key_pem)},
        }  # fmt: skip
    if passwords:
        (folder / "htpasswd").write_text(HTPASSWD)
        settings["auth"] = {"htpasswd": {"realm": "r", "path": str(folder / "htpasswd")}}
    if tokens is not None:
        settings["auth"] = {
            "token": {
                "realm": tokens[1], "service": "s", "issuer": "i",
                "rootcertbundle": str(tokens[0].pem),
            }
        }  # fmt: skip
    # JSON is YAML, too.
    (folder / "config.yml").write_text(json.dumps(settings))
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        ["docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=log
    )
    try:
        _wait_for(host, process)
        yield host
    finally:
        process.kill()
        process.wait()
        log.close()


def _wait_for(host: str, process: "subprocess.Popen[bytes]") -> None:
    end_s = time.monotonic() + PATIENCE_S
    name, _, port = host.partition(":")
    while True:
        assert process.poll() is None, "the registry has ended"
        try:
            socket.create_connection((name, int(port)), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < end_s
            time.sleep(0.05)


@contextmanager
def token_server(authority: Authority) -> Iterator[str]:
    """Yield the realm of a server that gives tokens to who knows the password."""
    basic = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            if self.headers.get("Authorization") != basic:
                self._answer(401, {"errors": [{"code": "UNAUTHORIZED", "message": "who?"}]})
                return
            access = []
            for scope in query.get("scope", []):
                kind, name, actions = scope.rsplit(":", 2)[0:3]
                access.append({"type": kind, "name": name, "actions": actions.split(",")})
            now_s = int(time.time())
            claims = {
                "iss": "i", "sub": USER, "aud": "s", "exp": now_s + 300, "nbf": now_s - 60,
                "iat": now_s, "jti": "1", "access": access,
            }  # fmt: skip
            self._answer(200, {"token": authority.token(claims)})

        def _answer(self, status: int, document: object) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/token"
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Spoken:
    """What a host that says `answers` has been asked: the headers of each request."""

    host: str = ""
    headers: list[Mapping[str, str]] = field(default_factory=list)


@contextmanager
def host_that_says(
    answer: Callable[[str, str], tuple[int, Mapping[str, str], bytes]],
) -> Iterator[Spoken]:
    """Yield a host; `answer` gets method and path, and returns status, headers and body."""
    spoken = Spoken()

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            spoken.headers.append(dict(self.headers))
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            status, headers, body = answer(self.command, self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = do_PUT = _any  # noqa: N815  (the library's names)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    spoken.host = f"127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield spoken
    finally:
        server.shutdown()
        server.server_close()


class CutLine:
    """A TCP line to a server that is cut after some bytes, the first `cuts` connections that carry
    so many; `carried` counts all bytes of both directions. `bytes_per_s`: it carries no more."""

    def __init__(
        self, host: str, *, after_bytes: int, cuts: int, bytes_per_s: float = math.inf
    ) -> None:
        self._target = (host.partition(":")[0], int(host.partition(":")[2]))
        self._after_bytes = after_bytes
        self._bytes_per_s = bytes_per_s
        self.cuts_left = cuts
        self.carried = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        if bytes_per_s < math.inf:  # or the system takes a piece at once
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            budget = [self._after_bytes]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(
                    target=self._carry, args=(source, sink, budget), daemon=True
                ).start()

    def _carry(self, source: socket.socket, sink: socket.socket, budget: list[int]) -> None:
        try:
            while data := source.recv(16384):
                with self._lock:
                    budget[0] -= len(data)
                    self.carried += len(data)
                    if budget[0] < 0 and self.cuts_left > 0:
                        self.cuts_left -= 1
                        break
                time.sleep(len(data) / self._bytes_per_s)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
