"""What a rollout is told in texts: gates, requirements, groups, rates, windows; at their limits."""

from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.protocol.documents import BlobSpec, DeviceFacts, InstallPolicy, Measured, ReleaseSpec
from device.update.agent_payload import AgentPayload
from toolkit.errors import RolloutError
from toolkit.fleet.rollout.gates import (
    BundleStatements,
    Gate,
    broken_by_bundle,
    judge_gates,
    parse_gates,
)
from toolkit.fleet.rollout.groups import assign, parse_groups, queries_in
from toolkit.fleet.rollout.policy import longest_wait_s, with_gates, with_window
from toolkit.fleet.rollout.rates import default_rate, parse_rate
from toolkit.fleet.rollout.targets import Target, parse_requirements, unfit
from toolkit.fleet.rollout.waits import parse_duration, parse_start

SHA = "a" * 64
BLOB = BlobSpec(sha256=SHA, bytes=10 * 1024**2, chunk_bytes=65536, index_sha256="c" * 64)
RELEASE = ReleaseSpec(name="n", version="2", profile="p", blob=BLOB)
FACTS = DeviceFacts(
    jetpack="6.0", tensorrt="10.3.0", dla_cores=2, memory_mb=30000, free_mb=20,
    labels={"site": "lab", "zone": "a"},
)  # fmt: skip
TARGET = Target("d", "p", FACTS, FACTS.labels)


def check_text(parse: Callable[[str], object], text: str, says: str, message: str | None) -> None:
    """The text is refused with a message; None: it is read."""
    if message is None:
        parse(text)
        return
    with pytest.raises(RolloutError, match=says) as error:
        parse(text)
    assert message in str(error.value)


def measured(**figures: object) -> Measured:
    return msgspec.convert({"sha256": SHA, "frames": 90, **figures}, Measured)


@pytest.mark.parametrize(
    ("gate", "figures", "passes"),
    [
        ("p95_latency_ms<30", {"latency_p95_ms": 29.9}, True),
        ("p95_latency_ms<30", {"latency_p95_ms": 30.0}, False),
        ("p95_latency_ms<=30", {"latency_p95_ms": 30.0}, True),
        ("fps>=25", {"fps": 25.0}, True),
        ("fps>25", {"fps": 25.0}, False),
        ("errors<10%", {"errors": 9}, True),  # 9 of 99
        ("errors<10%", {"errors": 10}, False),  # 10 of 100
        ("errors<=0.1", {"errors": 10}, True),
        ("score_agreement>0.98", {"golden_agreement": 0.99}, True),
        ("score_agreement>98%", {"golden_agreement": 0.99, "shadow_agreement": 0.98}, False),
        ("temperature_c<80", {"temperature_c": 79.0}, True),
        ("shadow_frames>=100", {"shadow_frames": 99}, False),
    ],
)
def test_gates_judge_at_their_limit(gate: str, figures: dict[str, object], passes: bool) -> None:
    (result,) = judge_gates(parse_gates(gate), {"d": measured(**figures)})
    assert result.passed is passes
    assert bool(result.broken) is not passes


def test_errors_are_pooled_and_other_figures_hold_for_every_device() -> None:
    rows = {"a": measured(errors=10, fps=10.0), "b": measured(frames=900, errors=0, fps=9.0)}
    errors, fps = judge_gates(parse_gates("errors<=1%, fps>=10"), rows)
    assert errors.passed  # 10 of 1000
    assert fps.broken == "fps is 9 on b, not fps>=10"


def test_figures_that_are_missing_are_said() -> None:
    rows = {"a": None, "b": measured(frames=0), "c": measured(temperature_c=50.0)}
    fps, hot, agreement = judge_gates(
        parse_gates("p50_latency_ms>=0,temperature_c<60,score_agreement>0"), rows
    )
    assert fps.missing == hot.missing == ("a", "b")
    assert agreement.missing == ("a", "b", "c")
    assert not fps.passed


