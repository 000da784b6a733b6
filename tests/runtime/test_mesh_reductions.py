"""Gradients are reduced once a step, over shards and replicas together, beside what is left of the step."""

from __future__ import annotations

from pathlib import Path

from tests.runtime import mesh_reductions, ranks
from tests.runtime.meshes import perceptrons
from tests.runtime.packages import write

GROUPS = 3
"""of a sharded stage: its two layers, and what is left"""


def test_gradients_are_reduced_when_a_stage_is_done(tmp_path: Path) -> None:
    """One rank of the schedule has both stages. The last of them is done first."""
    folder = str(write(perceptrons(2, tied=False), tmp_path / "perceptrons"))
    shapes = [{"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4}]
    for found in ranks.run(mesh_reductions.reduce, 4, folder, shapes):
        assert isinstance(found, list), found
        for each, messages in zip(found, (GROUPS, 1), strict=True):
            begun = each["begun"]
            last = max(place for place, name in enumerate(begun) if name[:2] in ("0B", "0I", "0W"))
            assert begun.count("1REDUCE_GRAD") == begun.count("0REDUCE_GRAD") == 1
            assert begun.index("1REDUCE_GRAD") < last < begun.index("0REDUCE_GRAD")
            for stage in range(2):
                sent = each["sent"][f"{stage}REDUCE_GRAD"]
                assert [(message.what, message.ranks) for message in sent] == [("all_reduce", (0, 1, 2, 3))] * messages
        assert found[0]["counts"]["allreduce_"] == 2 * GROUPS  # nothing is left for the end of the step
