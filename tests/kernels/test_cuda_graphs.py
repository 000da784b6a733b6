"""Which kernels are recorded, in which memory, and when none are. A call that is repeated stands for a CUDA graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.errors import PipegraphError
from pipegraph.kernels import StageKernels, make, maker, stage_run
from pipegraph.kernels.stage_run import SavedValues
from tests.kernels.cases import STAGES, build
from tests.kernels.recording import CallRecorder
from tests.kernels.stages import Function, Layers, linear, tokens, x
from tests.messages import refused, warned


class Recorded:
    """Compares a stage with recorded kernels to the same stage under autograd.

    Attributes:
        events: the recordings and replays, in order.
    """

    def __init__(
        self, stage: nn.Module, inputs: Sequence[Any], fails: Callable[[int], bool] | None = None, **options: Any
    ) -> None:
        self.events: list[str] = []
        self.stage, self.reference = stage, copy.deepcopy(stage)
        needs_grad = [isinstance(argument, Tensor) and argument.is_floating_point() for argument in inputs]
        recorder = partial(CallRecorder, stage, self.events, fails)
        self.kernels: StageKernels = maker("eager", recorder=recorder, **options)(stage, needs_grad, (True,) * 8, None)
        self.autograd = make("autograd", self.reference, needs_grad, (True,) * 8)
        self.inputs = inputs

    def step(self, kinds: str = "IB", inputs: Sequence[Any] | None = None) -> None:
        """Compare a step with autograd's: all microbatches are in flight at a time, one for each of `kinds`."""
        batches = [[_random_like(argument) for argument in (inputs or self.inputs)] for _ in kinds]
        self.kernels.begin()
        seeds = torch.randint(2**31, (len(kinds),)).tolist()
        forwards, references = (self._forwards(kernels, batches, seeds) for kernels in (self.kernels, self.autograd))
        for kind, forward, expected in zip(kinds, forwards, references, strict=True):
            assert_close(forward.outputs, expected.outputs)
            gradients = [
                torch.randn_like(output) if isinstance(output, Tensor) and output.is_floating_point() else None
                for output in expected.outputs
            ]
            expected_gradients = self.autograd.backward(expected.saved, gradients)
            if kind == "I":
                got = self.kernels.input_backward(forward.saved, gradients)
                self.kernels.weight_backward(forward.saved)
            else:
                got = self.kernels.backward(forward.saved, gradients)
            assert_close(got, expected_gradients, rtol=1e-5, atol=1e-5)
        self.compare()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.zero_grad()

    def compare(self) -> None:
        expected = dict(self.reference.named_parameters())
        for name, parameter in self.stage.named_parameters():
            assert (parameter.grad is None) == (expected[name].grad is None), name
            assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert_close(dict(self.stage.named_buffers()), dict(self.reference.named_buffers()))

    def zero_grad(self) -> None:
        self.stage.zero_grad()
        self.reference.zero_grad()

    def counted(self) -> tuple[int, int]:
        """How often was recorded, and how often replayed, since the last call."""
        counts = self.events.count("recorded"), self.events.count("replayed")
        self.events.clear()
        return counts

    def _forwards(self, kernels: StageKernels, batches: Sequence[Sequence[Any]], seeds: Sequence[int]) -> list[Any]:
        forwards = []
        for batch, seed in zip(batches, seeds, strict=True):
            torch.manual_seed(seed)
            forwards.append(kernels.forward(batch))
        return forwards


