"""Every named schedule as a literal grid."""

import pytest

from pipegraph.schedule import build, names

GRIDS = {
    ("gpipe", 3, 3, None): """\
gpipe: 3 ranks, 3 stages, 3 microbatches
rank 0  0F0 0F1 0F2                 0B0 0B1 0B2
rank 1      1F0 1F1 1F2         1B0 1B1 1B2
rank 2          2F0 2F1 2F2 2B0 2B1 2B2""",
    ("gpipe", 1, 2, None): """\
gpipe: 1 ranks, 1 stages, 2 microbatches
rank 0  0F0 0F1 0B0 0B1""",
    ("1f1b", 3, 4, None): """\
1f1b: 3 ranks, 3 stages, 4 microbatches
rank 0  0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3
rank 1      1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3
rank 2          2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
    ("1f1b", 4, 1, None): """\
1f1b: 4 ranks, 4 stages, 1 microbatches
rank 0  0F0                         0B0
rank 1      1F0                 1B0
rank 2          2F0         2B0
rank 3              3F0 3B0""",
    ("eager-1f1b", 3, 6, None): """\
eager-1f1b: 3 ranks, 3 stages, 6 microbatches
rank 0  0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1     0B2     0B3     0B4     0B5
rank 1      1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3     1B4     1B5
rank 2          2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5""",
    ("eager-1f1b", 3, 2, None): """\
eager-1f1b: 3 ranks, 3 stages, 2 microbatches
rank 0  0F0 0F1             0B0     0B1
rank 1      1F0 1F1     1B0     1B1
rank 2          2F0 2B0 2F1 2B1""",
    ("interleaved-1f1b", 2, 4, None): """\
interleaved-1f1b: 2 ranks, 4 stages, 4 microbatches
rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3""",
    ("interleaved-1f1b", 2, 2, 3): """\
interleaved-1f1b: 2 ranks, 6 stages, 2 microbatches
rank 0  0F0 0F1 2F0 2F1 4F0 4F1     4B0     4B1 2B0 2B1 0B0 0B1
rank 1      1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1 3B0 3B1 1B0 1B1""",
    ("interleaved-1f1b", 2, 2, 1): """\
interleaved-1f1b: 2 ranks, 2 stages, 2 microbatches
rank 0  0F0 0F1     0B0     0B1
rank 1      1F0 1B0 1F1 1B1""",
    ("looped-bfs", 2, 3, None): """\
looped-bfs: 2 ranks, 4 stages, 3 microbatches
rank 0  0F0 0F1 0F2 2F0 2F1 2F2         2B2 2B1 2B0 0B2 0B1 0B0
rank 1      1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0""",
    ("looped-bfs", 2, 1, 3): """\
looped-bfs: 2 ranks, 6 stages, 1 microbatches
rank 0  0F0     2F0     4F0         4B0     2B0     0B0
rank 1      1F0     3F0     5F0 5B0     3B0     1B0""",
    ("looped-bfs", 3, 2, 1): """\
looped-bfs: 3 ranks, 3 stages, 2 microbatches
rank 0  0F0 0F1                 0B1 0B0
rank 1      1F0 1F1         1B1 1B0
rank 2          2F0 2F1 2B1 2B0""",
    ("zb-h1", 3, 4, None): """\
zb-h1: 3 ranks, 3 stages, 4 microbatches
rank 0  0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
rank 1      1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3""",
    ("zb-h1", 3, 1, None): """\
zb-h1: 3 ranks, 3 stages, 1 microbatches
rank 0  0F0                 0I0 0W0
rank 1      1F0         1I0 1W0
rank 2          2F0 2I0 2W0""",
    ("zb-h2", 3, 6, None): """\
zb-h2: 3 ranks, 3 stages, 6 microbatches
rank 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
rank 1      1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5""",
    ("zb-h2", 3, 2, None): """\
zb-h2: 3 ranks, 3 stages, 2 microbatches
rank 0  0F0 0F1             0I0 0W0 0I1 0W1
rank 1      1F0 1F1     1I0     1I1 1W0 1W1
rank 2          2F0 2I0 2F1 2I1 2W0 2W1""",
    ("interleaved-zb", 2, 4, None): """\
interleaved-zb: 2 ranks, 4 stages, 4 microbatches
rank 0  0F0 0F1 2F0 2F1     2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
rank 1      1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3""",
    ("interleaved-zb", 3, 3, 1): """\
interleaved-zb: 3 ranks, 3 stages, 3 microbatches
rank 0  0F0 0F1 0F2         0I0 0W0 0I1 0W1 0I2 0W2
rank 1      1F0 1F1     1I0 1F2 1I1 1W0 1I2 1W1 1W2
rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2""",
    ("zb-v", 2, 4, None): """\
zb-v: 2 ranks, 4 stages, 4 microbatches
rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3""",
    ("zb-v", 1, 1, None): """\
zb-v: 1 ranks, 2 stages, 1 microbatches
rank 0  0F0 1F0 1I0 1W0 0I0 0W0""",
    ("v-half", 2, 4, None): """\
v-half: 2 ranks, 4 stages, 4 microbatches
rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 0W0 3W1 3F2 0F3 3I2 0I1 0W1 3W2 3F3 3I3 0I2 3W3 0I3 0W2 0W3
rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 2W1 1I1 1W1 1F3 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3""",
    ("v-min", 2, 4, None): """\
v-min: 2 ranks, 4 stages, 4 microbatches
rank 0  0F0         3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 0F3 0I2 0W2 3F3 3I3 3W3     0I3 0W3
rank 1      1F0 2F0         2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 1F3 2F3 2W2 1W2 2I3 1I3 2W3 1W3""",
    ("v-min", 1, 2, None): """\
v-min: 1 ranks, 2 stages, 2 microbatches
rank 0  0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1""",
    ("dualpipe-v", 2, 4, None): """\
dualpipe-v: 2 ranks, 4 stages, 4 microbatches
rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2     3F3 0B1 3B3 0I2 0W2 0I3 0W3
rank 1      1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2     2I3 1I3 2W3 1W3""",
    ("dualpipe-v", 1, 2, None): """\
dualpipe-v: 1 ranks, 2 stages, 2 microbatches
rank 0  0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1""",
    ("forward", 3, 2, None): """\
forward: 3 ranks, 3 stages, 2 microbatches
rank 0  0F0 0F1
rank 1      1F0 1F1
rank 2          2F0 2F1""",
}


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), GRIDS)
def test_grid(name: str, ranks: int, microbatches: int, chunks: int | None) -> None:
    assert str(build(name, ranks, microbatches, chunks)) == GRIDS[name, ranks, microbatches, chunks]


def test_every_name_has_a_grid() -> None:
    assert {name for name, *_ in GRIDS} == {*names()}
