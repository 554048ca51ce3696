"""How long a selftest takes: `python -m scripts.kit_budget --profile orin-nx-16gb`.

Makes a kit without GPU kernels (compiling them takes most of the time of a kit, and no GPU is here
to run them), then runs the selftest with it as a board does, on the doubles of TensorRT and of the
driver that the tests have. Plans take as long as public logs of Jetsons say: `--times BASE NODE
MOST`, in seconds. Steps and what they left out are printed. docs/board_kit.md has the figures.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import msgspec

from device.errors import TandemError
from device.selftest import __main__ as selftest
from device.selftest.kit import DATA, LIST, load_kit
from device.selftest.steps import MINUTES
from scripts import make_board_kit

ROOT = Path(__file__).parents[1]
VERSION = "10.3.0"
# A loadable of one layer takes seconds; ResNet-50 (122 nodes) half a minute; none of the kit's
# networks more than a minute (trtexec logs in issues of NVIDIA/TensorRT and dusty-nv/
# jetson-inference: "Engine generation completed in").
TIMES = ("3", "0.25", "60")


def main(argv: Sequence[str] | None = None) -> int:
    """Make a kit, or take one, and run it; the exit status is that of the selftest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="orin-nx-16gb")
    parser.add_argument("--kit", type=Path, help="a kit that is there [default: make one]")
    parser.add_argument("--out", type=Path, default=Path("budget.tandem-report"))
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument(
        "--rules", choices=("all", "expected"), default="expected",
        help="expected: those cases alone that the table lets onto the DLA; a DLA that agrees "
        "refuses the others at once, the double builds them [default: expected]",
    )  # fmt: skip
    parser.add_argument("--times", nargs=3, default=TIMES, metavar=("BASE", "NODE", "MOST"))
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        kit = arguments.kit or Path(name) / "kit"
        if arguments.kit is None and (status := _make_kit(arguments.profile, kit)):
            return status
        if arguments.rules == "expected":
            kit = _expected(kit, Path(name) / "expected")
        environment = double(Path(name), VERSION) | {
            "TENSORRT_DOUBLE_TIMES": " ".join(arguments.times)
        }
        words = ["selftest", "--kit", str(kit), "--out", str(arguments.out)]
        words += ["--minutes", str(arguments.minutes)]
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(sys, "argv", words),
            mock.patch("device.selftest.runner.module_command", _child_command),
        ):
            return selftest.main()


def _expected(kit: Path, folder: Path) -> Path:
    """Return a kit without the cases that the table refuses; the data are those of `kit`."""
    listed = load_kit(kit)
    rules = tuple(case for case in listed.rules if case.expected)
    folder.mkdir()
    (folder / DATA).symlink_to((kit / DATA).resolve())
    (folder / LIST).write_bytes(msgspec.json.encode(msgspec.structs.replace(listed, rules=rules)))
    return folder


def _child_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a step's process that has the double of the driver."""
    code = "import sys, cuda_double; from device.selftest.child import main\n"
    code += "with cuda_double.installed(): sys.exit(main(sys.argv))"
    return (sys.executable, "-c", code, *arguments)


def _make_kit(profile: str, kit: Path) -> int:
    words = ["make_board_kit", "--profile", profile, "--out", str(kit)]
    with (
        mock.patch("toolkit.gpu.segments.has_compiler", return_value=False),
        mock.patch.object(sys, "argv", words),
    ):
        try:
            return make_board_kit.main()
        except TandemError as error:
            sys.stderr.write(f"error: {error}\n")
            return error.exit_status


def double(folder: Path, version: str) -> dict[str, str]:
    """Return an environment in which `import tensorrt` gives the tests' double of a version."""
    site = folder / "site"
    (site / f"tensorrt-{version}.dist-info").mkdir(parents=True)
    (site / "tensorrt").symlink_to(ROOT / "tests/fixtures/tensorrt_double/tensorrt")
    (site / f"tensorrt-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {version}\n"
    )
    paths = [
        str(site),
        str(ROOT),
        str(ROOT / "tests/fixtures"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TENSORRT_DOUBLE_VERSION": version,
        "TENSORRT_DOUBLE_API": str(ROOT / f"tests/data/tensorrt_api/{version}.json"),
    }


if __name__ == "__main__":
    sys.exit(main())
