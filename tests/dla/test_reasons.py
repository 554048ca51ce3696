"""`tandem explain`: every id that a report can show has an entry, and the page is up to date."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from model_fixtures import small_convnet

from device.profile import load_profile
from scripts.rules_page import PAGE
from toolkit.cli.main import tandem
from toolkit.dla.legalize.rows import REWRITES
from toolkit.dla.rules.formats import FORMAT_RULES
from toolkit.dla.rules.meanings import MEANINGS
from toolkit.dla.rules.memory import CORE_RULES, LOADABLE_RULES
from toolkit.dla.rules.notes import NOTES
from toolkit.dla.rules.verdicts import RULES
from toolkit.engine import reasons
from toolkit.errors import PlanError
from toolkit.gpu.reasons import MEANINGS as GPU_MEANINGS
from toolkit.gpu.reasons import SENTENCES, reason, reason_id
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.partition.planning import refusals
from toolkit.partition.planning.plan import Model, PlanOptions, make_plan
from toolkit.quantize.scales.rules import SCALE_RULES

OF_MEMORY = (*CORE_RULES, *LOADABLE_RULES, *FORMAT_RULES)
IDS = {entry.id for entry in reasons.entries()}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(tandem, ["explain", *arguments], catch_exceptions=False)


def test_every_row_of_every_table_has_an_entry() -> None:
    rows = [*RULES, *OF_MEMORY, *REWRITES, *NOTES]
    assert {row.id for row in rows} <= IDS
    assert {f"scale.{row.id}" for row in SCALE_RULES} <= IDS
    assert GPU_MEANINGS.keys() <= IDS
    assert set(refusals.POLICY) - {""} <= IDS


def test_no_text_is_left_without_its_rule() -> None:
    assert set(MEANINGS) == {row.id for row in (*RULES, *OF_MEMORY)} | {"G4.cut"}


def test_ids_are_distinct_in_their_family_and_texts_are_sentences() -> None:
    assert len({(e.family, e.id) for e in reasons.entries()}) == len(reasons.entries())
    for entry in reasons.entries():
        assert re.fullmatch(r"[A-Z0-9\"`].*\.", entry.what, re.DOTALL), entry
        assert re.fullmatch(r"[A-Za-z0-9].*\.", entry.do), entry
        assert entry.source, entry


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("profile", ["agx-orin-64gb", "agx-xavier-32gb", "orin-nano-8gb"])
def test_every_id_of_a_plan_has_an_entry(tmp_path: Path, precision: str, profile: str) -> None:
    path = small_convnet(tmp_path / "m.onnx", np.random.default_rng(), 64, 32)
    graph, _ = run_passes(import_model(path).model)
    model = Model(
        "m", graph.graph, has_scale=lambda name: name != "r1", keep_float=frozenset({"conv0"})
    )
    plan = make_plan(model, load_profile(profile), PlanOptions(precision=precision))
    rules = {row.rule for row in plan.placements} | {row.rule for row in plan.refusals}
    assert rules - {""} <= IDS
    if profile != "orin-nano-8gb":  # which has no DLA
        assert rules - {""}


def test_a_sentence_about_a_node_leads_to_its_reason_and_no_other() -> None:
    filled = {key: reason(key, *range(7)) for key in SENTENCES}
    wrong = [key for key, text in filled.items() if reason_id(text) != key.partition(":")[0]]
    assert wrong == []
    assert {reason_id(text) for text in filled.values()} == GPU_MEANINGS.keys()


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reasons.page(), "run python -m scripts.rules_page --write"


@pytest.mark.parametrize("rule", ["G6", "shuffle.rank", "[P2]", "scale.concat", "mean.window"])
def test_a_rule_is_explained(rule: str) -> None:
    shown = run(rule).stdout
    (entry,) = reasons.find(rule)
    assert shown.startswith(f"{rule.strip('[]')}  (")
    assert entry.what in shown
    assert entry.do in shown
    assert json.loads(run(rule, "--json").stdout)[0]["source"] == entry.source


def test_an_operator_shows_what_binds_it() -> None:
    ids = {entry.id for entry in reasons.find("MaxPool")}
    assert {"pool.window", "pool.indices", "max-pool.cascade", "scale.pooling"} <= ids
    assert "conv.kernel" not in ids


def test_the_text_of_a_reason_is_found() -> None:
    (entry,) = reasons.find("node 'n3' (Foo) has no kernel yet")
    assert entry.id == "gpu.no-kernel"


def test_all_are_listed_and_a_wrong_id_names_the_nearest() -> None:
    shown = run().stdout
    assert all(f"  {name} " in shown for name in IDS)
    with pytest.raises(PlanError, match="nearest ids are shuffle"):
        run("shufle.rank")
