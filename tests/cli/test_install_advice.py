"""What is missing is installed from where Tandem came from: pip itself takes the advice."""

import shlex
import subprocess
import sys

import pytest

from device.install_advice import CHECKOUT, pip_install, source_of

DIRECTORY = {"url": "file:///home/me/my%20tandem", "dir_info": {}}


@pytest.mark.parametrize(
    ("record", "source"),
    [
        ({}, "'tandem-edge[host]'"),  # an index
        (DIRECTORY, "'/home/me/my tandem[host]'"),
        (DIRECTORY | {"dir_info": {"editable": True}}, "-e '/home/me/my tandem[host]'"),
        ({"url": "file:///w/tandem_edge-1.0-py3-none-any.whl", "archive_info": {}},
         "'/w/tandem_edge-1.0-py3-none-any.whl[host]'"),
        ({"url": "https://a.example/tandem_edge-1.0-py3-none-any.whl", "archive_info": {}},
         "'tandem-edge[host] @ https://a.example/tandem_edge-1.0-py3-none-any.whl'"),
        ({"url": "https://a.example/t.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
         "'tandem-edge[host] @ git+https://a.example/t.git@abc'"),
    ],
)  # fmt: skip
def test_the_source_of_an_installation_is_what_pip_recorded(record, source):
    assert source_of(record, "host") == source


def test_a_checkout_names_itself():
    assert pip_install("gpu-build") == f"pip install -e '{CHECKOUT}[gpu-build]'"


@pytest.mark.slow
def test_a_wheel_s_file_is_named_and_pip_takes_the_advice(tmp_path):
    """A tiny wheel of the same name, installed from its file; then its extra, by the advice."""
    sources = tmp_path / "src"
    (sources / "device").mkdir(parents=True)
    for name in ("__init__.py", "install_advice.py"):
        (sources / "device" / name).write_text((CHECKOUT / "device" / name).read_text())
    (sources / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "tandem-edge"\nversion = "0.1"\n'
        '[project.optional-dependencies]\nhost = ["no-such-distribution-for-tandem==1"]\n'
        '[tool.setuptools]\npackages = ["device"]\n'
    )
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-build-isolation"]
    wheels, site = tmp_path / "my wheels", tmp_path / "site"
    run(*pip, "wheel", *offline, "--no-deps", "-w", wheels, sources)
    (wheel,) = wheels.glob("*.whl")
    run(*pip, "install", *offline, "--no-deps", "--target", site, wheel)
    code = f"import sys; sys.path[:0] = [{str(site)!r}]\n"
    code += "from device.install_advice import pip_install; print(pip_install('host'))"
    output = run(sys.executable, "-S", "-c", code, cwd=tmp_path)
    assert output == f"pip install '{wheel}[host]'\n"
    advice = shlex.split(output)[2:]
    plan = subprocess.run(
        [*pip, "install", *offline, "--dry-run", *advice],
        check=False,
        capture_output=True,
        text=True,
    )
    assert "no-such-distribution-for-tandem==1" in plan.stderr  # the extra of that wheel was read


def run(*command, cwd=None):
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
