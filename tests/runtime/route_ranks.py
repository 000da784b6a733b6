"""What ranks run in tests of the routes of values: functions for `ranks.run`."""

from __future__ import annotations

from pathlib import Path

from pipegraph.schedule import Kind
from tests.runtime.packages import Sketch, Stage
from tests.runtime.parity import assert_parity
from tests.runtime.pipelines import pipeline


def dense(stages: int, width: int = 8) -> Sketch:
    """Each stage takes what all earlier stages made, as a model with attention residuals does."""
    wide = ("float32", (2, width), True)
    values = {"x": ("float32", (2, width), False)}
    parts = []
    for index in range(stages):
        inputs = [f"h{earlier}" for earlier in range(index)] or ["x"]
        init = f"self.layer{index} = nn.Linear({width}, {width})"
        forward = f"return torch.tanh(self.layer{index}({' + '.join(inputs)}))"
        parts.append(Stage(", ".join(inputs), f"h{index}", init, forward))
        values[f"h{index}"] = wide
    return Sketch(tuple(parts), values, f"h{stages - 1}")


def branches(width: int = 8) -> Sketch:
    """Stages 1 and 2 take what stage 0 made and not each other's; stage 3 takes both."""
    wide = ("float32", (2, width), True)
    return Sketch(
        (
            Stage("x", "a", f"self.zero = nn.Linear({width}, {width})", "return self.zero(x)"),
            Stage("a", "b", f"self.one = nn.Linear({width}, {width})", "return torch.tanh(self.one(a))"),
            Stage("a", "c", f"self.two = nn.Linear({width}, {width})", "return torch.sin(self.two(a))"),
            Stage("b, c", "d", f"self.three = nn.Linear({width}, {width})", "return self.three(b * c)"),
        ),
        {"x": ("float32", (2, width), False), "a": wide, "b": wide, "c": wide, "d": wide},
        "d",
    )


def parity(rank: int, folder: str, schedule: str) -> int:
    """Compare with plain autograd; return how many transfers the rank sends for each microbatch."""
    assert_parity(Path(folder), schedule, steps=3, accumulate=2)
    pipe = pipeline(folder, schedule, microbatches=4)
    executor = pipe._runner.executors.training_executors[0]
    sends = [action for action in executor.actions if action.kind in (Kind.SEND_F, Kind.SEND_B)]
    return len(sends) // 4
