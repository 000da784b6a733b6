"""What backwards compute again in place of keeping it: one choice for everything, or one for each pattern of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from pipegraph.arguments import argument, for_asker
from pipegraph.errors import ArgumentError, nearest

OFFLOAD = "offload"
CHOICES = ("none", "min-cut", "block", OFFLOAD)
"""What a backward recomputes: nothing, what torch's partitioner chooses, or everything, from the inputs of the block.
"offload" recomputes the same as "min-cut", and keeps saved values in CPU memory until the backward."""
DEFAULT = "min-cut"
"""The default choice. Also on a CPU, recomputing a chain of pointwise operations takes less time than writing and
reading its results."""

AUTO = "auto"
"""In place of a choice: a plan chooses for each stage, together with the cuts."""

Policy = Callable[..., Any]
"""What `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes: (context, operation, its arguments) → a
`CheckpointPolicy`."""
Choice = str | Policy

_SLICE = re.compile(r"\[(\d*):(\d*)(?::(\d*))?\]")
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d{1,9}),?")
_MOST_STAGES = 10_000
_ADVICE = 'Try: "block", {"layers.*": "block", "*.mlp": "none"}, or {"layers[::2]": "block"} for every second layer.'
_COMMAND_ADVICE = "Try: block, 'layers.*=block,*.mlp=none', or 'layers[::2]=block' for every second layer."


class Region(NamedTuple):
    """Operations for which one choice was made: those of a module, without modules inside that have another one.

    ``module`` is empty for what no pattern names.
    """

    module: str
    choice: Choice


@dataclass(frozen=True)
class Recompute:
    """Choices by patterns of module names.

    A pattern holds for the modules that it matches and all that they call; of several patterns, the last one counts. In
    a pattern, ``*`` is any part of a name, dots included, ``?`` one character, and ``layers[start:stop:step]`` those
    of the modules ``layers.0``, ``layers.1``, … that the slice takes.

    Attributes:
        rules: (pattern, choice), in order.
        default: what holds for everything else.
    """

    rules: tuple[tuple[str, Choice], ...] = ()
    default: Choice = DEFAULT

    @classmethod
    def parse(cls, recompute: object) -> Recompute:
        """Return the choices that an argument specifies.

        Args:
            recompute: a choice, or a policy, for everything; a mapping from patterns to choices, in which an empty
                pattern stands for everything else; or such a mapping as text: ``layers.*=block,*.mlp=none``.

        Raises:
            ArgumentError: the argument is not one of these.
        """
        if isinstance(recompute, Recompute):
            return recompute
        if isinstance(recompute, str) and "=" in recompute:
            pairs = [part.strip().rpartition("=") for part in recompute.split(",")]
            recompute = {pattern.strip(): choice.strip() for pattern, _, choice in pairs}
        if isinstance(recompute, Mapping):
            for pattern, choice in recompute.items():
                _check_choice(choice)
                _check_pattern(pattern)
            rules = tuple((pattern, choice) for pattern, choice in recompute.items() if pattern)
            return cls(rules, recompute.get("", DEFAULT))
        _check_choice(recompute)
        return cls((), recompute)  # type: ignore[arg-type]

    @property
    def policies(self) -> bool:
        """Whether one of the choices is a function, which no file can hold."""
        return any(map(callable, self._choices))

    @property
    def offloads(self) -> bool:
        """Whether something waits for the backward in CPU memory."""
        return OFFLOAD in self._choices

    @property
    def _choices(self) -> list[Choice]:
        return [self.default, *(choice for _, choice in self.rules)]

    def with_layers(self, names: Iterable[str]) -> Recompute:
        """Return the choices for a model whose parameters have these names; this changes only the default "block".

        In a model with lists of layers, such as ``layers.0`` and ``layers.1``, "block" holds for each layer, at any
        cuts; operations outside the layers have "min-cut".
        """
        lists = layer_lists(names) if self.default == "block" else ()
        if not lists:
            return self
        return Recompute((*((f"{name}.*", "block") for name in lists), *self.rules))

    def region(self, path: tuple[str, ...]) -> Region:
        """Return the region of an operation, given the names of the modules that are called around it, from outside."""
        return _region(self, path)

    def unmatched(self, names: Collection[str]) -> list[str]:
        """Return the patterns that match none of these names."""
        return [pattern for pattern, _ in self.rules if not any(_matches(pattern, name) for name in names)]

    def check_names(self, names: Collection[str]) -> None:
        """Raise ArgumentError unless each pattern matches one of these names of modules."""
        for pattern in self.unmatched(names):
            plain = _SLICE.sub(".0", pattern)
            near = nearest(plain, names) or nearest(plain.replace("*", "layers.0"), names)
            few = ", ".join(sorted(names, key=lambda name: (name.count("."), _order(name)))[:6])
            raise ArgumentError(
                f'{argument("recompute")}: the pattern "{pattern}" matches no module that is called.{near}',
                f"a pattern that matches one of {few}{', …' if len(names) > 6 else ''}.",
            )

    def __str__(self) -> str:
        """As the command line takes it. A policy has the name of its function."""
        default_parts = [] if self.rules and self.default == DEFAULT else [_name(self.default)]
        if self.rules and default_parts:
            default_parts = [f"={default_parts[0]}"]
        return ",".join([*default_parts, *(f"{pattern}={_name(choice)}" for pattern, choice in self.rules)])


EVERYWHERE = Recompute()
"""The default choice for everything."""


def layer_lists(names: Iterable[str]) -> tuple[str, ...]:
    """Return the outermost lists of two or more modules that hold others, by the names of parameters: ``h`` of
    ``h.0.mlp.weight`` and ``h.1.mlp.weight``. To compute a lone operation again saves nothing."""
    numbers: dict[str, set[str]] = {}
    for name in names:
        parts = name.split(".")
        place = next((index for index, part in enumerate(parts) if part.isdecimal()), 0)
        if place and len(parts) > place + 2:
            numbers.setdefault(".".join(parts[:place]), set()).add(parts[place])
    return tuple(name for name, positions in numbers.items() if len(positions) > 1)


def text_of_stages(text: str) -> list[str]:
    """Return the choice of each stage that a text has, or the one for all stages.

    They stand with ``;`` in between, or with bars as in a layout: ``(block|)*3,none`` is ``block;block;block;none``.
    """
    if "|" not in text:
        return text.split(";")
    return _REPEATED.sub(lambda match: match[1] * min(int(match[2]), _MOST_STAGES), text).split("|")


def check_text(text: str) -> None:
    """Raise ArgumentError unless a text is what `parse_stages` reads for some number of stages, or "auto"."""
    if text != AUTO:
        for choice in dict.fromkeys(text_of_stages(text)):
            Recompute.parse(choice)


def parse_stages(recompute: object, stages: int) -> tuple[Recompute, ...]:
    """Return the recompute of each of ``stages`` stages.

    Args:
        recompute: an argument of `Recompute.parse`, for all stages; a sequence with one for each stage; or such a
            sequence as text, as `text_of_stages` reads it.
        stages: the number of stages.

    Raises:
        ArgumentError: ``recompute`` is not one of these, or is for another number of stages.
    """
    if isinstance(recompute, str) and len(choices := text_of_stages(recompute)) > 1:
        recompute = choices
    if isinstance(recompute, str) or not isinstance(recompute, Sequence):
        return (Recompute.parse(recompute),) * stages
    if len(recompute) != stages:
        raise ArgumentError(
            f"{argument('recompute')} has a choice for each of {len(recompute)} stages, and there are {stages}.",
            "one for each stage, or one for all.",
        )
    return tuple(map(Recompute.parse, recompute))


def stages_text(choices: Sequence[Recompute]) -> str:
    """Return the choices of all stages as `parse_stages` reads them: one if they are equal."""
    return str(choices[0]) if len(set(choices)) == 1 else ";".join(map(str, choices))


def describe_stages(choices: Sequence[Recompute]) -> str:
    """Return the choices of all stages in a line: ``none``, ``block (stages 0 – 1), none (stages 2 – 3)``."""
    if len(set(choices)) == 1:
        return str(choices[0])
    places: dict[Recompute, list[int]] = {}
    for stage, recompute in enumerate(choices):
        places.setdefault(recompute, []).append(stage)
    return ", ".join(f"{recompute} (stage{_numbers(stages)})" for recompute, stages in places.items())


def _numbers(stages: Sequence[int]) -> str:
    if len(stages) == 1:
        return f" {stages[0]}"
    is_contiguous = stages[-1] - stages[0] == len(stages) - 1
    return f"s {stages[0]} – {stages[-1]}" if is_contiguous else f"s {', '.join(map(str, stages))}"


def _order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts names of modules as the model counts them: ``layers.2`` before ``layers.10``."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split("."))


@cache
def _region(recompute: Recompute, path: tuple[str, ...]) -> Region:
    for pattern, choice in reversed(recompute.rules):
        for name in path:
            if _matches(pattern, name):
                return Region(_element(pattern, name), choice)
    return Region("", recompute.default)


def _element(pattern: str, name: str) -> str:
    """Return the first layer around a module that a pattern matches too, or the module's own name.

    A layer with a cut inside is not called itself; what is called of it is one region all the same.
    """
    parts = name.split(".")
    around = (".".join(parts[: length + 1]) for length, part in enumerate(parts) if length and part.isdecimal())
    return next((layer for layer in around if _matches(pattern, layer)), name)


@cache
def _matches(pattern: str, name: str) -> bool:
    expression, slices = _compiled(pattern)
    match = expression.fullmatch(name)
    return match is not None and all(int(number) in span for number, span in zip(match.groups(), slices, strict=True))


@cache
def _compiled(pattern: str) -> tuple[re.Pattern[str], tuple[range, ...]]:
    """Return the expression of a pattern, with a group for each slice, and the numbers that each slice takes."""
    parts: list[str] = []
    slices: list[range] = []
    end = 0
    for match in _SLICE.finditer(pattern):
        start, stop, step = (int(text) if text else None for text in match.groups())
        slices.append(range(start or 0, 10**9 if stop is None else stop, 1 if step is None else step))
        parts += [_translated(pattern[end : match.start()]), r"\.(\d+)"]
        end = match.end()
    parts.append(_translated(pattern[end:]))
    return re.compile("".join(parts), re.DOTALL), tuple(slices)


def _translated(text: str) -> str:
    return re.escape(text).replace(r"\*", ".*").replace(r"\?", ".")


def _check_choice(choice: object) -> None:
    if callable(choice) or choice in CHOICES:
        return
    raise ArgumentError(
        f'recompute cannot be "{choice}".{nearest(str(choice), CHOICES)} There are: {", ".join(CHOICES)}; and these '
        "for patterns of module names.\n"
        f"{_advice()}"
    )


def _check_pattern(pattern: object) -> None:
    literal = _SLICE.sub("", pattern) if isinstance(pattern, str) else "["
    if set("[],;=") & set(literal) or any(match[3] == "0" for match in _SLICE.finditer(str(pattern))):
        raise ArgumentError(
            f"{argument('recompute')}: {pattern!r} is not a pattern of module names: a slice has whole numbers from 0 "
            "on, as in layers[4:8] and layers[::2]; other brackets, commas and equals signs are not allowed.\n"
            f"{_advice()}"
        )


def _advice() -> str:
    return for_asker(_ADVICE, _COMMAND_ADVICE)


def _name(choice: Choice) -> str:
    return choice if isinstance(choice, str) else getattr(choice, "__name__", "policy")
