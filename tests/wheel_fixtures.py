"""A wheel with nothing in it."""

import zipfile
from pathlib import Path


def empty_wheel(folder: Path, name: str, version: str, tag: str, *requires: str) -> None:
    """A wheel of nothing, for pip to find."""

    info = f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Requires-Dist: {row}" for row in requires]
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
