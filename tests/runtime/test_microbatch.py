"""What `step` takes: cut into microbatches, or refused before anything runs."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipegraph.errors import BatchError
from pipegraph.runtime.batch import cut_target, placed
from pipegraph.runtime.microbatches import join_outputs
from pipegraph.runtime.pipeline import Pipeline
from tests.messages import refused
from tests.runtime.packages import Sketch, Stage, loss, write
from tests.runtime.pipelines import pipeline

SKETCH = Sketch(
    stages=(
        Stage("x, scale", "h", "self.one = nn.Linear(3, 3)", "return self.one(x) * scale"),
        Stage("h, y", "z", "self.two = nn.Linear(3, 3)", "return self.two(h) + y"),
    ),
    values={
        "x": ("float32", (4, 3), False),
        "y": ("float32", (4, 3), False),
        "scale": ("float32", (), False),
        "h": ("float32", (4, 3), True),
        "z": ("float32", (4, 3), True),
    },
    outputs="z",
    constants={"cached": False, "nothing": None},
    kwargs={"scale": "scale", "cached": "cached", "nothing": "nothing"},
)
X, Y, SCALE = torch.ones(8, 3), torch.zeros(8, 3), torch.tensor(2.0)


@pytest.fixture
def pipe(tmp_path: Path) -> Pipeline:
    return pipeline(write(SKETCH, tmp_path / "package"), microbatches=2, loss_fn=loss)


def test_arguments_may_go_by_position_or_by_name(pipe: Pipeline) -> None:
    expected = pipe.eval(X, Y, scale=SCALE)
    assert torch.equal(pipe.eval(X, y=Y, scale=SCALE), expected)
    assert torch.equal(pipe.eval(y=Y, x=X, scale=SCALE, cached=False, nothing=None), expected)


@pytest.mark.parametrize(
    ("args", "kwargs", "parts", "advice"),
    [
        ((X[:5], Y), {}, ["5 rows for 2 microbatches", "4 rows"], "8 rows, or 4 rows with microbatches=1"),
        ((X[:4], Y), {}, ["4 rows for 2 microbatches", "is 4 rows"], "8 rows, or microbatches=1"),
        ((X[:2], Y), {}, ["2 rows for 2 microbatches", "4 rows"], "8 rows, or 4 rows with microbatches=1"),
        ((X, Y[:, :2]), {}, ["y has the shape [8, 2]", "[4, 3]", "[8, 3]"], "that shape"),
        ((X.double(), Y), {}, ["x is float64", "x float32[4, 3]"], "x.to(torch.float32)"),
        ((X,), {}, ["y is missing"], "a tensor like y float32[4, 3]"),
        ((X, "y"), {}, ["y is 'y'", "tensor"], "a tensor like y float32[4, 3]"),
        ((X, Y, SCALE), {}, ["3 positional", "(x, y, scale=, cached=, nothing=)"], "2 of them"),
        ((X, Y), {"scales": SCALE}, ["'scales'", '"scale"'], "scale"),
        ((X, Y), {"x": X}, ["x was passed twice"], "one of the two"),
        ((X.to_sparse(), Y), {}, ["x is a sparse tensor"], "x.to_dense()"),
        ((torch.nested.nested_tensor([X], layout=torch.jagged), Y), {}, ["x is a nested tensor"], "x.to_padded_tensor"),
        ((X.to("meta"), Y), {}, ["x is", "meta"], "a CPU or a GPU"),
        ((X, Y), {"cached": True}, ["cached is True", "False"], "False, or capture"),
        ((X, Y), {"nothing": 3}, ["nothing is 3", "None"], "None, or capture"),
        ((X, Y), {"scale": torch.ones(2)}, ["scale has the shape [2]", "scale float32[]"], "0 dimensions"),
    ],
)
def test_what_the_package_was_not_made_for_is_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], parts: list[str], advice: str, pipe: Pipeline
) -> None:
    with refused(BatchError, *parts, advice=advice):
        pipe.step(*args, target=torch.zeros(8), **({"scale": SCALE} | kwargs))
    pipe.step(X, Y, target=torch.zeros(8), scale=SCALE)  # nothing was sent, so nothing is broken


def test_a_target_that_does_not_divide_is_refused(pipe: Pipeline) -> None:
    with refused(BatchError, "target[1] has 7 rows", "8", advice="8 rows"):
        pipe.step(X, Y, scale=SCALE, target=(torch.zeros(8), torch.zeros(7)))


def test_a_target_without_numbers_is_refused(pipe: Pipeline) -> None:
    for target, problem, advice in (
        (torch.zeros(8, device="meta"), "meta", "a CPU or a GPU"),
        (torch.zeros(8).to_sparse(), "sparse", "target.to_dense()"),
    ):
        with refused(BatchError, "target", problem, advice=advice):
            pipe.step(X, Y, scale=SCALE, target=target)


def test_nested_arguments(tmp_path: Path) -> None:
    folder = write(SKETCH, tmp_path / "package")
    pipe = pipeline(folder, microbatches=2, loss_fn=loss)
    nested = structs.replace(pipe.package.manifest, args=({"pair": ["x", "y"]}, None))
    (folder / "pipeline.json").write_text(nested.to_json())
    nested_pipe = pipeline(folder, microbatches=2, loss_fn=loss)
    expected = pipe.eval(X, Y, scale=SCALE)
    assert torch.equal(nested_pipe.eval({"pair": (X, Y)}, None, scale=SCALE), expected)
    with refused(BatchError, "argument 0['pair'] is 1 items", "2 items", advice="number of items"):
        nested_pipe.evaluate({"pair": (X,)}, None, scale=SCALE)
    with refused(BatchError, "argument 0 is ['other']", "['pair']", advice="such a dict"):
        nested_pipe.evaluate({"other": (X, Y)}, None, scale=SCALE)
    with refused(BatchError, "argument 1 was None", advice="capture the model with it"):
        nested_pipe.evaluate({"pair": (X, Y)}, X, scale=SCALE)


def test_outputs_join_along_their_rows() -> None:
    halves = [0.5, 0.5]
    assert join_outputs([torch.zeros(2, 3), torch.ones(2, 3)], 0, halves).shape == (4, 3)
    assert join_outputs([torch.zeros(3, 2), torch.ones(3, 1)], 1, halves).shape == (3, 3)
    unequal = [torch.zeros(2, 3), torch.ones(2, 5)]
    assert join_outputs(unequal, 0, halves) == unequal


def test_outputs_without_rows_come_back_as_they_are() -> None:
    table = torch.rand(5)
    assert join_outputs([table, table.clone()], None, [0.5, 0.5]) is table
    assert join_outputs([torch.tensor(2.5), torch.tensor(2.5)], None, [0.9, 0.1]) == 2.5
    assert join_outputs([torch.tensor(4), torch.tensor(4)], None, [0.5, 0.5]) == 4


def test_numbers_of_microbatches_are_weighed_by_rows() -> None:
    assert join_outputs([torch.tensor(1.0), torch.tensor(2.0)], None, [0.75, 0.25]) == 1.25
    assert join_outputs([torch.tensor(1.0)], None, [1.0]).dim() == 0
    assert join_outputs([torch.tensor(1), torch.tensor(2)], None, [0.5, 0.5]).tolist() == [1, 2]


class Pair(NamedTuple):
    labels: Tensor
    extras: list[Any]


@dataclass
class Record:
    labels: Tensor


@dataclass(slots=True)
class Slotted:
    labels: Tensor


def test_a_target_keeps_the_classes_of_its_containers() -> None:
    target = Pair(torch.arange(4), [torch.tensor(1.0), "mean", UserDict(b=torch.arange(4), a=None)])
    first, second = cut_target(target, 2, None, {4: [2, 2]})
    assert (type(first), type(first.extras), first.extras[1]) == (Pair, list, "mean")
    assert (first.labels.tolist(), second.labels.tolist()) == ([0, 1], [2, 3])
    assert (second.extras[2]["b"].tolist(), second.extras[2]["a"]) == ([2, 3], None)
    assert cut_target(None, 2, None, {4: [2, 2]}) == [None, None]


@pytest.mark.parametrize("make", [Record, Slotted, lambda tensor: {tensor}])
def test_a_target_that_hides_tensors_is_refused(make: Any) -> None:
    """They would not be cut, and every microbatch would be compared with all of them."""
    with refused(BatchError, "target['a']", "holds tensors", advice="a dict"):
        cut_target({"a": make(torch.zeros(4))}, 2, None, {4: [2, 2]})


def test_a_target_of_other_rows_than_the_batch_is_refused(pipe: Pipeline) -> None:
    """A loss would broadcast it, in silence or with a warning."""
    with refused(BatchError, "target has 2 rows", "8", advice="8 rows"):
        pipe.step(X, Y, scale=SCALE, target=torch.zeros(2))


@pytest.mark.parametrize(("device", "is_awaited"), [("cpu", True), ("meta", False)])
def test_only_copies_to_another_memory_than_the_hosts_are_not_waited_for(device: str, is_awaited: bool) -> None:
    """A copy from a GPU that nobody waits for is read before it is there."""

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default:
                waited.append(not (kwargs or {}).get("non_blocking", False))
            return function(*args, **(kwargs or {}))

    waited: list[bool] = []
    with Copies():
        assert placed(torch.ones(2), torch.device(device), torch.bfloat16).dtype == torch.bfloat16
    assert waited == [is_awaited]
    unmoved = torch.ones(2)
    assert placed(unmoved, None) is unmoved
