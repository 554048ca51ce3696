"""The arena: no two living tensors share a byte, and bytes are reused."""

from hypothesis import given
from hypothesis import strategies as st

from toolkit.memory import ALIGNMENT_BYTES, Lifetime, plan_memory


def test_tensors_whose_lives_do_not_meet_share_bytes() -> None:
    plan = plan_memory([Lifetime("a", 1000, 0, 1), Lifetime("b", 800, 2, 3)])
    assert plan.arena_bytes == 1000
    assert {buffer.offset for buffer in plan.buffers} == {0}


def test_tensors_that_live_together_lie_apart() -> None:
    plan = plan_memory([Lifetime("a", 1000, 0, 2), Lifetime("b", 800, 2, 3)])
    assert [(b.tensor, b.offset) for b in plan.buffers] == [("a", 0), ("b", 1024)]
    assert plan.arena_bytes == 1824


def test_nothing_needs_nothing() -> None:
    assert plan_memory([]).arena_bytes == 0


lives = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 9), st.integers(0, 9)), max_size=20
).map(
    lambda rows: [
        Lifetime(f"t{i}", size, min(a, b), max(a, b)) for i, (size, a, b) in enumerate(rows)
    ]
)


@given(lives)
def test_no_living_tensors_overlap_and_the_bound_is_respected(items: list[Lifetime]) -> None:
    plan = plan_memory(items)
    place = {buffer.tensor: buffer for buffer in plan.buffers}
    assert set(place) == {item.tensor for item in items}
    for one in items:
        assert place[one.tensor].offset % ALIGNMENT_BYTES == 0
        for lifetime in items:
            meet = lifetime.first <= one.last and one.first <= lifetime.last
            if one is not lifetime and meet:
                a, b = place[one.tensor], place[lifetime.tensor]
                assert a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
    live = [sum(i.bytes for i in items if i.first <= t <= i.last) for t in range(10)]
    assert plan.arena_bytes >= max(live)
    assert plan.arena_bytes <= sum(-(-i.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for i in items)


@given(lives)
def test_the_plan_does_not_depend_on_the_order_of_the_tensors(items: list[Lifetime]) -> None:
    assert plan_memory(items) == plan_memory(list(reversed(items)))
