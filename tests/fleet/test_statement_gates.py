"""A statement for a board without a broker is refused where the bundle says too little."""

from pathlib import Path

import pytest
from fleet_fixtures import Fleet
from mqtt_fixtures import DEVICE

from device.update.bundle import BundleFacts, write_bundle
from toolkit.errors import RolloutError
from toolkit.fleet.rollout.gates import parse_gates
from toolkit.fleet.trust.repository import FleetRepository
from toolkit.fleet.trust.statement import make_statement


def stating(folder: Path) -> Path:
    """Write a bundle that says its score and licence."""
    for name in ("e", "p", "l"):
        (folder / name).write_text(name)
    facts = BundleFacts(metrics={"task_score": 0.9}, licence="MIT")
    out = folder / "stating.bundle"
    write_bundle(
        out, engine=folder / "e", pipeline=folder / "p", labels=folder / "l",
        name="stating", version="1", profile="p", facts=facts,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(
    ("gates", "refused"),
    [
        ("task_score>=0.9, licence in [MIT]", ""),
        ("task_score>0.9", "stating 1 is not rolled out: the bundle's task_score is 0.9"),
        ("licence in [ISC]", "the bundle's licence is 'MIT'"),
        ("fps>10", "the gate fps>10 is on what devices measure"),
    ],
)
def test_a_gate_is_judged_before_anything_is_published(
    tmp_path: Path, gates: str, refused: str
) -> None:
    fleet = Fleet(tmp_path / "base")
    bundle = stating(tmp_path)
    if not refused:
        assert make_statement(bundle, DEVICE, fleet.folder, gates=parse_gates(gates))
        return
    with pytest.raises(RolloutError) as caught:
        make_statement(bundle, DEVICE, fleet.folder, gates=parse_gates(gates))
    assert refused in str(caught.value)
    assert FleetRepository(fleet.folder).target("stating/1/p.bundle") is None
