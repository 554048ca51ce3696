"""Signs with the device's own key, that of its certificate, by the OpenSSL that Python's TLS uses.

The package cryptography would cost the agent 9 MB of memory for this alone. What is signed here is
verified by securesystemslib: ECDSA on P-256 with SHA-256, DER in hexadecimal.
"""

import base64
import contextlib
import ctypes
import hashlib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_void_p
from functools import cache
from pathlib import Path

from device.errors import TrustError
from device.protocol.documents import Signature, Signed, encode

_MAX_KEY_BYTES = 64 * 1024
_MAX_SIGNATURE_BYTES = 256  # of P-256: 72
_P256 = "prime256v1"
SCHEME = "ecdsa-sha2-nistp256"
_MAPS = Path("/proc/self/maps")
# Function -> (result, arguments).
_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "BIO_new_mem_buf": (c_void_p, (c_char_p, c_int)),
    "BIO_free": (c_int, (c_void_p,)),
    "PEM_read_bio_PrivateKey": (c_void_p, (c_void_p, c_void_p, c_void_p, c_char_p)),
    "EVP_PKEY_free": (None, (c_void_p,)),
    "EVP_PKEY_get_group_name": (c_int, (c_void_p, c_char_p, c_size_t, c_void_p)),
    "i2d_PUBKEY": (c_int, (c_void_p, c_void_p)),
    "EVP_MD_CTX_new": (c_void_p, ()),
    "EVP_MD_CTX_free": (None, (c_void_p,)),
    "EVP_sha256": (c_void_p, ()),
    "EVP_DigestSignInit": (c_int, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "EVP_DigestSign": (c_int, (c_void_p, c_void_p, c_void_p, c_char_p, c_size_t)),
    "ERR_clear_error": (None, ()),
}


class DeviceKey:
    """A private key, read once. One thread at a time uses it."""

    def __init__(self, path: Path) -> None:
        """Read a key in PEM, on the curve P-256. Raises TrustError."""
        self._crypto = _libcrypto()
        try:
            pem = path.read_bytes()[:_MAX_KEY_BYTES]
        except OSError as error:
            raise TrustError(f"the device's key {path} cannot be read: {error.strerror}") from error
        self._key = self._read(pem, path)
        self.keyid = keyid_of(self._public_der())

    def __del__(self) -> None:
        """Free the key."""
        if getattr(self, "_key", None):
            self._crypto.EVP_PKEY_free(self._key)

    def sign(self, text: str) -> Signed:
        """Sign a document's JSON text. Raises TrustError."""
        data = text.encode()
        size = c_size_t(_MAX_SIGNATURE_BYTES)
        signature = (c_ubyte * _MAX_SIGNATURE_BYTES)()
        crypto = self._crypto
        with self._context() as context:
            ready = crypto.EVP_DigestSignInit(context, None, crypto.EVP_sha256(), None, self._key)
            if ready != 1 or (
                crypto.EVP_DigestSign(context, signature, byref(size), data, len(data)) != 1
            ):
                crypto.ERR_clear_error()  # it is this thread's, and TLS would find it
                raise TrustError("OpenSSL does not sign with the device's key")
        value = bytes(signature[: size.value]).hex()
        return Signed(payload=text, signatures=(Signature(keyid=self.keyid, sig=value),))

    @contextmanager
    def _context(self) -> Iterator[int]:
        context = self._crypto.EVP_MD_CTX_new()
        try:
            yield context
        finally:
            self._crypto.EVP_MD_CTX_free(context)

    def _read(self, pem: bytes, path: Path) -> int:
        crypto = self._crypto
        source = crypto.BIO_new_mem_buf(pem, len(pem))
        try:
            # The last argument is the passphrase: with none given OpenSSL would ask the terminal.
            key: int | None = crypto.PEM_read_bio_PrivateKey(source, None, None, b"")
        finally:
            crypto.BIO_free(source)
        name = ctypes.create_string_buffer(64)
        known = key and crypto.EVP_PKEY_get_group_name(key, name, len(name), None) == 1
        crypto.ERR_clear_error()
        if key is None or not known or name.value.decode() != _P256:
            if key:
                crypto.EVP_PKEY_free(key)
            raise TrustError(f"the device's key {path} is encrypted, or not on the curve P-256")
        return key

    def _public_der(self) -> bytes:
        """Return the public key as SubjectPublicKeyInfo."""
        size = self._crypto.i2d_PUBKEY(self._key, None)
        buffer = (c_ubyte * size)()
        place = ctypes.cast(buffer, c_void_p)
        self._crypto.i2d_PUBKEY(self._key, byref(place))
        return bytes(buffer)


class ReportSigner:
    """Signs what the device reports, with the key as it is on the disk now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: DeviceKey | None = None
        self._seen: tuple[int, int, int] | None = None
        self.problem = ""

    def sign(self, payload: bytes) -> bytes:
        """Return a document with its signature; as it is, with `problem`, if none can be made."""
        try:
            return encode(self._current().sign(payload.decode()))
        except TrustError as error:
            self.problem = f"reports are not signed: {error}"
            return payload

    def _current(self) -> DeviceKey:
        """Return the key; one that was written anew is read again. Raises TrustError."""
        seen = None
        with contextlib.suppress(OSError):
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if self._key is None or seen != self._seen:
            self._key, self._seen = DeviceKey(self._path), seen
            self.problem = ""
        return self._key


def keyid_of(public_der: bytes) -> str:
    """Return the id of a public key, as securesystemslib makes it: the SHA-256 of its canonical
    JSON."""
    text = base64.encodebytes(public_der).replace(b"\n", b"").decode()
    rows = "\n".join(text[start : start + 64] for start in range(0, len(text), 64))
    return keyid_of_pem(f"-----BEGIN PUBLIC KEY-----\n{rows}\n-----END PUBLIC KEY-----\n")


def keyid_of_pem(public: str) -> str:
    """Return the id of a public key in PEM, as `keyid_of`."""
    canonical = f'{{"keytype":"ecdsa","keyval":{{"public":"{public}"}},"scheme":"{SCHEME}"}}'
    return hashlib.sha256(canonical.encode()).hexdigest()


@cache
def _libcrypto() -> ctypes.CDLL:
    """Return the OpenSSL that is loaded already. Raises TrustError: none of version 3 is found."""
    name = _loaded() or "libcrypto.so.3"
    try:
        library = ctypes.CDLL(name)
        for function, (result, arguments) in _FUNCTIONS.items():
            row = getattr(library, function)
            row.restype, row.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise TrustError(f"{ssl.OPENSSL_VERSION} cannot be used to sign: {error}") from error
    return library


def _loaded() -> str:
    with contextlib.suppress(OSError):
        for line in _MAPS.read_text().splitlines():
            path = line.split()[-1]
            if "/libcrypto.so" in path:
                return path
    return ""
