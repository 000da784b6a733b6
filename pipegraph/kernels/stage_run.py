"""Running the kernels of a stage's variants: each launched by itself, or as CUDA graphs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pipegraph.kernels.autocast import without_autograd_and_autocast
from pipegraph.kernels.blocks.divided_function import text_of
from pipegraph.kernels.cuda_graphs import Backward, KeptGradients, MakeRecorder, MicrobatchGraphs, Recorder, Values
from pipegraph.kernels.graphs.block_operation import GradientMask
from pipegraph.kernels.stage_variant import StageVariant
from pipegraph.kernels.symbolic_sizes import Numbers
from pipegraph.kernels.trace_guard import accumulate, gradient_in_place, with_strides

# ---- saved values ----------------------------------------------------------------------------------------------------
# What F of a traced stage leaves to the backward of the same microbatch.


class SavedValues:
    """The values that the backward of one microbatch reads, by name. After I: those that W reads.

    Attributes:
        mask: for which outputs a gradient has arrived.
        arrived: the names of these gradients, until a kernel has read them.
        graphs: the CUDA graphs that hold the memory of all other values; None if kernels are launched one by one.
        replayed: the key of the graph of I if it has computed the values; None if F has.
    """

    __slots__ = ("__weakref__", "arrived", "graphs", "mask", "numbers", "replayed", "values", "variant")

    def __init__(
        self, variant: StageVariant, numbers: Numbers, values: Values, graphs: MicrobatchGraphs | None = None
    ) -> None:
        self.variant, self.numbers, self.values, self.graphs = variant, numbers, values, graphs
        self.mask: GradientMask = ()
        self.arrived: tuple[str, ...] = ()
        self.replayed: Any = None
        if graphs is not None:
            graphs.used_by(self)

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of the stage's outputs, and of its loss."""
        results, tangents = self.variant.results, self.variant.divided.joint.tangents
        of_tensors = [gradients[index] for index, result in enumerate(results) if isinstance(result, int)]
        of_tensors += gradients[len(results) :]
        of_tensors += [None] * (len(tangents) - len(of_tensors))
        pairs = list(zip(tangents, of_tensors, strict=True))
        self.mask = tuple(node is not None and gradient is not None for node, gradient in pairs)
        arrived = [(node, gradient) for node, gradient in pairs if node is not None and gradient is not None]
        for node, gradient in arrived:
            self.values[node.name] = with_strides(gradient, self.variant.divided.strides(node, self.numbers))
        self.arrived = tuple(node.name for node, _ in arrived)

    def take_offloaded(self, device: torch.device) -> dict[str, Tensor]:
        """Take out what is to wait for the backward in CPU memory; empty if nothing is."""
        names = sorted(self.variant.divided.offloaded & self.values.keys())
        # Some kernels of a GPU return a seed on the host, of which the graph says that it is on the GPU.
        return {name: self.values.pop(name) for name in names if self.values[name].device == device}

    def put_back(self, values: Mapping[str, Tensor]) -> None:
        """Put in again what was taken out."""
        self.values |= values


def held_tensors(saved: Any) -> Collection[Tensor] | None:
    """Return the tensors that a `Forward.saved` keeps in memory now, or None if autograd keeps them: it hides them."""
    return saved.values.values() if isinstance(saved, SavedValues) else None


# ---- stage graphs ----------------------------------------------------------------------------------------------------
# The CUDA graphs of a stage: which microbatch uses which, and what is launched kernel by kernel instead.


SIZES: Final = 8
"""For how many sets of sizes, modes and so on a stage has graphs: those of each take memory that is never freed."""

_PLACES: Final = 4
"""How often each kernel is recorded again for gradients that have moved."""

_KINDS: Final = 4  # F, I, W and B


