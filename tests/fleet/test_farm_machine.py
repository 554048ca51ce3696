"""The machine of a farm: who gets which job, who is dead, who lies, and what the table says."""

import math

import pytest
from farm_fixtures import SimulatedBoard, Simulation, tactics
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.fleet.farm import values as v
from toolkit.fleet.farm.machine import due_s, is_over, step, table

ONE = v.Task("one", frozenset({"a", "b", "c"}))


def run(farm: v.Farm, *events: tuple[float, v.Event]) -> tuple[v.State, list[v.Effect]]:
    """The state after some events at some times, and the effects of the last."""
    state, effects = v.State(), ()
    for at_s, event in events:
        state, effects = step(farm, state, event, at_s)
    return state, list(effects)


def joined(*names: str) -> list[tuple[float, v.Event]]:
    return [(0.0, v.Joined(name)) for name in names]


def measured(job: int, factor: float = 1.0, at_s: float = 1.0) -> tuple[float, v.Event]:
    return at_s, v.Measured(job, {"a": 10.0 * factor, "b": 20.0 * factor, "c": factor})


FARM = v.make_farm([ONE], v.Rules(lease_s=60.0))


def test_a_task_is_given_to_so_many_boards_at_once_each_with_a_lease() -> None:
    state, effects = run(FARM, *joined("x", "y", "z", "w"))
    assert [job.board for job in state.running.values()] == ["x", "y", "z"]
    assert {job.until_s for job in state.running.values()} == {60.0}
    assert not effects  # the fourth board has nothing to do
    assert due_s(state) == 60.0


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ((60.0, v.Tick()), "it gave no answer within 60 s"),
        ((5.0, v.Lost("x", "its agent is lost")), "its agent is lost"),
        ((5.0, v.Failed(1, "its pipeline is running", board=True)), "its pipeline is running"),
    ],
)
def test_the_job_of_a_board_that_drops_out_goes_elsewhere(
    event: tuple[float, v.Event], reason: str
) -> None:
    state, effects = run(FARM, *joined("x", "y", "z", "w"), measured(2), measured(3), event)
    assert v.Release("x") in effects
    assert [effect.board for effect in effects if isinstance(effect, v.Job)] == ["w"]
    assert state.boards["x"].out == reason
    late, _ = step(FARM, state, v.Measured(1, {"a": 1.0, "b": 1.0}), 70.0)
    assert late.results == state.results  # the lease is over: nothing of it counts


def test_a_task_that_fails_on_three_boards_is_given_up_and_says_why() -> None:
    failed = [(1.0, v.Failed(n, "its process crashed", board=False)) for n in (1, 2, 3)]
    state, effects = run(FARM, *joined("x", "y", "z"), *failed)
    assert effects == [v.Release("z")]
    assert is_over(FARM, state)
    assert table(FARM, state).reasons == {"one": "it failed on 3 boards; x: its process crashed"}


@pytest.mark.parametrize(
    "times",
    [
        {"a": 1.0},
        {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0},
        {"a": 1.0, "b": math.nan, "c": 3.0},
        {"a": 1.0, "b": -2.0, "c": 3.0},
        {"a": 0.0, "b": 2.0, "c": 3.0},
        {"a": math.inf, "b": 2.0, "c": 3.0},
    ],
)
def test_times_that_cannot_be_those_of_the_task_count_as_a_failure(
    times: dict[str, float],
) -> None:
    state, effects = run(FARM, *joined("x", "y", "z", "w"), (1.0, v.Measured(1, times)))
    assert not state.results
    assert list(state.failures["one"]) == ["x"]
    assert [effect.board for effect in effects if isinstance(effect, v.Job)] == ["w"]


def test_a_board_that_another_run_has_is_asked_again_later() -> None:
    farm = v.make_farm([ONE], v.Rules(repeats=1, lease_s=60.0))
    state, effects = run(farm, *joined("x"), (1.0, v.Busy(1)))
    assert not effects
    assert not is_over(farm, state)
    assert due_s(state) == 6.0
    _, effects = step(farm, state, v.Tick(), 6.0)
    assert [effect.board for effect in effects if isinstance(effect, v.Job)] == ["x"]


def test_a_board_that_is_free_again_and_has_nothing_to_do_is_not_waited_for() -> None:
    farm = v.make_farm([ONE], v.Rules(repeats=1, lease_s=60.0))
    state, _ = run(farm, *joined("x", "y"), (1.0, v.Busy(1)), (6.0, v.Tick()))
    assert [job.board for job in state.running.values()] == ["y"]
    assert due_s(state) == 61.0


def test_a_liar_is_found_by_repeats_and_what_it_measured_is_measured_again() -> None:
    events = (*joined("x", "y", "z", "w"), measured(1), measured(2, 3.0), measured(3))
    state, _ = run(FARM, *events)
    assert [job.board for job in state.running.values()] == ["w"]
    state, _ = step(FARM, state, measured(4)[1], 2.0)
    measured_table = table(FARM, state)
    assert measured_table.liars == {"y": pytest.approx(3.0)}
    assert measured_table.times == {"a": 10.0, "b": 20.0, "c": 1.0}
    assert measured_table.boards == ("w", "x", "z")
    assert is_over(FARM, state)


def test_too_few_boards_measure_without_being_checked_and_the_table_says_so() -> None:
    state, _ = run(FARM, *joined("x"), measured(1))
    measured_table = table(FARM, state)
    assert is_over(FARM, state)
    assert measured_table.verdicts == {"one": "unchecked"}
    assert measured_table.error == math.inf
    two, _ = run(FARM, *joined("x", "y"), measured(1), measured(2, 3.0))
    assert table(FARM, two).reasons == {"one": "the times of x, y do not agree"}


