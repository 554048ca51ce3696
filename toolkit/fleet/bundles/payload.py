"""Pack a bundle of a service: the files of another runtime, as they are."""

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from device.errors import BundleError
from device.profile import load_profile
from device.update.bundle import BundleFacts, BundleInfo, write_bundle_of_service
from device.update.members import MAX_BUNDLE_BYTES, PAYLOAD
from pipelines.config import load_pipeline
from toolkit.fleet.bundles.create import bom_writer


def pack_service(
    output: Path,
    *,
    pipeline: Path,
    payload: Path,
    profile: str,
    name: str | None,
    version: str,
    facts: BundleFacts | None = None,
) -> BundleInfo:
    """Write the bundle of a pipeline of kind "service".

    `payload`: the folder with its files; links become what they lead to. `name` None: the
    pipeline's. The same inputs give the same bytes. Raises TandemError before anything is written:
    a file cannot be packed, or the program is not there.
    """
    config = load_pipeline(pipeline)
    if not config.service:
        raise BundleError(f'{pipeline} is of kind {config.kind!r}: --payload is for kind "service"')
    board = load_profile(profile).name
    try:
        files = dict(sorted(_files(payload)))
        modes = {member: path.stat() for member, path in files.items()}
    except OSError as error:
        raise BundleError(f"cannot read {payload}: {error.strerror}") from error
    programs = tuple(member for member, status in modes.items() if status.st_mode & stat.S_IXUSR)
    for program in config.service.programs:
        if f"{PAYLOAD}/{program}" not in programs:
            lacks = "is no executable file" if (payload / program).exists() else "is not there"
            raise BundleError(
                f"{pipeline} runs {program!r}, which {lacks} in the payload {payload}: add it, or"
                " name a program of the board by its absolute path"
            )
    if (size := sum(status.st_size for status in modes.values())) > MAX_BUNDLE_BYTES:
        raise BundleError(
            f"{payload} has {size} bytes, a device fetches {MAX_BUNDLE_BYTES} at most: bring larger"
            " models to the board another way, and name them by their absolute path in [service]"
        )
    with ExitStack() as stack:
        return write_bundle_of_service(
            output, payload=files, executables=programs, pipeline=pipeline,
            name=name or config.name, version=version, profile=board, facts=facts,
            bom=bom_writer(output, stack, {}),
        )  # fmt: skip


def _files(payload: Path) -> Iterator[tuple[str, Path]]:
    """Yield member and path of each file. Raises OSError; BundleError: something is neither a file
    nor a folder of the payload's own."""
    for folder, folders, names in os.walk(payload, onerror=_raise):
        place = Path(folder)
        for name in (*folders, *names):
            path = place / name
            if not path.is_file() and (name in names or path.is_symlink()):
                raise BundleError(
                    f"{path} is no file: a payload holds files and folders, and links to files"
                )
        for name in names:
            yield f"{PAYLOAD}/{(place / name).relative_to(payload).as_posix()}", place / name


def _raise(error: OSError) -> None:
    raise error
