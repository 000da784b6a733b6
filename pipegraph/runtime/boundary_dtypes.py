"""The dtypes in which values cross between stages in a region of `torch.autocast`: those that their stages make there.

stage 0 ─ run without memory ─▶ bfloat16 ─ sent to its consumers ─▶ stage 1 ─ run without memory ─▶ …

A receiver has to know the dtype of a message before it comes. It is found at the first call in such a region; all
ranks make their calls in the same ones, on which they agree before.
"""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.autocast import AutocastState, autocast_state
from pipegraph.kernels.sharded import local
from pipegraph.kernels.trace_guard import ModuleState, unchanged
from pipegraph.package import Manifest
from pipegraph.runtime.wiring import Edge, StageWiring, torch_dtype, zeros_for
from pipegraph.torch_private.fake_tensors import fake_tensors

Dtypes = dict[str, torch.dtype]
"""value → its dtype"""

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AS_PROMISED: Final = -1


class NumberTransport(Protocol):
    """Carries whole numbers between ranks, before the messages of a call."""

    def send_numbers(self, ranks: tuple[int, int], numbers: Sequence[int]) -> None:
        """Send to the second rank."""
        ...

    def receive_numbers(self, ranks: tuple[int, int], count: int) -> list[int]:
        """Wait for the numbers that the first rank sends, and return them."""
        ...


class BoundaryDtypes:
    """Finds the dtypes of the values that the stages of this process take and send, once for each state of autocast.

    Args:
        manifest: has the dtypes of values without autocast, and of values that are not floats.
        wiring: of all stages.
        stages: of this process.
        places: the rank of each stage.
    """

    def __init__(
        self, manifest: Manifest, wiring: Sequence[StageWiring], stages: Mapping[int, nn.Module], places: Sequence[int]
    ) -> None:
        self._sizes, self._wiring, self._stages, self._places = manifest.captured_sizes, wiring, stages, places
        self._dtypes: dict[AutocastState, Dtypes] = {}

    def under_autocast(self, transport: NumberTransport | None) -> Dtypes:
        """The dtypes of floats that differ from the manifest's here and now; none outside of autocast.

        Collective at the first call in a state of autocast. `transport` is None for a plain process.
        """
        state = autocast_state()
        if not any(is_enabled for is_enabled, _ in state):
            return {}
        if state not in self._dtypes:
            self._dtypes[state] = self._find(transport)
        return self._dtypes[state]

    def _find(self, transport: NumberTransport | None) -> Dtypes:
        dtypes: Dtypes = {}
        waiting: dict[tuple[int, int], deque[Edge]] = defaultdict(deque)  # in the order in which their dtypes are sent
        for producer in range(len(self._wiring)):
            for edge in self._wiring[producer].leaving:
                if producer not in self._stages and edge.consumer in self._stages:
                    waiting[self._ranks(edge)].append(edge)
        for index in sorted(self._stages):
            for edge in self._wiring[index].arriving:
                edges = waiting[self._ranks(edge)]
                while transport is not None and edge in edges:
                    next_edge = edges.popleft()
                    numbers = transport.receive_numbers(self._ranks(edge), len(next_edge.values))
                    pairs = zip(next_edge.names, numbers, strict=True)
                    dtypes |= {name: _FLOATS[number] for name, number in pairs if number != _AS_PROMISED}
            dtypes |= self._made_by(index, dtypes)
            for edge in self._wiring[index].leaving:
                if transport is not None and edge.consumer not in self._stages:
                    codes = [_FLOATS.index(dtypes[name]) if name in dtypes else _AS_PROMISED for name in edge.names]
                    transport.send_numbers(self._ranks(edge), codes)
        return dtypes

    def _ranks(self, edge: Edge) -> tuple[int, int]:
        return self._places[edge.producer], self._places[edge.consumer]

    def _made_by(self, index: int, arriving: Dtypes) -> Dtypes:
        """The dtypes that a stage gives to floats, by running it without memory for the captured sizes."""
        stage, wiring = self._stages[index], self._wiring[index]
        modules = list(stage.modules())
        state = ModuleState(modules)
        device = next((tensor.device for tensor in state.tensors()), torch.device("cpu"))
        try:
            with unchanged(modules), fake_tensors(), torch.no_grad():
                empty_tensors = [torch.empty_like(local(tensor), device=tensor.device) for tensor in state.tensors()]
                inputs = [
                    zeros_for(value, value.shape_at(self._sizes), arriving.get(value.name, torch_dtype(value)), device)
                    for value in wiring.inputs
                ]
                with state.replaced(empty_tensors):
                    returned = stage(*inputs)
        except PipegraphError:
            raise
        except Exception as error:  # whatever an operation raises on a fake tensor
            warnings.warn(
                f"what stage {index} makes under autocast cannot be found out beforehand ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}): what it sends is cast to the package's dtypes.",
                stacklevel=2,
            )
            return {}
        outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
        return {
            value.name: output.dtype
            for value, output in zip(wiring.outputs, outputs, strict=False)
            if value.consumers
            and isinstance(output, Tensor)
            and output.dtype in _FLOATS
            and torch_dtype(value) in _FLOATS
            and output.dtype != torch_dtype(value)
        }
