"""Optimizers whose state has more than a tensor and numbers for each parameter."""

from __future__ import annotations

from typing import Any

import torch


class Factors(torch.optim.Optimizer):
    """Scales by statistics of rows and columns, in the form in which SOAP and Shampoo keep them."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    sizes = [None if size > 8 else size for size in parameter.shape]
                    state["GG"] = [[] if size is None else torch.zeros(size) for size in sizes]
                    state["mixed"] = {"best": (torch.zeros(()), 2.0, None), 3: [], "names": ["a", "b"]}
                    state["step"] = 0
                state["step"] += 1
                gradient = parameter.grad
                for dim, factor in enumerate(state["GG"]):
                    if isinstance(factor, torch.Tensor):
                        axes = [axis for axis in range(gradient.dim()) if axis != dim]
                        factor += gradient.square().sum(axes) if axes else gradient.square()
                        shape = [-1 if axis == dim else 1 for axis in range(gradient.dim())]
                        gradient = gradient / (factor.sqrt() + 0.1).reshape(shape)
                best, factor, placeholder = state["mixed"]["best"]
                state["mixed"]["best"] = (torch.maximum(best, gradient.abs().max()), factor * 0.5, placeholder)
                parameter -= group["lr"] * gradient * state["mixed"]["best"][0].clamp(0.5, 1.0)


def plain(state: Any) -> Any:
    """A state with lists of numbers in the place of tensors, to compare it."""
    if isinstance(state, torch.Tensor):
        return ["tensor", *state.shape, *state.flatten().tolist()]
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(plain, state))
    return state
