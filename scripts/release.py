"""Build the source archive and the wheel of the last commit; the same commit gives the same bytes.

    python -m scripts.release [--out dist]

Files that are not committed are left out. Times are the commit's, modes are 644 and 755, owners are
nobody in particular. SHA256SUMS lists what was built.
"""

import argparse
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Build the wheel and the source archive of the last commit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR")
    out = parser.parse_args().out
    for path in build(ROOT, out):
        sys.stdout.write(f"{path}\n")


def build(repository: Path, out: Path) -> list[Path]:
    """Build the last commit of a repository into a folder; return the files."""
    epoch = int(_git(repository, "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="tandem-release-") as name:
        tree, built = Path(name) / "tree", Path(name) / "dist"
        with tarfile.open(fileobj=io.BytesIO(_git(repository, "archive", "HEAD"))) as archive:
            archive.extractall(tree, filter="data")
        command = [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            str(built),
            str(tree),
        ]
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
        subprocess.run(
            command, check=True, cwd=name, env=environment, umask=0o022, stdout=subprocess.DEVNULL
        )
        out.mkdir(parents=True, exist_ok=True)
        paths = []
        for path in sorted(built.iterdir()):
            data = path.read_bytes()
            paths.append(out / path.name)
            paths[-1].write_bytes(normalized(data, epoch) if path.suffix == ".gz" else data)
    sums = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in paths)
    (out / "SHA256SUMS").write_text(sums)
    return [*paths, out / "SHA256SUMS"]


def _git(repository: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(repository), "-c", "tar.umask=022", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def normalized(data: bytes, epoch: int) -> bytes:
    """Return a .tar.gz with its members in order, of one time, owner and kind of mode."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as source,
        gzip.GzipFile("", "wb", fileobj=packed, mtime=epoch) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime, member.pax_headers = epoch, {}
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


if __name__ == "__main__":
    main()