def test_gates_ask_what_the_bundle_says_of_itself() -> None:
    gates = parse_gates("bundle.map50>=0.4, bundle.size<3, fps>1")
    assert broken_by_bundle(gates, BundleStatements({"map50": 0.4, "size": 2.0}, {})) == ()
    assert broken_by_bundle(gates, BundleStatements({"map50": 0.39}, {})) == (
        "the bundle's map50 is 0.39, the gate is bundle.map50>=0.4",
        "the bundle does not say its size (it says: map50)",
    )


HASH = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("gate", "metrics", "texts", "broken"),
    [
        ("task_score>=0.9", {"task_score": 0.9}, {}, ""),
        ("task_score>=0.9", {"task_score": 0.8999}, {}, "the bundle's task_score is 0.8999, the"),
        ("task_score>=0.9", {}, {}, "does not say its task_score (it says: nothing)"),
        ("agreement>98%", {"agreement": 0.981}, {}, ""),
        ("agreement>98%", {"agreement": 0.98}, {}, "is 0.98, the gate is bundle.agreement>0.98"),
        ("bundle.agreement>0.98", {"agreement": 0.99}, {}, ""),
        ("predicted_latency_ms<5", {"predicted_latency_ms": 5.0}, {}, "predicted_latency_ms is 5"),
        ("licence in [MIT, Apache-2.0]", {}, {"licence": "Apache-2.0"}, ""),
        ("license in [MIT]", {}, {"licence": "AGPL-3.0-only"}, "licence is 'AGPL-3.0-only', the"),
        ("licence in [MIT]", {}, {"licence": "MIT-0"}, "the gate is bundle.licence in [MIT]"),
        ("licence in [MIT]", {}, {}, "does not say its licence"),
        (f"model in [{HASH}]", {}, {"model": HASH}, ""),
        (f"model in [{HASH[:12]}]", {}, {"model": HASH}, ""),
        (f"data in [{HASH[:12]}]", {}, {"data": HASH[::-1]}, "the bundle's data is 'fedcba"),
    ],
)
def test_a_gate_on_the_bundle_is_judged_by_what_it_says(
    gate: str, metrics: dict[str, float], texts: dict[str, str], broken: str
) -> None:
    (parsed,) = parse_gates(gate)
    sentences = broken_by_bundle([parsed], BundleStatements(metrics, texts))
    assert bool(sentences) == bool(broken)
    assert broken in "; ".join(sentences)
    (again,) = parse_gates(str(parsed))
    assert again == parsed
    stored = msgspec.json.decode(msgspec.json.encode(parsed), type=Gate)
    assert stored == parsed
    assert judge_gates([parsed], {"d": None}) == ()


@pytest.mark.parametrize(
    ("gate", "metrics", "broken"),
    [
        ("agreement>0.9", {"a.agreement": 0.95, "b.agreement": 0.91}, ""),
        ("agreement>0.9", {"a.agreement": 0.95, "b.agreement": 0.9}, "b.agreement is 0.9,"),
        ("agreement>0.9", {"a.agreement": 0.95}, "does not say its b.agreement (it says: a.agr"),
        ("agreement>0.9", {"a.sqnr_db": 9.0}, "does not say its agreement (it says: a.sqnr_db)"),
        ("bundle.a.agreement>90%", {"a.agreement": 0.95}, ""),
        ("bundle.map50>0.4", {"map50": 0.5, "a.agreement": 0.95}, ""),  # of all, by --metric
    ],
)
def test_every_model_of_a_bundle_must_say_what_a_gate_asks(
    gate: str, metrics: dict[str, float], broken: str
) -> None:
    statements = BundleStatements(metrics, {}, ("a", "b"))
    sentences = broken_by_bundle(parse_gates(gate), statements)
    assert bool(sentences) == bool(broken)
    assert broken in "; ".join(sentences)


def test_a_hash_of_each_model_must_be_among_the_choices() -> None:
    hashes = {"a.model": HASH, "b.model": HASH[::-1]}
    statements = BundleStatements({}, hashes, ("a", "b"))
    assert broken_by_bundle(parse_gates(f"model in [{HASH}, {HASH[::-1]}]"), statements) == ()
    (broken,) = broken_by_bundle(parse_gates(f"model in [{HASH}]"), statements)
    assert broken.startswith("the bundle's b.model is 'fedcba")


