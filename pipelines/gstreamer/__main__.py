"""`eval "$(python -m pipelines.gstreamer)"` lets GStreamer find the element, and it this Python."""

import os
import shlex
import sys
from pathlib import Path


def main() -> None:
    """Print the two variables for a shell."""
    folders = [str(Path(__file__).parent), os.environ.get("GST_PLUGIN_PATH", "")]
    path = os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))
    print(f"export GST_PLUGIN_PATH={shlex.quote(path)}")
    print(f"export TANDEM_PYTHON={shlex.quote(sys.executable)}")


if __name__ == "__main__":
    main()