class StageGraphs:
    """The graphs of a stage. A kernel is launched once before it is recorded: what it needs is then compiled and tuned.

    Args:
        name: of the stage.
        recorder: makes what records kernels.
    """

    def __init__(self, name: str, recorder: MakeRecorder) -> None:
        self._name, self._recorder = name, recorder
        self._addresses: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Forget all graphs. Not called within a step."""
        self._graphs: dict[Any, list[MicrobatchGraphs]] = {}
        self._launched: set[Any] = set()
        self._refused: set[Any] = set()
        self._gradients = KeptGradients()

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Forget all graphs if the tensors with which the stage computes are in another place than before."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            self._addresses = addresses
            self.clear()

    def find(
        self,
        variant: StageVariant,
        numbers: Numbers,
        forward: Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Values]],
        inputs: Sequence[Tensor],
    ) -> MicrobatchGraphs | None:
        """Return graphs that no microbatch in flight uses; None if F has to be launched kernel by kernel.

        Args:
            variant, numbers: the variant of the stage, and the sizes.
            forward, inputs: as `MicrobatchGraphs` takes them.
        """
        key = variant, numbers
        if key in self._refused or (key not in self._graphs and len(self._graphs) == SIZES):
            return None
        if not self._was_launched((key, "F")):
            return None
        graphs = self._graphs.setdefault(key, [])
        for microbatch_graphs in graphs:
            if microbatch_graphs.is_free:
                return microbatch_graphs
        try:
            with torch.inference_mode(False), torch.no_grad():  # a step may follow an evaluation
                graphs.append(MicrobatchGraphs(forward, inputs, self._recorder_for(variant)))
        except Exception as error:  # whatever refuses to be recorded
            self._refuse(key, error)
            return None
        return graphs[-1]

    def _recorder_for(self, variant: StageVariant) -> Recorder:
        """Return a recorder. Raises RuntimeError for a variant that reads what the host may change unnoticed."""
        recorder = self._recorder()
        if (name := variant.divided.begins_elsewhere(recorder.device.type)) is not None:
            raise RuntimeError(f"{name} is not on the GPU")
        return recorder

    def backward(
        self, saved: SavedValues, kind: Any, parameters: Mapping[int, Tensor], backward: Backward
    ) -> tuple[Tensor | None, ...]:
        """Run a kernel of the backward, with its graph if possible. Returns the gradients of inputs.

        Args:
            saved: the values that it reads; afterwards, the values that W reads.
            kind: which kernel it is.
            parameters: the parameters that it adds gradients to, each by its own number.
            backward: launches it.
        """
        key = saved.variant, saved.numbers
        is_first = not self._was_launched((key, kind))
        results = None if is_first or saved.graphs is None else self._replayed(saved, key, kind, parameters, backward)
        saved.arrived = ()
        if results is None:
            saved.graphs = None  # W finds elsewhere what I leaves to it
            results = backward(saved.values)
            if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters.values()):
                self._refused.add(key)  # its `.grad` cannot begin as zeros, which are dense
        of_inputs, saved.values = results
        return tuple(of_inputs)

    def _replayed(
        self, saved: SavedValues, key: Any, kind: Any, parameters: Mapping[int, Tensor], backward: Backward
    ) -> tuple[Sequence[Tensor | None], Values] | None:
        """Run a kernel's graph, and record it first if needed. Returns None if it cannot be recorded."""
        graphs, arrived = saved.graphs, {name: saved.values[name] for name in saved.arrived}
        if graphs is None or key in self._refused:
            return None
        places = self._gradients.places(parameters)
        graph_key = kind, places, saved.replayed  # W reads what I left, which lies where that was recorded
        if not graphs.is_recorded(graph_key):
            if places is None or graphs.recorded == _KINDS * _PLACES:
                return None
            try:
                with torch.inference_mode(False), torch.no_grad():
                    graphs.record(graph_key, saved.values, arrived, backward)
            except Exception as error:
                self._refuse(key, error)
                return None
        saved.replayed = graph_key
        return graphs.backward(graph_key, arrived)

    def _was_launched(self, key: Any) -> bool:
        """Return whether a kernel has been launched before, and note that it will have been from now on."""
        if key in self._launched:
            return True
        self._launched.add(key)
        return False

    def _refuse(self, key: Any, error: Exception) -> None:
        self._refused.add(key)
        self._graphs.pop(key, None)  # microbatches in flight still hold theirs
        warnings.warn(
            f"{self._name} cannot be recorded as a CUDA graph, and its kernels are launched one by one: "
            f"{text_of(error)}",
            stacklevel=2,
        )


# ---- stage run -------------------------------------------------------------------------------------------------------


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