@given(st.text(alphabet="abfps_.<>=in[], %019MIT-x", max_size=40))
def test_any_text_is_gates_or_refused(text: str) -> None:
    try:
        gates = parse_gates(text)
    except RolloutError:
        return
    again = parse_gates(", ".join(map(str, gates)))
    assert [(gate.name, gate.compare) for gate in again] == [
        (gate.name, gate.compare) for gate in gates
    ]
    broken_by_bundle(gates, BundleStatements({"agreement": 0.5}, {"licence": "MIT"}))


def test_commas_in_brackets_part_no_gates() -> None:
    names = [gate.name for gate in parse_gates("fps>1, licence in [MIT, ISC],agreement>0.5")]
    assert names == ["fps", "bundle.licence", "bundle.agreement"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p95_latency_ms", "'p95_latency_ms' in the gates"),
        ("licence in []", "has an empty choice"),
        ("licence in [MIT,]", "has an empty choice"),
        ("licence in [MIT", "is no gate"),
        ("licence>3", "licence in the gate 'licence>3' is a text"),
        ("fps in [3]", "there is no text 'fps'"),
        ("model in [abc]", "'abc' in the gate 'model in [abc]' is no SHA-256"),
        ("agreement>101%", "compares bundle.agreement, a share"),
        ("sqnr_db>20%", "bundle.sqnr_db in the gate 'sqnr_db>20%' is no share"),
        ("p95_latency_ms=30", "is no gate"),
        (
            "latency_p95_ms<30",
            "there is no figure 'latency_p95_ms' for a gate: take one of p50_lat",
        ),
        ("fps>10%", "fps in the gate 'fps>10%' is no share"),
        ("errors<1.5", "compares errors, a share, with 1.5"),
        ("errors<1", None),
        ("fps>1,,", "'' in the gates"),
        ("fps>nan", "is no gate"),
    ],
)
def test_gates_that_cannot_be_read_name_their_part(text: str, message: str | None) -> None:
    check_text(parse_gates, text, "gate", message)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("jetpack>=6", None),
        ("jetpack>=6.0.1", "its jetpack is 6.0, the rollout asks for jetpack>=6.0.1"),
        ("tensorrt>=10.3", None),
        ("tensorrt<10.3", "its tensorrt is 10.3.0, the rollout asks for tensorrt<10.3"),
        ("tensorrt>=9.10", None),  # by numbers, not by letters
        ("dla_cores>=2", None),
        ("dla_cores>=3", "its dla_cores is 2, the rollout asks for dla_cores>=3"),
        ("memory_mb>=30001", "its memory_mb is 30000, the rollout asks for memory_mb>=30001"),
        ("module=p3701", "it has not said its module"),
        ("label.site=lab", None),
        ("label.site!=lab", "its label.site is lab, the rollout asks for label.site!=lab"),
        ("label.floor=1", "it has no label floor"),
        ("label.floor!=1", None),
    ],
)
def test_devices_that_do_not_fit_say_why(text: str, reason: str | None) -> None:
    assert unfit(TARGET, RELEASE, parse_requirements(text)) == (() if reason is None else (reason,))


def test_profile_and_room_are_always_required() -> None:
    second = msgspec.structs.replace(RELEASE, profile="q")
    assert unfit(TARGET, second, ()) == ("it is p, the release is for q",)
    assert unfit(TARGET, RELEASE, ()) == ()  # 20 MB for twice 10
    large = msgspec.structs.replace(RELEASE, blob=msgspec.structs.replace(BLOB, bytes=10485761))
    (reason,) = unfit(TARGET, large, ())
    assert reason == "it has 20 MB free, the release takes 21 MB to install"
    there = Target("d", "p", msgspec.structs.replace(FACTS, bundles=(SHA,)))
    assert unfit(there, large, ()) == ()


