"""Trials on a real camera: one that is away is not the release's fault."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from board_fixtures import PATIENCE_S, colour_bundle
from deploy_fixtures import deploy
from mqtt_fixtures import AgentBox, Mosquitto
from video_fixtures import RtspServer, rtsp_server

from toolkit.fleet.transports.deploy import DeployOptions
from toolkit.fleet.transports.device_deployment import DeployProgress

pytestmark = pytest.mark.slow


@pytest.fixture
def camera() -> Iterator[RtspServer]:
    with rtsp_server() as server:
        yield server


def test_release_that_is_deployed_while_the_camera_is_away_is_live_once_it_is_back(
    tmp_path: Path, camera: RtspServer
) -> None:
    broker = Mosquitto(tmp_path)
    box = AgentBox(
        tmp_path,
        broker.port,
        profile="laptop",
        source=camera.url,  # type: ignore[arg-type]
        trial_timeout_s=4.0,
        confirm_after_s=1.0,
    )
    first, second = (colour_bundle(tmp_path / "release", version=v) for v in ("1", "2"))
    phases: list[str] = []

    def switch_on(progress: DeployProgress) -> None:
        if progress.phase == "postponed" and "postponed" not in phases:
            camera.start()
        phases.append(progress.phase)

    try:
        camera.kill()  # it is absent at boot
        box.start()
        for bundle in (first, second):
            result = deploy(broker.port, bundle, DeployOptions(PATIENCE_S), on_progress=switch_on)
            assert result.live, (result, box.log())
            assert "postponed" in phases
            phases.clear()
            camera.kill()  # and when the second release comes
    finally:
        box.close()
        broker.close()
