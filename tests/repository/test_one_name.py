"""setup.py moves the packages of a checkout below one name in the wheel."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"device.agent", "device.runtime", "toolkit.cli", "pipelines.golden"}


@pytest.fixture(scope="module")
def one_name() -> ModuleType:
    spec = spec_from_file_location("one_name", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (" from device import agent", " from tandem.device import agent"),
        (" from device.agent.runs import x", " from tandem.device.agent.runs import x"),
        (" import device.agent as a", " import tandem.device.agent as a"),
        (" import configs", " from tandem import configs"),
        (" import configs  # data", " from tandem import configs  # data"),
        (" from devices import x", " from devices import x"),
        (" from .device import x", " from .device import x"),
        ("    from device to host", "    from device to host"),
        (" device.agent = 1", " device.agent = 1"),
        (" x = 'device.agent'", " x = 'tandem.device.agent'"),
        (" x = ['-m', \"toolkit.cli.main:run\"]", " x = ['-m', \"tandem.toolkit.cli.main:run\"]"),
        (" x = 'device.key'", " x = 'device.key'"),
        (" x = 'my.device.agent ./device.agent'", " x = 'my.device.agent ./device.agent'"),
        (" x = 'device'", " x = 'device'"),
        (" x = f'toolkit.cli.{device.agent}'", " x = f'tandem.toolkit.cli.{device.agent}'"),
        (" x = '''\nsee\ndevice.agent'''; y = 'ä device.agent'",
         " x = '''\nsee\ntandem.device.agent'''; y = 'ä tandem.device.agent'"),
    ],
)  # fmt: skip
def test_what_names_a_package_names_it_below_tandem(
    one_name: ModuleType, tmp_path: Path, before: str, after: str
) -> None:
    file, quotes = tmp_path / "m.py", '"""' if " to " in before else ""
    file.write_text(f"if 1:\n {quotes}\n{before}\n{quotes}\n")
    one_name.rewrite([file], MODULES)
    assert file.read_text() == f"if 1:\n {quotes}\n{after}\n{quotes}\n"


def test_an_import_that_binds_the_top_name_is_refused(one_name: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import os\nimport device.agent\n")
    with pytest.raises(ValueError, match=r"m\.py:2: `import device\.agent` cannot be moved"):
        one_name.rewrite([tmp_path / "m.py"], MODULES)


def test_a_second_build_in_the_same_folder_gives_the_same(
    one_name: ModuleType, tmp_path: Path
) -> None:
    def build() -> dict[str, str]:
        for name in one_name.PACKAGES:
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("from device import errors\n")
        (tmp_path / "tandem.py").write_text("x = 'device.errors'\n")
        (tmp_path / "device/errors.py").write_text("")
        one_name.move_packages(tmp_path)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {str(path.relative_to(tmp_path)): path.read_text() for path in files}

    first = build()
    assert first["tandem/__init__.py"] == "x = 'tandem.device.errors'\n"
    assert first["tandem/device/__init__.py"] == "from tandem.device import errors\n"
    assert build() == first
