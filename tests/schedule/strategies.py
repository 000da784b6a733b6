"""What hypothesis draws: schedules of all names."""

from hypothesis import strategies as st

from pipegraph.schedule import Schedule, build, lower, names
from pipegraph.schedule.recipes import find_recipe


@st.composite
def schedules(
    draw: st.DrawFn,
    name: str | None = None,
    ranks: int = 5,
    microbatches: int = 8,
    lowered: bool | None = None,
) -> Schedule:
    """A schedule of this or any name, on up to ``ranks`` ranks, with up to ``microbatches`` microbatches.

    The number of microbatches is raised to the next one that the schedule allows.

    ``lowered``: whether it has transfers; None: either.
    """
    name = draw(st.sampled_from(names())) if name is None else name
    on = draw(st.integers(1, ranks))
    count = draw(st.integers(1, microbatches))
    recipe = find_recipe(name)
    while recipe.rule(on, count):
        count += 1
    chunks = draw(st.integers(1, 3)) if recipe.any_chunks else None
    schedule = build(name, on, count, chunks)
    has_transfers = draw(st.booleans()) if lowered is None else lowered
    return lower(schedule) if has_transfers else schedule
