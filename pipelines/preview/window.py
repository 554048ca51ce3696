"""A window with the annotated pictures of all cameras, where this machine has a screen."""

import os
import socket
import threading
from contextlib import AbstractContextManager

from device.errors import PipelineError
from device.protocol.messages import ChildMessage
from pipelines.sinks.draw_result import draw_result
from pipelines.sinks.result import FrameResult
from pipelines.vision import cv2

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
X_PORT = 6000  # of display 0
CONNECT_S = 3.0
CLOSE_KEYS = (ord("q"), 27)  # 27: Escape
_TITLE = "Tandem"


class Window(AbstractContextManager["Window"]):
    """Shows results as they come; closing a window, `q` or Escape ends the pipeline.

    OpenCV's windows belong to one thread: make and use it in the one that runs the pipeline.
    """

    def __init__(self, stop: threading.Event) -> None:
        """Raises PipelineError: there is no screen, or OpenCV has no windows."""
        if not any(os.environ.get(name) for name in DISPLAYS):
            raise PipelineError(
                "there is no screen for `tandem run --window`: neither DISPLAY nor WAYLAND_DISPLAY"
                " is set; use --preview :8090 and a browser, or --save seen.mp4."
            )
        display = os.environ.get("DISPLAY", "")
        if display and not os.environ.get("WAYLAND_DISPLAY") and not _answers(display):
            raise PipelineError(
                f"no screen answers at DISPLAY={display} for `tandem run --window`: set it to that"
                " of a desktop, or use --preview :8090 and a browser."
            )
        backend = _backend()
        if backend == "NONE":
            raise PipelineError(
                "OpenCV has no windows here (opencv-python-headless): `pip uninstall"
                " opencv-python-headless` and `pip install opencv-python` on a desktop, or use"
                " `tandem run --preview :8090` and a browser."
            )
        self._stop = stop
        self._open: set[str] = set()

    def __exit__(self, *_: object) -> None:
        """Close all windows."""
        cv2.destroyAllWindows()

    def on_message(self, message: ChildMessage) -> None:
        """Figures are not shown."""

    def on_result(self, result: FrameResult) -> None:
        """Show a frame with what was found in it."""
        title = f"{_TITLE} {result.frame.camera}".strip()
        if title in self._open and cv2.getWindowProperty(title, cv2.WND_PROP_VISIBLE) < 1:
            self._stop.set()  # somebody closed it
            return
        image = draw_result(result)
        try:
            cv2.imshow(title, image)
        except cv2.error as error:
            raise PipelineError(
                f"the screen cannot show a window ({' '.join(str(error).split())[:200]}): check"
                " DISPLAY, or leave out `tandem run --window`."
            ) from error
        self._open.add(title)
        if cv2.waitKey(1) & 0xFF in CLOSE_KEYS:
            self._stop.set()


def _answers(display: str) -> bool:
    """Whether an X server is there: OpenCV's windows end the process where none is."""
    host, _, screen = display.rpartition(":")
    number = screen.partition(".")[0]
    if not number.isdigit():
        return True  # in a form that only the X library knows
    if host not in ("", "unix"):
        try:
            socket.create_connection((host, X_PORT + int(number)), CONNECT_S).close()
        except OSError:
            return False
        return True
    for name in (f"/tmp/.X11-unix/X{number}", f"\0/tmp/.X11-unix/X{number}"):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(name) == 0:
                return True
    return False


def _backend() -> str:
    """Return what OpenCV was built with for windows, "NONE" for nothing."""
    for line in cv2.getBuildInformation().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "GUI":
            return value.strip().upper()
    return "NONE"
