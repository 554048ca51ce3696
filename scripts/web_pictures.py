"""Draw the pictures of docs with Chromium: the page of a plan, and the page of a made-up fleet.

python -m scripts.web_pictures docs
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from scripts.bench_fleet_viewers import PASSWORD
from scripts.bench_fleet_web import fill
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.store import lease
from toolkit.fleet.store.accounts import add_account
from toolkit.fleet.store.database import Database
from toolkit.fleet.web.access import TrustedProxy
from toolkit.fleet.web.app import Site, SiteSettings

HEADER = "x-user"
SIZE = "1100,1000"
# Picture -> the page that it shows.
PICTURES = {"fleet_web.png": "/"}
PLAN_PICTURE = "plan_page.png"
PLAN_SIZE = "1100,860"
PLAN = ("configs/models/robot-objects.onnx", "--profile", "orin-nx-16gb")
ROOT = Path(__file__).parents[1]


def signed_in(app: ASGIApp) -> ASGIApp:
    """Return an application whose every request comes from one who has signed in."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["headers"] = [*scope["headers"], (HEADER.encode(), b"anna")]
        await app(scope, receive, send)

    return application


def _fill_day(database: Database, devices: int) -> None:
    """Note how many devices were heard over the last day: a site was without power for an hour."""
    now_s = int(database.now_s())
    with database.write():
        for minutes in range(1440):
            silent = devices // 5 if 800 < minutes < 860 else devices // 100
            counts = msgspec.json.encode({"online": devices - silent, "silent": silent}).decode()
            at_s = now_s - 60 * (1440 - minutes)
            database.run("INSERT INTO presence VALUES (?, ?)", at_s, counts)


def _capture(url: str, size: str, picture: Path, user_data: Path) -> None:
    """Write a PNG of a page, `size` "width,height" in pixels."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is missing: apt-get install chromium")
    subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--hide-scrollbars",
         f"--user-data-dir={user_data}", f"--window-size={size}",
         f"--screenshot={picture.resolve()}", "--timeout=3000", url],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def draw_plan(folder: Path) -> None:
    """Write the picture of the page that `tandem plan --html` writes."""
    with tempfile.TemporaryDirectory(prefix="tandem-pictures-") as place:
        page = Path(place) / "plan.html"
        subprocess.run(
            [sys.executable, "-m", "toolkit.cli", "plan", *PLAN, "--html", str(page)],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        _capture(page.as_uri(), PLAN_SIZE, folder / PLAN_PICTURE, Path(place) / "chromium")


def draw(folder: Path, devices: int) -> None:
    """Write each picture of the fleet's page into a folder."""
    with tempfile.TemporaryDirectory(prefix="tandem-pictures-") as place:
        (Path(place) / "fleet.toml").write_text('name = "harbour"\n[broker]\ntls = false\n')
        fleet = load_fleet(Path(place))
        database = fleet.open_store()
        fill(database, devices)
        add_account(database, "anna", "approver", PASSWORD)
        lease.acquire(database, "a server")
        _fill_day(database, devices)
        database.close()
        proxy = TrustedProxy(HEADER, frozenset({"127.0.0.1"}))
        site = Site(fleet, SiteSettings(proxy=proxy))
        config = uvicorn.Config(
            signed_in(site.application()), port=0, log_level="warning", timeout_graceful_shutdown=5
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.05)
            port = server.servers[0].sockets[0].getsockname()[1]
            for name, path in PICTURES.items():
                url = f"http://127.0.0.1:{port}{path}"
                _capture(url, SIZE, folder / name, Path(place) / "chromium")
        finally:
            site.end()  # the server waits for streams
            server.should_exit = True
            thread.join()


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=500)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    draw_plan(options.folder)
    draw(options.folder, options.devices)


if __name__ == "__main__":
    main()