def _random_like(value: Any) -> Any:
    return torch.randn_like(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def layers() -> Recorded:
    return Recorded(Layers(2), (x,))


@pytest.mark.parametrize("name", [name for name in STAGES if name != "an RNN"])  # which is left to autograd
def test_as_autograd(name: str) -> None:
    stage, inputs = build(name)
    recorded = Recorded(stage, inputs)
    for _ in range(4):
        recorded.step("IIB")
        recorded.zero_grad()
    recorded.step("IIB")
    recorded.step("BII")


def test_each_microbatch_in_flight_is_recorded_once() -> None:
    recorded = layers()
    recorded.step("III")
    recorded.zero_grad()
    for _ in range(2):
        recorded.step("III")
        recorded.zero_grad()
    recorded.counted()
    recorded.step("III")
    assert recorded.counted() == (0, 9)
    recorded.zero_grad()
    recorded.step("IIII")  # one more in flight than before
    assert recorded.counted() == (3, 12)
    recorded.zero_grad()
    recorded.step("IIIB")
    assert recorded.counted()[0] == 0  # B is launched once before it is recorded
    recorded.zero_grad()
    recorded.step("IIIB")
    assert recorded.counted()[0] == 1


def test_gradients_stay_where_they_are() -> None:
    recorded = layers()
    weight = recorded.stage.head.weight  # type: ignore[union-attr]
    places = set()
    for _ in range(5):
        recorded.step("II")
        assert isinstance(weight.grad, Tensor)
        places.add(weight.grad.data_ptr())
        recorded.zero_grad()
    assert len(places) == 2  # the first ones were made before anything was recorded


def test_a_gradient_that_someone_keeps_is_not_written_to() -> None:
    recorded = layers()
    for _ in range(3):
        recorded.step()
        recorded.zero_grad()
    recorded.step()
    weight = recorded.stage.head.weight  # type: ignore[union-attr]
    gradient = weight.grad.flatten()  # type: ignore[union-attr]
    gradient_before = gradient.clone()
    recorded.zero_grad()
    recorded.step()
    assert_close(gradient, gradient_before, rtol=0, atol=0)


def test_accumulation_over_steps_and_a_gradient_of_the_users_own() -> None:
    recorded = layers()
    for _ in range(3):
        recorded.step()
    for module in (recorded.stage, recorded.reference):
        module.head.weight.grad = module.head.weight.grad.clone()  # type: ignore[union-attr]
    recorded.step()
    recorded.step()


def test_what_w_reads_lies_where_i_left_it() -> None:
    """I of this stage adds to the gradient of a bias, and so is recorded again when that has moved."""
    recorded = Recorded(*build("a constant"))
    recorded.steps(3)
    for _ in range(3):
        recorded.step("II")
        moved = [bias for bias in recorded.stage.parameters() if bias.dim() == 1]
        for parameter in moved:
            parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]
    recorded.counted()
    recorded.step("II")
    assert recorded.counted()[0] > 0


def test_gradients_that_always_move_are_recorded_a_few_times_only() -> None:
    recorded = layers()
    for _ in range(40):
        recorded.step("B")
        for parameter in recorded.stage.parameters():
            parameter.grad = torch.empty(999)[:0].new_empty(parameter.shape).copy_(parameter.grad)  # type: ignore[arg-type]
    assert recorded.counted()[0] <= 1 + 16


def test_tensors_that_are_replaced_are_recorded_anew() -> None:
    recorded = layers()
    for _ in range(3):
        recorded.step()
    recorded.zero_grad()
    with torch.no_grad():
        for parameter, reference in zip(recorded.stage.parameters(), recorded.reference.parameters(), strict=True):
            reference.mul_(2)
            parameter.data = parameter.data * 2
    for _ in range(3):
        recorded.step()
    recorded.stage.layers[0].requires_grad_(False)  # type: ignore[index,union-attr]
    recorded.reference.layers[0].requires_grad_(False)  # type: ignore[index,union-attr]
    recorded.zero_grad()
    for _ in range(3):
        recorded.step()


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_run, "SIZES", 3)
    recorded = layers()
    for rows in (2, 3, 4, 5, 6, 2, 3, 4, 5, 6):
        recorded.step("II", (torch.randn(rows, 8),))
    recorded.counted()
    for rows in (2, 3, 4):
        recorded.step("II", (torch.randn(rows, 8),))
    assert recorded.counted()[1] == 18
    recorded.step("II", (torch.randn(6, 8),))
    assert recorded.counted() == (0, 0)


