"""The command `tandem-agent enrol`."""

import argparse
import queue
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from device.agent.config import AgentConfig, load_agent_config, tls_files
from device.enrol.request import (
    MAX_PEM,
    EnrolRequest,
    EnrolResponse,
    fits_key,
    make_request,
    new_key,
    request_topic,
    response_topic,
)
from device.errors import BrokerError, ConfigError, TandemError
from device.files import write_file
from device.protocol.documents import decode, encode
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, LinkUp, queue_putter
from device.protocol.tls import TlsFiles

AGAIN_S = 3.0  # the server may have been away


def enrol(config: AgentConfig, claim: TlsFiles, *, again: bool, timeout_s: float) -> Path:
    """Make a key, have it certified, and store both where [broker.tls] says.

    A key that is there is used again: an enrolment that was cut off goes on with it. Raises
    ConfigError or BrokerError; the files that were there stay then.
    """
    certificate_file, key_file = _files(config)
    if certificate_file.exists() and not again:
        raise ConfigError(
            f"{certificate_file} exists: this device is enrolled. --again asks for a new one"
        )
    key = _key(key_file)
    response = _ask(config, claim, _request(key, key_file, config.device), timeout_s)
    if response.error:
        raise ConfigError(f"the fleet refused to enrol {config.device}: {response.error}")
    certificate = response.certificate.encode()
    if not fits_key(certificate, key, config.device):
        raise BrokerError(
            f"the answer holds no certificate for the key of {config.device}: another server "
            "answers on this broker"
        )
    write_file(certificate_file, certificate, 0o666, ConfigError)
    return certificate_file


def write_request(config: AgentConfig, out: BinaryIO) -> None:
    """Write the request for a certificate, PEM; the key is made if there is none."""
    _, key_file = _files(config)
    out.write(_request(_key(key_file), key_file, config.device))
    out.flush()


def accept(config: AgentConfig, certificate: bytes) -> Path:
    """Store a certificate that was signed elsewhere; ConfigError if it is not for our key."""
    certificate_file, key_file = _files(config)
    if not fits_key(certificate, _key(key_file), config.device):
        raise ConfigError(
            f"this is no certificate for the key of {config.device}: sign what `tandem-agent enrol "
            "--request` writes on this board"
        )
    write_file(certificate_file, certificate, 0o666, ConfigError)
    return certificate_file


def _files(config: AgentConfig) -> tuple[Path, Path]:
    """Return where certificate and key are."""
    files = tls_files(config.broker)
    if files is None or files.certificate is None or files.key is None:
        raise ConfigError(
            "agent.toml names no certificate and key in [broker.tls]: that is where they go"
        )
    return files.certificate, files.key


def _request(key: bytes, key_file: Path, device: str) -> bytes:
    try:
        return make_request(key, device)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{key_file} is no unencrypted key on the curve P-256 ({error}): remove it, and a new "
            "one is made"
        ) from error


def _key(path: Path) -> bytes:
    """Return the key of a file, which is made if it is missing."""
    if not path.exists():
        key = new_key()
        write_file(path, key, 0o600, ConfigError)
        return key
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from error


def _ask(config: AgentConfig, claim: TlsFiles, csr: bytes, timeout_s: float) -> EnrolResponse:
    """Send the request until an answer comes."""
    request_id, broker = secrets.token_hex(16), config.broker
    settings = LinkSettings(
        host=broker.host,
        port=broker.port,
        client_id=f"tandem-enrol-{request_id[:8]}",
        subscriptions=((response_topic(request_id), 1),),
        mqtt_version=broker.mqtt_version,
        tls=claim,
    )
    payload = encode(EnrolRequest(device=config.device, csr=csr.decode()))
    events: queue.Queue[LinkEvent] = queue.Queue(16)
    ended = threading.Event()
    link = Link(settings, queue_putter(events, ended))
    link.start()
    until_s, why = time.monotonic() + timeout_s, "nothing answers: `tandem fleet serve` must run"
    try:
        while (wait_s := until_s - time.monotonic()) > 0.0:
            try:
                event = events.get(timeout=min(AGAIN_S, wait_s))
            except queue.Empty:
                link.publish(request_topic(request_id), payload, qos=1)
                continue
            if isinstance(event, LinkUp):
                link.publish(request_topic(request_id), payload, qos=1)
            elif isinstance(event, LinkDown):
                why = event.reason
            else:
                return decode(event.payload, EnrolResponse)
    except ValueError as error:
        raise BrokerError(f"the answer to the enrolment is not understood: {error}") from error
    finally:
        ended.set()
        link.close()
    raise BrokerError(f"{config.device} was not enrolled within {timeout_s:g} s: {why}")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="tandem-agent enrol",
        description="Makes this device's key and has it certified by its fleet over MQTT. The key "
        "never leaves the device.",
        epilog="example: tandem-agent enrol --config agent.toml --claim fleet.claim.crt "
        "--claim-key fleet.claim.key",
    )
    parser.add_argument("--config", required=True, type=Path, help="agent.toml of this board")
    parser.add_argument("--claim", type=Path, help="the claim certificate (PEM)")
    parser.add_argument("--claim-key", type=Path, help="its key (PEM)")
    other_ways = parser.add_mutually_exclusive_group()
    other_ways.add_argument(
        "--request", action="store_true", help="write the request (PEM) instead, for another way"
    )
    other_ways.add_argument(
        "--accept", action="store_true", help="read the certificate (PEM) from standard input"
    )
    parser.add_argument("--again", action="store_true", help="replace a certificate that is there")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds (default: 60)")
    return parser


def _enrol_over_mqtt(config: AgentConfig, options: argparse.Namespace) -> Path:
    ca = tls_files(config.broker)
    if ca is None:
        raise ConfigError(f"{options.config}: [broker.tls] is missing")
    claim = TlsFiles(ca.ca, options.claim, options.claim_key)
    return enrol(config, claim, again=options.again, timeout_s=options.timeout)


def main(argv: Sequence[str] | None = None) -> int:
    """Enrol; exit status 1 with a sentence if that fails."""
    parser = make_parser()
    options = parser.parse_args(argv)
    over_mqtt = not (options.request or options.accept)
    if over_mqtt and (options.claim is None or options.claim_key is None):
        parser.error("name --claim and --claim-key, or take --request and --accept")
    try:
        config = load_agent_config(options.config)
        if options.request:
            write_request(config, sys.stdout.buffer)
            return 0
        if options.accept:
            path = accept(config, sys.stdin.buffer.read(MAX_PEM))
        else:
            path = _enrol_over_mqtt(config, options)
    except TandemError as error:
        print(f"tandem-agent: {error}", file=sys.stderr)
        return 1
    print(f"{config.device} is enrolled: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
