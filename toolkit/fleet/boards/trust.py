"""The steps that give a board the fleet's trust, and an identity of its own.

The key is made on the board and never leaves it: its request comes over SSH, and is signed here
with the CA of the fleet's folder, as `tandem fleet serve` signs one that comes over MQTT.
"""

import datetime as dt
from pathlib import Path

from toolkit.errors import BoardError, FleetError
from toolkit.fleet.boards.setup import Setup, State, packed
from toolkit.fleet.boards.texts import AGENT, CONFIG, ETC

CERTIFICATE = f"{ETC}/device.crt"
CA = f"{ETC}/ca.crt"


def _trust_files(fleet: Path) -> dict[str, bytes]:
    try:
        return {path.name: path.read_bytes() for path in sorted((fleet / "trust").iterdir())}
    except OSError as error:
        raise FleetError(
            f"cannot read {fleet / 'trust'} ({error.strerror}): `tandem fleet init` makes it"
        ) from error


def look_trust(setup: Setup) -> State:
    """Whether the board has the fleet's root keys.

    A root that is there is never replaced: the board follows newer ones by their signatures.
    """
    fleet = setup.options.fleet
    if fleet is None:
        return State("skipped", "no --fleet: only a bench (dev = true) takes releases")
    files = _trust_files(fleet)
    if not _ca_fits(setup, files):
        raise BoardError(
            f"{setup.shell.name} belongs to another fleet: its {CA} is not that of {fleet}; "
            f"remove {ETC} there if it shall change its fleet"
        )
    paths = [f"{ETC}/trust/{name}" for name in files]
    paths += [CA] if "ca.crt" in files else []  # written last
    if all(setup.read(path) is not None for path in paths):
        return State("already", f"{ETC}/trust")
    return State("todo", f"send the root keys of {fleet}")


def _ca_fits(setup: Setup, files: dict[str, bytes]) -> bool:
    present = setup.read(CA)
    return present is None or present == files.get("ca.crt", present)


def write_trust(setup: Setup) -> str:
    """Send the folder `trust` of the fleet, and the CA's certificate."""
    fleet = setup.options.fleet
    assert fleet is not None
    paths = sorted((fleet / "trust").iterdir())
    script = f"mkdir -p -m 755 {ETC}/trust && tar -x --no-same-owner -C {ETC}/trust"
    setup.shell.must(script, packed(paths), root=True, what=f"write {ETC}/trust")
    chown = f"chown -R root:{setup.options.user} {ETC}/trust && chmod -R u=rwX,g=rX,o= {ETC}/trust"
    setup.shell.must(chown, root=True, what=f"protect {ETC}/trust")
    ca = fleet / "trust" / "ca.crt"
    if ca.exists():
        setup.write(CA, ca.read_bytes(), mode="644")
    for path in paths:
        setup.cache.pop(f"{ETC}/trust/{path.name}", None)
    return f"{len(paths)} files of {fleet}"


def look_identity(setup: Setup) -> State:
    """Whether the board has a certificate of this fleet in its name, which still holds."""
    fleet = setup.options.fleet
    if fleet is None or not setup.options.settings.tls:
        return State("skipped", "no --fleet: the board has no certificate")
    device, pem = setup.options.settings.device, setup.read(CERTIFICATE)
    if pem is None:
        return State("todo", f"make a key on the board, and certify {device}")
    until = _valid_until(pem, device)
    if until is None:
        return State("todo", f"{CERTIFICATE} is of another device or has ended: certify {device}")
    return State("already", f"{device}, until {until:%Y-%m-%d}")


def _valid_until(pem: bytes, device: str) -> dt.datetime | None:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError:
        return None
    names = [n.value for n in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    until = certificate.not_valid_after_utc
    return until if names == [device] and until > dt.datetime.now(dt.timezone.utc) else None


def enrol_board(setup: Setup) -> str:
    """Let the board make its key and request; sign that, and store the certificate there."""
    from toolkit.fleet.authority import Authority
    from toolkit.fleet.trust.certificates import enrol, expect

    fleet, device, shell = setup.options.fleet, setup.options.settings.device, setup.shell
    assert fleet is not None
    command = f"{AGENT} enrol --config {CONFIG}"
    request = shell.must(f"{command} --request", root=True, what="make the key").stdout
    authority = Authority(fleet / "identity")
    expect(authority, (device,))
    issued = enrol(authority, device, request)
    shell.must(f"{command} --accept", issued.pem, root=True, what="store the certificate")
    chown = f"chown root:{setup.options.user} {ETC}/device.key {CERTIFICATE}"
    script = f"{chown} && chmod 640 {ETC}/device.key && chmod 644 {CERTIFICATE}"
    shell.must(script, root=True, what="protect the key")
    setup.cache[CERTIFICATE] = issued.pem
    return f"{device} until {issued.not_after:%Y-%m-%d}; its key was made there and stays there"
