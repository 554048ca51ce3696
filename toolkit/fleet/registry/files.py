"""Files as one artifact of a registry: each is a layer, with its name as title."""

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from toolkit.errors import RegistryError
from toolkit.fleet.registry.client import RegistryClient
from toolkit.fleet.registry.manifest import (
    ANNOTATION,
    MANIFEST_TYPE,
    Descriptor,
    Manifest,
    describe_blob,
    digest_of,
)
from toolkit.fleet.registry.transfer import PART_SUFFIX, Download, again, send
from toolkit.progress import Progress

LOG = logging.getLogger(__name__)
FILES_TYPE = "application/vnd.tandem.cache.v1"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
TITLE = f"{ANNOTATION}title"
MAX_MANIFEST_BYTES = 4 * 1024**2  # that registries take
_LAYER_BYTES = 300  # of a manifest, about


class PushedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What was pushed: files and bytes that were sent, of those that are there now."""

    reference: str
    digest: str
    files: int
    sent_files: int
    sent_bytes: int


def files_in(client: RegistryClient) -> dict[str, Descriptor]:
    """Return the files of an artifact by their names, none if there is no such artifact.

    Raises RegistryError: it is something else.
    """
    reference = client.reference
    url, headers = client.url(f"manifests/{reference.digest_or_tag}"), {"Accept": MANIFEST_TYPE}
    answer = again(lambda: client.ask("GET", url, expect=(200, 404), headers=headers))
    if answer.status == 404:
        return {}
    if reference.digest not in ("", digest_of(answer.body)):
        raise RegistryError(f"{reference.host} gives another manifest than {reference}: pull again")
    try:
        manifest = msgspec.json.decode(answer.body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryError(f"the manifest of {reference} cannot be read: {error}") from error
    if manifest.artifact_type != FILES_TYPE:
        raise RegistryError(
            f"{reference} is no cache, but {manifest.artifact_type or manifest.media_type!r}: push "
            "one with `tandem cache push`"
        )
    return {layer.annotations.get(TITLE, ""): layer for layer in manifest.layers}


def push_files(client: RegistryClient, files: Mapping[str, Path], report: Progress) -> PushedFiles:
    """Push files, the most important first, beside those that are there under the tag.

    Raises RegistryError: the registry does not take them.
    """
    if not client.reference.tag:
        raise RegistryError(f"{client.reference} has no tag: write oci://HOST/NAME:TAG to push")
    present = files_in(client)
    layers: dict[str, Descriptor] = {}
    sent_files = sent_bytes = 0
    names = list(files)[: MAX_MANIFEST_BYTES // _LAYER_BYTES]
    for number, name in enumerate(names, 1):
        layer = present.get(name)
        if layer is None:
            try:
                data = files[name].read_bytes()
            except FileNotFoundError:
                LOG.warning("%s was removed meanwhile and is not pushed", files[name])
                continue
            layer = msgspec.structs.replace(
                describe_blob(FILES_TYPE, data), annotations={TITLE: name}
            )
            count = send(client, layer, data)
            sent_files, sent_bytes = sent_files + bool(count), sent_bytes + count
        layers[name] = layer
        report("push", number / len(names))
    rest = [name for name in present if name not in layers]
    for name in rest[: MAX_MANIFEST_BYTES // _LAYER_BYTES - len(layers)]:
        layers[name] = present[name]
    config = describe_blob(EMPTY_TYPE, b"{}")
    send(client, config, b"{}")
    manifest = msgspec.json.encode(
        Manifest(
            schema_version=2,
            media_type=MANIFEST_TYPE,
            artifact_type=FILES_TYPE,
            config=config,
            layers=tuple(layers[name] for name in sorted(layers)),
        )
    )
    url, headers = client.url(f"manifests/{client.reference.tag}"), {"Content-Type": MANIFEST_TYPE}
    again(lambda: client.ask("PUT", url, expect=(201,), headers=headers, body=manifest))
    return PushedFiles(
        reference=str(client.reference),
        digest=digest_of(manifest),
        files=len(layers),
        sent_files=sent_files,
        sent_bytes=sent_bytes,
    )


def pull_file(client: RegistryClient, layer: Descriptor, path: Path) -> None:
    """Fetch a file, whole or not at all. Raises RegistryError, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another pull may write the same file.
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PART_SUFFIX}")
    try:
        with part.open("a+b") as file:
            Download(client, layer, file, 0, lambda share: None).run()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
