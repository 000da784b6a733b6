"""What torch-tb-profiler makes of the adapted events of a GPU, by the plugin's own classes."""

from __future__ import annotations

from typing import Any

import pytest

from pipegraph.tracing.recording.tensorboard_plugin import adapt_events
from tests.tracing.events import Event, arguments, complete, gpu_steps

pytest.importorskip("torch_tb_profiler", reason="pip install pipegraph[tensorboard]")
pytestmark = pytest.mark.filterwarnings("ignore:The copy keyword is deprecated")  # in the plugin, by pandas 3


def profile_of(events: list[Event]) -> Any:
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    devices = [{"id": 0, "name": "a GPU", "totalGlobalMem": 2**30, "computeMajor": 9, "computeMinor": 0}]
    data = RunProfileData.from_json("rank_01", 1, {"deviceProperties": devices, "traceEvents": events})
    return RunGenerator("rank_01", 1, data).generate_run_profile()


def test_gpu_time_is_put_down_to_the_action_and_its_operator() -> None:
    profile = profile_of(adapt_events(gpu_steps(), arguments))
    rows = {row["name"]: row for row in profile.operation_table_by_name["data"]}
    total = {name: (row["calls"], row["device_total_duration"]) for name, row in rows.items()}
    assert total == {"F stage 1 microbatch 0": (2, 160), "aten::mm": (2, 100)}
    assert [row[0] for row in profile.overview["steps"]["rows"]] == ["1", "2"]
    assert [row[:3] for row in profile.kernel_table["data"]["rows"]] == [["gemm", "No", 2], ["fused", "No", 2]]


def test_without_a_repair_it_is_not() -> None:
    """What each repair is for: should the plugin come to do without, this fails and the repair can go."""
    rows = profile_of(gpu_steps()).operation_table_by_name["data"]
    assert [(row["name"], row["device_total_duration"]) for row in rows] == [("aten::mm", 0)]
    assert len(profile_of(gpu_steps()).overview["steps"]["rows"]) == 4
    with pytest.raises(AttributeError):
        profile_of([*gpu_steps(), complete(None, "strange", 1.0, 1.0)])
    assert profile_of(adapt_events([*gpu_steps(), complete(None, "strange", 1.0, 1.0)], arguments)).views
