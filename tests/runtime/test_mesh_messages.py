"""A step over a mesh sends the messages of its schedule, reduces gradients once, and leaves only shards in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegraph.package import Package
from tests.runtime import mesh_messages, meshes, ranks
from tests.runtime.packages import Reference, write

GROUPS = 3
"""of a sharded stage: its two layers, and the other parameters"""


def test_gradients_are_reduced_when_a_stage_is_done(tmp_path: Path) -> None:
    """One rank of the schedule has both stages. The last of them is done first."""
    folder = str(write(meshes.perceptrons(2, tied=False), tmp_path / "perceptrons"))
    shapes = [{"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4}]
    for reports in ranks.run(mesh_messages.reduce, 4, folder, shapes):
        assert isinstance(reports, list), reports
        for report, messages in zip(reports, (GROUPS, 1), strict=True):
            begun = report["begun"]
            last = max(place for place, name in enumerate(begun) if name[:2] in ("0B", "0I", "0W"))
            assert begun.count("1REDUCE_GRAD") == begun.count("0REDUCE_GRAD") == 1
            assert begun.index("1REDUCE_GRAD") < last < begun.index("0REDUCE_GRAD")
            for stage in range(2):
                sent = report["sent"][f"{stage}REDUCE_GRAD"]
                assert [(message.way, message.ranks) for message in sent] == [("all_reduce", (0, 1, 2, 3))] * messages
        assert reports[0]["counts"]["allreduce_"] == 2 * GROUPS  # nothing is left for the end of the step


@pytest.mark.parametrize(("resident", "gathers"), [(None, 2), pytest.param(1, None, marks=pytest.mark.slow)])
def test_messages_are_those_of_the_schedule_and_rest_takes_no_more_than_parts(
    resident: int | None, gathers: int | None, tmp_path: Path
) -> None:
    folder = str(write(meshes.perceptrons(4, tied=False), tmp_path / "perceptrons"))
    total = sum(4 * parameter.numel() for parameter in Reference(Package.open(folder)).parameters.values())
    for messages, placed, whole_bytes, parts in ranks.run(mesh_messages.count_messages, 4, folder, resident):
        assert messages["_allgather_base_"] == placed["UNSHARD"]
        assert messages["alltoall_base_"] == placed["REDUCE_GRAD"] == 6
        assert messages.keys() == {"_allgather_base_", "alltoall_base_"}
        assert gathers is None or placed["UNSHARD"] == 3 * gathers
        assert whole_bytes == 0
        assert parts <= total / 4 * 1.2  # half of half the stages; the first and the last one have more than others


@pytest.mark.slow
def test_parts_of_the_sequence_take_as_much_less_on_each_link(tmp_path: Path) -> None:
    """Two ranks divide the sequence, so that each sends half of a value, and of its gradient."""
    folder = str(write(meshes.perceptrons(2), tmp_path / "perceptrons"))
    for full_bytes, part in ranks.run(mesh_messages.sent_bytes, 4, folder):
        assert full_bytes == 2 * part == 4 * 8 * meshes.LENGTH * meshes.WIDTH
