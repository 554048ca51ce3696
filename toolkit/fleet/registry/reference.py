"""oci://HOST[:PORT]/NAME[:TAG][@sha256:DIGEST], as registries name what they hold."""

import re
from dataclasses import dataclass, replace

from toolkit.errors import RegistryError

SCHEME = "oci://"
DEFAULT_TAG = "latest"
_REFERENCE = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?/"
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?\Z"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """What is named: `name` is the repository; of `tag` and `digest` one may be empty."""

    host: str
    name: str
    tag: str = ""
    digest: str = ""

    @property
    def digest_or_tag(self) -> str:
        """What is asked for: the digest, which no one can move, before the tag."""
        return self.digest or self.tag

    def at(self, digest: str) -> "Reference":
        """Return the same by its digest alone."""
        return replace(self, tag="", digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{SCHEME}{self.host}/{self.name}{tag}{digest}"


def parse_reference(text: str) -> Reference:
    """Return the reference in a text. Raises RegistryError."""
    match = _REFERENCE.match(text)
    port = int(match["port"]) if match is not None and match["port"] else 443
    if match is None or not 0 < port < 65536:
        raise RegistryError(
            f"{text!r} names nothing in a registry: write oci://HOST/NAME:TAG or "
            "oci://HOST/NAME@sha256:DIGEST, NAME in lower case"
        )
    host = match["host"] + (f":{match['port']}" if match["port"] else "")
    digest = match["digest"] or ""
    tag = match["tag"] or ("" if digest else DEFAULT_TAG)
    return Reference(host, match["name"], tag, digest)
