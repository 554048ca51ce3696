"""The configurations that commands of the documents name, in a folder."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def link_configs(folder: Path, pictures: int) -> None:
    """Make a folder `configs` as the repository has it, but for fewer calibration pictures."""
    scenes, calibration = folder / "configs/scenes", folder / "configs/scenes/calibration"
    calibration.mkdir(parents=True)
    linked = [*(ROOT / "configs").iterdir(), *(ROOT / "configs/scenes").iterdir()]
    linked += sorted((ROOT / "configs/scenes/calibration").iterdir())[:pictures]
    for path in linked:
        if path not in (ROOT / "configs/scenes", ROOT / "configs/scenes/calibration"):
            (folder / path.relative_to(ROOT)).symlink_to(path)
    assert {path.name for path in scenes.iterdir()} == {
        path.name for path in (ROOT / "configs/scenes").iterdir()
    }