def test_one_disturbed_time_is_repeated_and_left_out() -> None:
    disturbed = (1.0, v.Measured(2, {"a": 10.0, "b": 50.0, "c": 1.0}))
    events = (*joined("x", "y", "z", "w"), measured(1), disturbed, measured(3))
    state, effects = run(FARM, *events)
    assert [effect.board for effect in effects if isinstance(effect, v.Job)] == ["w"]
    state, _ = step(FARM, state, measured(4)[1], 2.0)
    measured_table = table(FARM, state)
    assert (measured_table.times["b"], measured_table.rows["b"].boards) == (20.0, ("w", "x", "z"))
    assert not measured_table.liars
    assert measured_table.error < 0.01


@pytest.mark.parametrize(("more", "left_out"), [((), 2), (("w",), 2), (("w", "v"), 0)])
def test_two_boards_that_lie_together_about_some_keys_pass_none_of_them(
    more: tuple[str, ...], left_out: int
) -> None:
    farm = v.make_farm([v.Task("one", frozenset("abcde"))])
    state, _ = run(farm, *joined("x", "y", "z", *more))
    while state.running:
        job = next(iter(state.running.values()))
        times = {key: 1.0 if job.board in "yz" and key in "ab" else 10.0 for key in "abcde"}
        state, _ = step(farm, state, v.Measured(job.number, times), 1.0)
    measured_table = table(farm, state)
    assert set(measured_table.times.values()) == {10.0}
    assert len(measured_table.times) == 5 - left_out
    assert measured_table.verdicts == {"one": "partly" if left_out else "agreed"}
    assert bool(measured_table.reasons) == bool(left_out)


def test_two_boards_that_lie_together_about_most_keys_pass_nothing() -> None:
    events = (*joined("x", "y", "z"), measured(1), measured(2, 0.1), measured(3, 0.1))
    measured_table = table(FARM, run(FARM, *events)[0])
    assert not measured_table.rows
    assert measured_table.verdicts == {"one": "missing"}
    assert "fewer than 3 of x, y, z agree" in measured_table.reasons["one"]


@pytest.mark.parametrize("says_so", [True, False])
def test_a_task_that_kills_its_boards_is_given_up_after_three_and_the_others_go_on(
    *, says_so: bool
) -> None:
    tasks, truth = tactics(30, 5)
    poison = frozenset({tasks[0].name})
    boards = {f"board-{n}": SimulatedBoard(killed_by=poison, says_so=says_so) for n in range(12)}
    measured_table = Simulation(v.make_farm(tasks, v.Rules(lease_s=120.0)), boards, truth).run()
    reason = "its agent is lost" if says_so else "it gave no answer within 120 s"
    assert list(measured_table.out.values()) == [reason] * 3
    assert list(measured_table.reasons) == [tasks[0].name]
    assert measured_table.reasons[tasks[0].name].startswith("it failed on 3 boards; ")
    assert measured_table.reasons[tasks[0].name].endswith(reason)
    assert [
        name for name, verdict in measured_table.verdicts.items() if verdict != "agreed"
    ] == list(poison)
    assert measured_table.times.keys() == truth.keys() - tasks[0].keys


def test_a_task_that_has_killed_a_board_waits_for_those_that_have_it() -> None:
    state, effects = run(FARM, *joined("x", "y", "z", "w"), (5.0, v.Lost("x", "its agent is lost")))
    assert effects == [v.Release("x")]
    state, effects = step(FARM, state, measured(2)[1], 6.0)
    assert [effect.board for effect in effects if isinstance(effect, v.Job)] == ["w"]


@settings(max_examples=15, deadline=None, database=None)
@given(
    seed=st.integers(0, 10**6),
    liars=st.dictionaries(st.integers(0, 11), st.sampled_from([1 / 3, 3.0]), max_size=2),
    dead=st.dictionaries(st.integers(0, 11), st.integers(1, 3), max_size=2),
    says_so=st.booleans(),
    per_task=st.sampled_from([3, 10]),
)
def test_whoever_dies_or_lies_the_table_is_that_of_one_board_within_its_error(
    seed: int, liars: dict[int, float], dead: dict[int, int], *, says_so: bool, per_task: int
) -> None:
    tasks, truth = tactics(30, per_task, seed)
    boards = {
        f"board-{n}": SimulatedBoard(dead.get(n, 0), liars.get(n, 1.0), says_so=says_so)
        for n in range(12)
    }
    simulation = Simulation(v.make_farm(tasks, v.Rules(lease_s=120.0)), boards, truth, seed)
    measured_table = simulation.run()
    assert set(measured_table.verdicts.values()) == {"agreed"}
    assert measured_table.times.keys() == truth.keys()
    assert measured_table.error < 0.2
    for key, row in measured_table.rows.items():
        assert len(row.boards) >= 3
        assert abs(row.time_us / truth[key] - 1.0) <= measured_table.error
        assert not any(int(board.removeprefix("board-")) in liars for board in row.boards)
    dropped = {
        name for name, board in boards.items() if board.dies_at and board.dies_at <= board.taken
    }
    assert measured_table.out.keys() == dropped
    assert all(0.2 < factor < 0.5 or 2.0 < factor < 5.0 for factor in measured_table.liars.values())
