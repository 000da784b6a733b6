"""Extra state that the user saves with the model: objects with a `state_dict`, and plain values, of each rank.

Equal values are stored once. A value that differs, such as the position in each data-parallel rank's share of the data,
is restored on the rank that saved it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pipegraph.arguments import for_asker
from pipegraph.errors import CheckpointError, nearest
from pipegraph.runtime.checkpoint.folder import SavedExtra
from pipegraph.runtime.processes.rank_grid import DATA, RankGrid

# ---- plain values ----------------------------------------------------------------------------------------------------
# Values that are no tensors of the model, as bytes in a tensor: states of schedulers, options of optimizers.


def encoded(value: Any, name: str) -> Tensor:
    """The bytes of a value [uint8]. Raises CheckpointError if they could not be read back without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        decoded(buffer.getvalue())
    except Exception as error:  # of pickle or torch, about any class of the user's
        why = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name} cannot be saved, because it holds more than tensors and plain values: {why}",
            "numbers, strings, tensors, and lists and dicts of them; or "
            "torch.serialization.add_safe_globals([…]) for a class of your own.",
        ) from error
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def decoded(data: bytes | Tensor) -> Any:
    """The value of its bytes."""
    content = data.numpy().tobytes() if isinstance(data, Tensor) else data
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def fingerprint(data: Tensor) -> str:
    """Tells bytes apart from others."""
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


# ---- extra state -----------------------------------------------------------------------------------------------------


PREFIX: Final = "extra."


def is_stateful(value: Any) -> bool:
    """Return whether a value gives its state and takes it back."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def encoded_extra(extra: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state of each object, and each plain value, as bytes. Raises CheckpointError."""
    for name in extra:
        if not isinstance(name, str) or not name:
            raise CheckpointError(
                f"extra has the name {name!r}, and names are strings, which are not empty.",
                'extra={"scheduler": scheduler}.',
            )
    return {
        name: encoded(value.state_dict() if is_stateful(value) else value, f'extra["{name}"]')
        for name, value in extra.items()
    }


def stored_name(name: str, version: int) -> str:
    return f"{PREFIX}{version}.{name}"


def versions(fingerprints: Sequence[Mapping[str, tuple[bool, str]]]) -> dict[str, SavedExtra]:
    """Which rank has which version of each.

    Args:
        fingerprints: of each rank, by names, whether it is stateful, and what tells its value apart.

    Raises:
        CheckpointError: the ranks save different things.
    """
    first = fingerprints[0]
    for rank, rank_fingerprints in enumerate(fingerprints):
        if different := sorted(first.keys() ^ rank_fingerprints.keys()):
            raise CheckpointError(
                f"extra has other names on rank {rank} than on rank 0: {', '.join(different)}.",
                "the same names on every rank; values may differ.",
            )
    saved = {}
    for name, (stateful, _) in first.items():
        values = [per_rank[name][1] for per_rank in fingerprints]
        distinct = list(dict.fromkeys(values))
        saved[name] = SavedExtra(stateful, tuple(distinct.index(value) for value in values))
    return saved


def version_for(name: str, saved: SavedExtra, saved_grid: RankGrid, now: RankGrid, rank: int) -> int:
    """The version that a rank takes, which may be one of more or fewer ranks than saved.

    If the ranks are the same it is its own. Otherwise all ranks of a pipeline must have had the same, and it is that of
    its share of the data.

    Raises:
        CheckpointError: nothing says which one.
    """
    if len({*saved.versions}) == 1:
        return saved.versions[0]
    if saved_grid == now:
        return saved.versions[rank]
    by_share: dict[tuple[int, ...], set[int]] = {}
    for saved_rank, version in enumerate(saved.versions):
        by_share.setdefault(_share(saved_grid, saved_rank), set()).add(version)
    if all(len(candidates) == 1 for candidates in by_share.values()) and saved_grid.length(*DATA) == now.length(*DATA):
        (version,) = by_share[sorted(by_share)[_place(now, rank)]]
        return version
    named = for_asker(f'extra["{name}"]', f'the state of "{name}"')
    left_out = "load() without extra" if saved.is_stateful else f'load() with extra that lacks "{name}"'
    raise CheckpointError(
        f"{named} was saved with different values on {saved_grid.size} ranks ({_text(saved_grid)}), and there are "
        f"{now.size} now ({_text(now)}): nothing says which rank takes which.",
        f"the same number of data-parallel ranks as before; or {left_out}, which leaves it out.",
    )


def check_names(extra: Mapping[str, Any], saved: Mapping[str, SavedExtra]) -> None:
    """Raise CheckpointError unless there is a state for every object that was given, and an object for every state."""
    unknown = [name for name in extra if name not in saved]
    missing = [name for name, entry in saved.items() if entry.is_stateful and name not in extra]
    plain = [name for name in extra if name in saved and is_stateful(extra[name]) != saved[name].is_stateful]
    giver = for_asker("extra", "the model file")
    problems = [f'{giver} has "{name}", and the checkpoint does not.{nearest(name, saved)}' for name in unknown]
    problems += [
        f'the checkpoint has the state of "{name}", and {giver} has none.{nearest(name, unknown)}' for name in missing
    ]
    problems += [
        f'"{name}" {"was an object with a state_dict" if saved[name].is_stateful else "was a plain value"} when it was '
        "saved, and is not now."
        for name in plain
    ]
    if problems:
        saved_names = ", ".join(saved) or "nothing"
        raise CheckpointError(
            "\n  ".join([f"{giver} is not what was saved:", *problems]) + f"\nIn the checkpoint is: {saved_names}.",
            "the same extra as for save(), or none, to get all states in the result.",
        )


def _share(grid: RankGrid, rank: int) -> tuple[int, ...]:
    """The place of a rank among the data-parallel ones."""
    places = grid.coordinates(rank)
    return tuple(places[name] for name in DATA if name in places)


def _place(grid: RankGrid, rank: int) -> int:
    return sorted({_share(grid, grid_rank) for grid_rank in range(grid.size)}).index(_share(grid, rank))


def _text(grid: RankGrid) -> str:
    return " × ".join(f"{name} {length}" for name, length in zip(grid.names, grid.shape, strict=True))