def test_what_cannot_be_recorded_is_launched() -> None:
    for number in (1, 2, 3):
        recorded = Recorded(Layers(2), (x,), fails=lambda done, number=number: done >= number)  # type: ignore[misc]
        with warned("Layers", "CUDA graph", "stream is capturing"):
            recorded.steps(4)
        assert not recorded.kernels._kernels._graphs._graphs  # type: ignore[attr-defined]  # which would keep memory
        recorded.counted()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recorded.step()
        assert recorded.counted() == (0, 0)


class OfAGpu(CallRecorder):
    """To which all that is here is in CPU memory."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__(stage)
        self.device = torch.device("cuda")


@pytest.mark.parametrize("name", ["layers", "a constant"])
def test_what_is_in_the_memory_of_the_host_is_launched(name: str) -> None:
    """A graph would continue with what was there when it was recorded."""
    stage, inputs = build(name)
    kernels = maker("eager", recorder=partial(OfAGpu, stage))(stage, (True,), (True,), None)
    kernels.forward(inputs)
    with warned("CUDA graph", "primals_0", "not on the GPU"):
        forward = kernels.forward(inputs)
    assert_close(forward.outputs[0], stage(*inputs).detach())


def test_inputs_whose_elements_share_memory() -> None:
    recorded = layers()
    for _ in range(3):
        rows = torch.randn(8)
        recorded.kernels.begin()
        forward = recorded.kernels.forward((rows.expand(4, 8),))
        assert_close(forward.outputs[0], recorded.reference(rows.expand(4, 8)).detach(), rtol=1e-5, atol=1e-5)
        del forward
    assert recorded.counted() == (1, 2)


def test_sparse_gradients_stay_sparse() -> None:
    stage = Function(lambda s, x: s.embed(x), embed=nn.Embedding(5, 8, sparse=True))
    recorded = Recorded(stage, (tokens,))
    for _ in range(4):
        recorded.step("I")
        assert stage.embed.weight.grad.is_sparse  # type: ignore[union-attr]
        recorded.zero_grad()


def test_evaluation_has_graphs_of_its_own() -> None:
    recorded = layers()
    for number in range(4):
        with torch.inference_mode(number % 2 == 0):
            recorded.kernels.begin()
            forward = recorded.kernels.forward((x,), differentiable=False)
            again = recorded.kernels.forward((x + 1,), differentiable=False)
        assert_close(forward.outputs[0], recorded.reference(x).detach(), rtol=1e-5, atol=1e-5)
        assert_close(again.outputs[0], recorded.reference(x + 1).detach(), rtol=1e-5, atol=1e-5)
        recorded.step()
        recorded.zero_grad()


def test_memory_is_used_again_only_when_its_microbatch_is_gone() -> None:
    recorded = layers()
    recorded.step("I")
    recorded.step("I")
    recorded.kernels.begin()
    saved = [recorded.kernels.forward((x,)).saved for _ in range(3)]
    assert all(isinstance(values, SavedValues) for values in saved)
    assert len({id(values.graphs) for values in saved}) == 3
    first = saved.pop(0).graphs
    assert recorded.kernels.forward((x,)).saved.graphs is first


def test_outputs_are_not_overwritten() -> None:
    recorded = Recorded(Function(lambda s, x: (s.a(x), x), **linear("a")), (x,))
    recorded.step("I")
    recorded.step("I")
    recorded.kernels.begin()
    first = recorded.kernels.forward((x,))
    outputs, outputs_before = first.outputs, [output.clone() for output in first.outputs]
    del first  # and what it has saved
    recorded.kernels.forward((x + 1,))
    assert recorded.counted() == (3, 5)
    assert_close(list(outputs), outputs_before, rtol=0, atol=0)


def test_a_step_after_retrace_and_in_another_mode() -> None:
    recorded = Recorded(*build("batch norm"))
    for _ in range(3):
        recorded.step()
    recorded.stage.eval()
    recorded.reference.eval()
    for _ in range(3):
        recorded.step()
    recorded.kernels.retrace()
    for _ in range(3):
        recorded.step()


def test_autograd_kernels_cannot_be_recorded() -> None:
    with refused(PipegraphError, 'kernels="autograd"', advice='kernels="inductor"'):
        maker("autograd", recorder=partial(CallRecorder, nn.Identity()))
