"""agent.toml: wrong and unknown keys are named, secrets are not."""

import subprocess
import sys
from pathlib import Path

import pytest
from mqtt_fixtures import PROFILE, write_profile

import configs
from device.agent.config import load_agent_config, tls_files
from device.errors import ConfigError
from device.protocol.tls import TlsFiles

PLAIN = 'device = "b-1"\nprofile = "laptop"\nstate_dir = "s"\n[broker]\nhost = "h"\n'
MINIMAL = PLAIN.replace("[broker]", '[broker]\ntls = {ca = "ca.crt"}')


def write(folder: Path, text: str) -> Path:
    path = folder / "agent.toml"
    path.write_text(text)
    return path


def test_the_shipped_example_is_valid_and_safe() -> None:
    config = load_agent_config(configs.ROOT / "agent.toml")
    assert not config.dev
    assert config.state_dir == "/var/lib/tandem"


def test_defaults(tmp_path: Path) -> None:
    config = load_agent_config(write(tmp_path, MINIMAL))
    assert (config.dev, config.broker.port, config.broker.mqtt_version) == (False, 1883, "auto")
    assert config.update.trial_timeout_s == 30.0
    assert config.state_dir == str(tmp_path / "s")  # beside the file, wherever it is started


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "prot = 1\n", r"unknown key 'prot' in \[broker\]: use one of port, "),
        (
            "devices = 1\n" + MINIMAL,
            "unknown key 'devices' in the top level: use one of device, dev,",
        ),
        (MINIMAL.replace("b-1", "b/1"), "device is wrong: expected `str` matching"),
        (MINIMAL.replace("b-1", "x" * 65), "device is wrong: expected `str` matching"),
        (MINIMAL.replace("b-1", "b-1\\n"), "device is wrong: expected `str` matching"),
        (MINIMAL.replace("b-1", "+"), "device is wrong: expected `str` matching"),
        (MINIMAL + "port = 70000\n", "broker.port is wrong: expected `int` <= 65535"),
        (MINIMAL + 'mqtt_version = "4"\n', "broker.mqtt_version is '4': use one of 3.1.1, 5, auto"),
        (
            MINIMAL + "[update]\ntrial_timeout_s = 0\n",
            "update.trial_timeout_s is wrong: expected `float` > 0.0",
        ),
        (
            MINIMAL + "[update]\nwindow_chunks = 65\n",
            "update.window_chunks is wrong: expected `int` <= 64",
        ),
        (
            MINIMAL + "[update]\nmax_bytes_per_s = 1023\n",
            "update.max_bytes_per_s is wrong: expected `int` >= 1024",
        ),
        (MINIMAL + '[update]\nsources = ["ftp://x"]\n', "update.sources: 'ftp://x' is no source"),
        (MINIMAL.replace('state_dir = "s"\n', ""), "the top level has no 'state_dir': add it"),
        ("device =", "agent.toml"),
        (MINIMAL + "[source]\nuri = 'a'\n[sources.left]\nuri = 'b'\n", "for several, not both"),
        (MINIMAL + "[sources]\nuri = 'b'\n", r"sources\[\.\.\.\] is wrong: expected `object`"),
        (
            MINIMAL + "[sources.left]\nurl = 'b'\n",
            r"unknown key 'url' in \[sources\[\.\.\.\]\]: use one of uri",
        ),
    ],
)
def test_mistakes_are_named_with_the_file_and_the_key(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        load_agent_config(write(tmp_path, text))
    assert str(tmp_path / "agent.toml") in str(info.value)


def test_a_plain_connection_is_for_benches_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[broker.tls\] is missing.*dev = true"):
        load_agent_config(write(tmp_path, PLAIN))
    assert load_agent_config(write(tmp_path, "dev = true\n" + PLAIN)).broker.tls is None


def test_the_files_of_tls_are_beside_agent_toml(tmp_path: Path) -> None:
    files = 'tls = {ca = "ca.crt", certificate = "d.crt", key = "/keys/d.key"}'
    config = load_agent_config(write(tmp_path, PLAIN.replace("[broker]", f"[broker]\n{files}")))
    tls = tls_files(config.broker)
    assert tls == TlsFiles(tmp_path / "ca.crt", tmp_path / "d.crt", Path("/keys/d.key"))


@pytest.mark.parametrize("lone", ["certificate", "key"])
def test_a_certificate_goes_with_its_key(tmp_path: Path, lone: str) -> None:
    files = f'tls = {{ca = "ca.crt", {lone} = "d.pem"}}'
    with pytest.raises(ConfigError, match=f"has a {lone} alone"):
        load_agent_config(write(tmp_path, PLAIN.replace("[broker]", f"[broker]\n{files}")))


def test_an_unknown_profile_is_refused_with_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("laptop", "orin-nx-16"))
    with pytest.raises(
        ConfigError, match=r"profile: .*'orin-nx-16': use one of orin-nx-16gb, "
    ) as info:
        load_agent_config(path)
    assert str(path) in str(info.value)
    assert "agx-thor" in str(info.value)


def test_a_board_of_ones_own_is_named_by_the_path_of_its_profile(tmp_path: Path) -> None:
    profile = write_profile(tmp_path)
    config = load_agent_config(write(tmp_path, MINIMAL.replace("laptop", profile.name)))
    assert config.profile == PROFILE  # as engines name it
    profile.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_agent_config(tmp_path / "agent.toml")


def test_a_file_that_is_not_text_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        load_agent_config(path)


def test_the_password_is_not_in_the_repr(tmp_path: Path) -> None:
    text = MINIMAL + 'username = "u"\npassword = "s3cret"\n'
    assert "s3cret" not in repr(load_agent_config(write(tmp_path, text)))


def test_the_agent_command_prints_one_sentence_for_a_wrong_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "prot = 1\n")
    done = subprocess.run(
        [sys.executable, "-m", "device.agent", "--config", path],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("tandem-agent: ")
    assert len(done.stderr.splitlines()) == 1
