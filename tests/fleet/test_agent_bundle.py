"""Releases of the agent as bundles: made of wheels, read, published, and refused by name."""

from pathlib import Path

import pytest
from cli_fixtures import output_of
from self_update_fixtures import packed
from wheel_fixtures import agent_wheel, empty_wheel

from device.errors import BundleError, DeployError
from device.update.agent_payload import AgentPayload
from device.update.bundle import check_bundle, write_agent_bundle
from toolkit.errors import RolloutError
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.bundles.agent import pack_agent, payload_of
from toolkit.fleet.bundles.unpacked import unpacked
from toolkit.fleet.server.rollout_request import RolloutRequest, spec_of
from toolkit.fleet.store.database import open_database
from toolkit.fleet.transports.deploy import deploy_bundle

OWN = "tandem_edge-1.2-py3-none-any.whl"
PAYLOADS = [
    ((OWN,), AgentPayload(min_python="3.10")),
    (
        (OWN, "msgspec-0.19-cp310-cp310-manylinux_2_17_aarch64.manylinux2014_aarch64.whl"),
        AgentPayload(min_python="3.10", below_python="3.11", min_glibc="2.17", machine="aarch64"),
    ),
    (
        (OWN, "cryptography-42-cp312-abi3-manylinux_2_34_x86_64.whl"),
        AgentPayload(min_python="3.12", min_glibc="2.34", machine="x86_64"),
    ),
]
REFUSED = [
    ((OWN, "a-1-py3-none-linux_aarch64.whl", "b-1-py3-none-linux_x86_64.whl"),
     "aarch64 and x86_64"),
    ((OWN, "a-1-cp310-cp310-linux_x86_64.whl", "b-1-cp312-cp312-linux_x86_64.whl"),
     "need Python 3.12 or newer, and one older than 3.11"),
    ((OWN, "a-1-py3-none-win_amd64.whl"), "for no Linux"),
    ((OWN, "a-1-pp310-pypy310_pp73-any.whl"), "for no CPython"),
    ((OWN, "a.whl"), "is no wheel"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "payload"), PAYLOADS)
def test_the_wheels_say_which_boards_take_them(
    names: tuple[str, ...], payload: AgentPayload
) -> None:
    assert payload_of(names) == payload


@pytest.mark.parametrize(("names", "reason"), REFUSED)
def test_wheels_that_no_board_takes(names: tuple[str, ...], reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        payload_of(names)


def test_a_release_of_the_agent_is_made_inspected_and_verified(tmp_path: Path) -> None:
    wheels, bundle = agent_wheel(tmp_path / "wheels", "1.2"), tmp_path / "agent.bundle"
    empty_wheel(wheels, "xxhash", "3.0", "cp310-cp310-manylinux2014_aarch64")
    text = output_of("bundle", "agent", "--wheels", wheels, "--min-l4t", "36.4", "-o", bundle)
    assert "tandem-agent 1.2, 2 wheels for aarch64, Python >= 3.10 < 3.11, L4T >= 36.4" in text
    first = bundle.read_bytes()
    pack_agent(bundle, wheels, "", min_l4t="36.4")
    assert bundle.read_bytes() == first
    info, _ = check_bundle(bundle)
    assert (info.format, info.profile, info.runs) == (3, "agent", ())
    assert OWN in output_of("bundle", "inspect", bundle)
    assert "passed" in output_of("bundle", "verify", bundle)
    with pytest.raises(BundleError, match="which has no engines"), unpacked(bundle):
        pass


def test_a_folder_has_one_wheel_of_tandem(tmp_path: Path) -> None:
    wheels = agent_wheel(tmp_path / "wheels", "1.2")
    agent_wheel(wheels, "1.3")
    with pytest.raises(BundleError, match="2 wheels of tandem-edge, expected 1"):
        pack_agent(tmp_path / "agent.bundle", wheels, "")
    with pytest.raises(BundleError, match=r"the version '\.\./x' is no file name"):
        write_agent_bundle(
            tmp_path / "agent.bundle",
            wheels=[wheels / OWN],
            version="../x",
            payload=AgentPayload(),
        )


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (RolloutRequest(confirm_after_s=5.0), "--confirm-after"),
        (RolloutRequest(shadow_s=5.0, gates="shadow_frames>1"), "--shadow"),
        (RolloutRequest(gates="fps>1, shadow_frames>1"), "the gate shadow_frames>1"),
        (RolloutRequest(gates="golden_agreement>0.9"), "the gate golden_agreement>0.9"),
        (RolloutRequest(gates="score_agreement>0.9"), "the gate score_agreement>0.9"),
    ],
)
def test_a_rollout_of_the_agent_refuses_what_has_no_effect(
    tmp_path: Path, request_: RolloutRequest, what: str
) -> None:
    bundle = packed(tmp_path, "2.0", "pass")
    database = open_database("sqlite:///fleet.db", tmp_path)
    with pytest.raises(RolloutError, match=f"leave {what} out for a release of the agent"):
        spec_of(database, request_, bundle)
    gates = spec_of(database, RolloutRequest(gates="fps>1, errors<1%"), bundle).gates
    assert [gate.name for gate in gates] == ["fps", "errors"]
    database.close()


def test_a_release_of_the_agent_goes_to_no_board_by_deploy(tmp_path: Path) -> None:
    bundle = packed(tmp_path, "2.0", "pass")
    with pytest.raises(DeployError, match="rollout start --agent"):
        deploy_bundle(bundle, ("board-1",), BrokerAddress("127.0.0.1", 1))