@pytest.mark.parametrize(
    ("parse", "says", "text"),
    [
        *(
            (parse_requirements, r"jetpack|speed|module|dla_cores|label", text)
            for text in (
                "jetpack",
                "jetpack>=x",
                "speed>1",
                "module>p3701",
                "dla_cores=two",
                "label.=1",
            )
        ),
        *(
            (parse_rate, "rate", text)
            for text in ("0/min", "10", "10/s", "10/min,x2", "10/min,x0.5/10", "-1/min")
        ),
        *(
            (partial(with_window, InstallPolicy()), "maintenance window", text)
            for text in ("22:00", "24:00-01:00", "1:00-2:00", "03:00-03:00")
        ),
    ],
)
def test_texts_that_cannot_be_read_are_refused(
    parse: Callable[[str], object], says: str, text: str
) -> None:
    check_text(parse, text, says, "")


def targets(count: int) -> list[Target]:
    rows = [Target(f"d{n}", "p", labels={"group": "canary"} if n < 2 else {}) for n in range(count)]
    rows[4] = Target("d4", "p", labels={"site": "lab"})
    return rows


def test_groups_take_devices_in_their_order_and_each_once() -> None:
    rows = targets(100)
    assigned = assign(parse_groups("canary,site=lab,d0+d7,7%,rest"), rows, "key")
    names = [[target.device for target in group] for group in assigned]
    assert [sorted(group) for group in names[:3]] == [["d0", "d1"], ["d4"], ["d7"]]
    assert [len(group) for group in names] == [2, 1, 1, 7, 89]
    assert sorted(name for group in names for name in group) == sorted(
        target.device for target in rows
    )
    again = assign(parse_groups("canary,site=lab,d0+d7,7%,rest"), rows[::-1], "key")
    assert again == assigned  # whatever order the store gives
    assert assign(("rest",), rows, "another") != assign(("rest",), rows, "key")


@given(st.integers(5, 300), st.floats(0.1, 100.0))
def test_a_share_is_rounded_up(count: int, share: float) -> None:
    (group,) = assign((f"{share:.2f}%",), targets(count), "k")
    assert 0 <= len(group) - float(f"{share:.2f}") * count / 100.0 < 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rest,canary", "go on after rest"),
        ("canary,canary", "name canary twice"),
        ("0%,rest", "each is above 0"),
        ("60%,41%", "101%"),
        ("60%,40%", None),
        ("can ary", "'can ary' in the groups"),
        ("", "'' in the groups"),
    ],
)
def test_groups_that_cannot_be_read_are_refused(text: str, message: str | None) -> None:
    check_text(parse_groups, text, r"group|shares", message)


def test_a_named_group_without_devices_is_refused() -> None:
    with pytest.raises(RolloutError, match="`tandem fleet device label ID group=beta`"):
        assign(("beta", "rest"), targets(5), "k")


def test_rates_grow_with_successes_up_to_their_most() -> None:
    rate = parse_rate("10/min, x2/50, max=1000")
    assert [rate.per_minute(n) for n in (0, 49, 50, 100, 10**6)] == [10, 10, 20, 40, 1000]
    assert parse_rate("90/min").burst(0) == 1.5


def test_without_a_rate_a_rollout_goes_as_fast_as_a_server_carries_its_bundle() -> None:
    rates = [default_rate(size).start for size in (1, 1_000_000, 40_000_000, 2 * 1024**3)]
    assert rates == [4545.5, 2445.8, 128.6, 2.5]
    assert all(parse_rate(f"{rate}/min").start == rate for rate in rates)


def test_of_two_gates_on_one_figure_the_device_holds_to_the_tighter() -> None:
    text = "p95_latency_ms<30, p95_latency_ms<50, golden_agreement>0.9, score_agreement>0.8"
    policy = with_gates(InstallPolicy(), parse_gates(text))
    assert policy == InstallPolicy(max_latency_p95_ms=30.0, min_golden_agreement=0.9)


def test_in_shadow_mode_the_score_is_that_of_live_frames() -> None:
    gates = parse_gates("score_agreement>0.98")
    assert with_gates(InstallPolicy(), gates) == InstallPolicy(min_golden_agreement=0.98)
    shadow = InstallPolicy(shadow_s=60.0)
    assert with_gates(shadow, gates) == InstallPolicy(shadow_s=60.0, min_shadow_agreement=0.98)


