"""Read mutated manifests, plans and hardware profiles: each is read, or refused with the one error of its kind.

    python -m benchmarks.fuzz_files --count 2000

Prints how many were read and refused, and the slowest; exits with 1 if one raised another error.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pipegraph
from pipegraph.codegen.package_files import generate
from pipegraph.cost.hardware import Hardware, MeasuredRatio
from pipegraph.errors import PackageError, PipegraphError, SourceError
from pipegraph.package import CheckpointNames, ListedFile, Manifest
from pipegraph.package.sizes import Size
from pipegraph.planner.plan_file import PlanFile

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), [], {}, [[]], [None], {"": {}}, [0] * 50, {"x": 1}),
    *("", "x", "../x", "/etc/passwd", "a" * 5000, "\x1b[31m", "\x00", "\x9b0m", "\u202e", "\ud800", "%s%n", "{}"),
    *("sha256 00", "batch // 0", "9 ** 9 ** 9", "__import__('os')"),
)


@dataclass(frozen=True)
class Kind:
    """A kind of file: what reads its text and gives it back, the error that it may raise, and a sound file."""

    read: Callable[[bytes], str]
    error: type[PipegraphError]
    text: str


@dataclass(frozen=True)
class Outcome:
    """What became of a mutated file: an error that it may have, None if it was read, or another exception."""

    data: bytes
    error: Exception | None
    seconds: float


class Model(nn.Module):
    """Two inputs and a constant, tied weights, and a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, tokens: Tensor, mask: Tensor, factor: float) -> dict[str, Tensor]:
        return {"logits": self.head(self.layers(self.embed(tokens) * self.scale) * mask[..., None] * factor)}


def kinds() -> dict[str, Kind]:
    """The kinds of files, each with a sound one that has every part."""
    torch.manual_seed(0)
    captured = pipegraph.capture(Model(), (torch.zeros(4, 6, dtype=torch.long), torch.ones(4, 6), 0.5))
    plan = pipegraph.plan(captured, stages=2, microbatches=4, hardware="cpu")
    manifest = generate(plan, weights=True).manifest
    tokens = structs.replace(manifest.values["tokens"], shape=("batch", "tokens_1 // 2 * 2"))
    manifest = structs.replace(
        manifest,
        values=manifest.values | {"tokens": tokens},
        sizes=manifest.sizes | {"tokens_1": Size(captured=6, max=64)},
        shards={"stage-00000-of-00002.safetensors": ListedFile(9, f"sha256 {64 * 'a'}")},
        checkpoint=CheckpointNames("model", {"embed.weight": ("a", "b.*")}),
        tp_plan={"layers.*": "colwise"},
    )
    profile = structs.replace(Hardware.load("cpu"), name="here", measured_ratio=MeasuredRatio(1.5, 1.0, 0.5))
    return {
        "manifest": Kind(lambda data: Manifest.from_json(data, "x.json").to_json(), PackageError, manifest.to_json()),
        "plan": Kind(
            lambda data: PlanFile.from_json(data, "x.json").to_json(), SourceError, PlanFile.from_plan(plan).to_json()
        ),
        "profile": Kind(lambda data: Hardware.from_json(data, "x.json").to_json(), PipegraphError, profile.to_json()),
    }


def mutations(text: str, count: int, seed: int = 0) -> Iterator[bytes]:
    """So many files that differ from a sound one; see `mutation`."""
    chance = random.Random(seed)
    for _ in range(count):
        yield mutation(text, chance)


def mutation(text: str, chance: random.Random) -> bytes:
    """A JSON file with one to three changes, of its bytes or of its structure."""
    if chance.random() < 0.4:
        return mutated_bytes(text.encode(), chance)
    content = json.loads(text)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        _change(content, chance)
    return json.dumps(content).encode()


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Bytes with one to three changes."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        data = _changed_bytes(data, chance)
    return data


def outcome(kind: Kind, data: bytes) -> Outcome:
    """Read a mutated file and, if that can be read, what is written of it: it must be the same again."""
    started = time.process_time()
    error: Exception | None = None
    try:
        written = kind.read(data)
        assert kind.read(written.encode()) == written
    except Exception as caught:
        error = caught
    return Outcome(data, error, time.process_time() - started)


def is_refused_well(kind: Kind, error: Exception) -> bool:
    """Whether an error is the one of its kind, printable, and ends with what to try."""
    text = str(error)
    return type(error) is kind.error and "\nTry: " in text and text.replace("\n", "").isprintable() and len(text) < 2000


def _changed_bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    chunk = data[at : at + chance.randint(1, 20)]
    return (
        chance.choice(
            [
                data[:at],  # truncated
                data[:at] + data[at + len(chunk) :],
                data[:at] + chunk + data[at:],
                data[:at] + chance.randbytes(chance.randint(1, 4)) + data[at:],
                data[:at] + chance.randbytes(1) + data[at + 1 :],
                data[:at]
                + chance.choice([b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"e9", b"NaN", b"\\"])
                + data[at:],
            ]
        )
        or b" "
    )


def _change(content: Any, chance: random.Random) -> None:
    """Change one place of a structure."""
    places = list(_places(content))
    holder, key = chance.choice(places)
    value = copy.deepcopy(chance.choice(HOSTILE))  # which later changes must not reach
    how = chance.randrange(5)
    if how == 4 and type(holder[key]) in (int, float):
        holder[key] += 1
    elif how == 0:
        holder[key] = value
    elif how == 1:
        del holder[key]
    elif how == 2 and isinstance(holder, dict):
        holder[value if isinstance(value, str) else f"{key}_"] = holder.pop(key)
    elif isinstance(holder, dict):
        holder[f"{key}x"] = value
    else:
        donor, place = chance.choice(places)
        holder.insert(key, json.loads(json.dumps(donor[place])) if place in donor or isinstance(place, int) else value)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(content, (dict, list)):
        for key in list(content) if isinstance(content, dict) else range(len(content)):
            yield content, key
            yield from _places(content[key])


def main(count: Annotated[int, typer.Option(help="Mutated files of each kind.")] = 2000, seed: int = 0) -> None:
    """Read mutated files of each kind."""
    table = Table("kind", "read", "refused", "otherwise", "slowest, ms")
    wrong = 0
    for name, kind in kinds().items():
        trials = [outcome(kind, data) for data in mutations(kind.text, count, seed)]
        bad = [trial for trial in trials if trial.error is not None and not is_refused_well(kind, trial.error)]
        read = sum(trial.error is None for trial in trials)
        slowest = max(trial.seconds for trial in trials) * 1000
        table.add_row(name, str(read), str(len(trials) - read - len(bad)), str(len(bad)), f"{slowest:.0f}")
        for trial in bad[:5]:
            typer.echo(f"{name}: {type(trial.error).__name__}: {trial.error!r:.400}\n{trial.data[:200]!r}", err=True)
        wrong += len(bad)
    Console().print(table)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
