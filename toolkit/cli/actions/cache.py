"""The cache on this machine, and as an artifact of a registry."""

import re

import click

from toolkit.cache import KINDS, cache_folder, entries, entry_path
from toolkit.cache import trim as trim_cache
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.actions.registry import open_registry
from toolkit.cli.commands.cache import Info, Pull, Push, Trim
from toolkit.cli.progress import progress_bar
from toolkit.errors import RegistryError
from toolkit.fleet.registry.files import files_in, pull_file, push_files

_NAME = re.compile(rf"({'|'.join(KINDS)})/([0-9a-f]{{64}})")


def info(options: Info) -> None:
    """Print where the cache is, and how much it holds of each kind."""
    sizes: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for entry in entries():
        sizes[entry.kind].append(entry.bytes)
    total = sum(map(sum, sizes.values()))
    lines = [
        f"{len(rows):7} {sum(rows) / 1e6:10.1f} MB  {kind}: {KINDS[kind]}"
        for kind, rows in sizes.items()
    ]
    document = {
        "folder": str(cache_folder()),
        "bytes": total,
        "kinds": {kind: {"entries": len(r), "bytes": sum(r)} for kind, r in sizes.items()},
    }
    text = "\n".join([str(cache_folder()), *lines, f"{total / 1e6:18.1f} MB  in all"])
    print_result(document, text, as_json=options.as_json)


def trim(options: Trim) -> None:
    """Remove what was used longest ago."""
    count, removed = trim_cache(options.to)
    text = f"removed {count} entries, {removed / 1e6:.1f} MB"
    print_result({"entries": count, "bytes": removed}, text, as_json=options.as_json)


def push(options: Push) -> None:
    """Push the entries, those used last first. Raises RegistryError."""
    with open_registry(options.reference, options.registry) as client, progress_bar("cache") as say:
        files = {f"{entry.kind}/{entry.key}": entry.path for entry in entries()}
        if not files:
            raise click.UsageError(f"{cache_folder()} holds nothing to push.")
        pushed = push_files(client, dict(reversed(files.items())), say)
    text = (
        f"pushed {pushed.reference}\n{pushed.digest}\n"
        f"sent {pushed.sent_files} of {pushed.files} entries, {pushed.sent_bytes / 1e6:.1f} MB"
    )
    print_result(pushed, text, as_json=options.as_json)


def pull(options: Pull) -> None:
    """Pull the entries that are not here. Raises RegistryError."""
    count = pulled = 0
    with open_registry(options.reference, options.registry) as client, progress_bar("cache") as say:
        layers = files_in(client)
        if not layers:
            raise RegistryError(f"{options.reference} holds no cache: check its name")
        for number, (name, layer) in enumerate(layers.items(), 1):
            match = _NAME.fullmatch(name)
            if match is None:
                raise RegistryError(f"{options.reference} holds {name!r}, which is no cache entry")
            path = entry_path(match[1], match[2])
            if not path.exists():
                try:
                    pull_file(client, layer, path)
                except OSError as error:
                    raise RegistryError(f"{path} cannot be written: {error.strerror}") from error
                count, pulled = count + 1, pulled + layer.size
            say("pull", number / len(layers))
    text = f"pulled {count} of {len(layers)} entries, {pulled / 1e6:.1f} MB"
    document = {"entries": len(layers), "pulled": count, "bytes": pulled}
    print_result(document, text, as_json=options.as_json)
