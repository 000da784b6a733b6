"""Running the kernels of a stage's variants: each launched by itself, or as CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from pipegraph.kernels.autocast import without_autograd_and_autocast
from pipegraph.kernels.cuda_graphs.microbatch_graphs import MicrobatchGraphs, Values
from pipegraph.kernels.cuda_graphs.recorder import MakeRecorder
from pipegraph.kernels.graphs.block_operation import GradientMask
from pipegraph.kernels.module_state import accumulate, gradient_in_place
from pipegraph.kernels.saved_values import SavedValues
from pipegraph.kernels.stage_graphs import StageGraphs
from pipegraph.kernels.stage_variant import StageVariant
from pipegraph.kernels.symbolic.symbolic_sizes import Numbers


class StageRun:
    """Runs F, I, W and B of a stage's variants.

    Args:
        name: of the stage.
        recorder: makes what records kernels as CUDA graphs; None to launch them one by one.
    """

    def __init__(self, name: str, recorder: MakeRecorder | None) -> None:
        self._graphs = None if recorder is None else StageGraphs(name, recorder)

    def begin(self, computed: Sequence[Tensor]) -> None:
        """Note where the tensors are with which the stage computes. Called before each step."""
        if self._graphs is not None:
            self._graphs.begin(computed)

    def forget(self) -> None:
        """Forget all graphs."""
        if self._graphs is not None:
            self._graphs.clear()

    def forward(
        self, variant: StageVariant, numbers: Numbers, computed: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Values, MicrobatchGraphs | None]:
        """Run F.

        Args:
            computed: what this rank computes with in the place of the stage's parameters and buffers.
            tensors: those of the call.

        Returns:
            What `StageVariant.forward` does, and the graphs that were used.
        """

        def launch(inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Values]:
            return variant.forward([*computed, *inputs], numbers)

        graphs = None if self._graphs is None else self._graphs.find(variant, numbers, launch, tensors)
        outputs, values = launch(tensors) if graphs is None else graphs.forward(tensors)
        return outputs, values, graphs

    def backward(self, saved: SavedValues, kind: str, state: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Run I, W or B, add its gradients to `.grad` of the stage's tensors, and return those of the inputs."""
        variant, numbers, mask = saved.variant, saved.numbers, saved.mask
        outputs = set(variant.divided.graph(kind, mask).outputs)
        names = [name if name in outputs else None for name in variant.divided.backward(mask).gradients]

        def launch(values: Values) -> tuple[tuple[Tensor | None, ...], Values]:
            return _launch(variant, numbers, kind, mask, state, names, values)

        with without_autograd_and_autocast():
            if self._graphs is None:
                of_inputs, saved.values = launch(saved.values)
            else:
                numbered = zip(range(len(names)), state, names, strict=False)  # the state's names come first
                parameters = {number: tensor for number, tensor, name in numbered if name is not None}
                of_inputs = self._graphs.backward(saved, (kind, mask), parameters, launch)
        return of_inputs


def _launch(
    variant: StageVariant,
    numbers: Numbers,
    kind: str,
    mask: GradientMask,
    state: Sequence[Tensor],
    names: Sequence[str | None],
    values: Values,
) -> tuple[tuple[Tensor | None, ...], Values]:
    """Launch I, W or B on values, which are emptied. Adds to `.grad` of the stage's tensors.

    Args:
        names: of the gradient of each primal, if this kernel computes it.

    Returns:
        The gradients of the inputs, and what W reads after I.
    """
    weight = variant.divided.backward(mask).weight
    read_by_w = weight.inputs if kind == "I" and weight is not None else ()
    pairs = zip(state, names, strict=False)
    of_state = [(tensor, name) for tensor, name in pairs if name is not None]
    several = Counter(names)
    sums = {
        name: dst for tensor, name in of_state if several[name] == 1 and (dst := gradient_in_place(tensor)) is not None
    }
    results = variant.backward(kind, mask, numbers, values, read_by_w, sums)
    of_inputs = variant.of_inputs(results, names)
    gradient_pairs = ((tensor, results[name]) for tensor, name in of_state if results[name] is not sums.get(name))
    accumulate(gradient_pairs, shared=of_inputs)
    return of_inputs, {name: results[name] for name in read_by_w}
