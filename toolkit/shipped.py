"""The files of the demo: in a checkout, and in the package tandem-edge-demo (scripts/demo_data)."""

from pathlib import Path

import configs
from toolkit.errors import DemoDataError


def demo_file(path: str) -> Path:
    """Return a file or folder below `configs`. Raises DemoDataError: it is not installed."""
    file = configs.ROOT / path
    if not file.exists():
        raise DemoDataError(
            f"{file} is not installed: the detector and the pictures of the demo are the package "
            "tandem-edge-demo; install it with `pip install ./scripts/demo_data` in a checkout of "
            "Tandem, or run there."
        )
    return file