@pytest.mark.parametrize("gate", ["shadow_agreement>0.9", "shadow_frames>100"])
def test_a_gate_on_live_frames_needs_shadow_mode(gate: str) -> None:
    with pytest.raises(RolloutError, match=r"only with `tandem .*start --shadow`"):
        with_gates(InstallPolicy(), parse_gates(gate))


def test_a_window_over_midnight_waits_for_the_rest_of_the_day() -> None:
    policy = with_window(InstallPolicy(), "22:00-04:30")
    assert (policy.not_before, policy.not_after) == ("22:00", "04:30")
    assert longest_wait_s(policy) == 17.5 * 3600.0
    assert longest_wait_s(with_window(InstallPolicy(), "04:30-22:00")) == 6.5 * 3600.0
    assert longest_wait_s(InstallPolicy()) == 0.0
    assert longest_wait_s(InstallPolicy(shadow_s=60.0)) == 60.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90.0), ("30m", 1800.0), ("1.5h", 5400.0), ("30d", 2592000.0), ("0s", 0.0),
     ("31d", None), ("30", None), ("", None), ("-1m", None), ("1w", None)],
)  # fmt: skip
def test_a_time_to_wait_has_a_unit(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(RolloutError, match="is no time to wait: write 30m"):
            parse_duration(text)
    else:
        assert parse_duration(text) == seconds


def test_a_start_is_later_than_now_and_within_a_year() -> None:
    now_s = 1_795_000_000.0  # 2026-11-18
    assert parse_start("2026-12-01T02:00Z", now_s) == parse_start("2026-12-01T04:00+02:00", now_s)
    for text in ("2026-11-01T00:00Z", "2028-01-01T00:00Z"):
        with pytest.raises(RolloutError, match=r"-01 00:00 UTC: a rollout begins later"):
            parse_start(text, now_s)
    for text in ("tomorrow", "25:00", "", "9999-12-31T23:59-12:00", "0001-01-01T00:00+12:00"):
        with pytest.raises(RolloutError, match="is no time: write"):
            parse_start(text, now_s)


def test_a_group_may_be_a_saved_query() -> None:
    rows = [
        Target(f"d{n}", "p", facts=DeviceFacts(jetpack="6.1" if n % 2 else "5.1")) for n in range(6)
    ]
    groups = parse_groups("d1,@new,rest")
    assert queries_in(groups) == ("new",)
    queries = {"new": parse_requirements("jetpack>=6")}
    assigned = assign(groups, rows, "key", queries)
    assert [{one.device for one in group} for group in assigned] == [
        {"d1"}, {"d3", "d5"}, {"d0", "d2", "d4"},
    ]  # fmt: skip
    with pytest.raises(RolloutError, match="fulfils the saved query @new: leave it out"):
        assign(groups, rows[:2], "key", queries)
    for text in ("@", "@a b", "x@y"):
        with pytest.raises(RolloutError, match="@NAME of a saved query"):
            parse_groups(text)


@pytest.mark.parametrize(
    ("agent", "python", "l4t", "reason"),
    [
        ("", "3.10.12", "36.4.3", ""),
        ("1.2-x", "3.10.12", "36.4.3", ""),
        (
            "",
            "3.12.3",
            "36.4.3",
            "needs Python 3.10 or newer, older than 3.11, this board has 3.12.3",
        ),
        ("", "3.10.12", "35.6", "needs L4T 36 or newer, this board has 35.6"),
        ("", "3.10.12", "", "needs L4T 36 or newer, this board has none"),
        (None, "", "", "takes no releases of the agent from a fleet"),
    ],
)
def test_a_release_of_the_agent_is_for_boards_of_any_profile_whose_system_fits(
    agent: str | None, python: str, l4t: str, reason: str
) -> None:
    payload = AgentPayload(min_python="3.10", below_python="3.11", min_l4t="36")
    target = Target("d", "another", DeviceFacts(python=python, l4t=l4t), agent=agent)
    reasons = unfit(target, RELEASE, (), payload)
    assert len(reasons) == (1 if reason else 0)
    assert reason in "".join(reasons)
