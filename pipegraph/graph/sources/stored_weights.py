"""The files of weights in the folder of a Hugging Face model, as transformers looks for them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Final

from pipegraph.errors import SourceError, first_names

_READ: Final = ("model.safetensors", "pytorch_model.bin")
"""Files that ``from_pretrained`` reads, or their indices."""
_WEIGHTS: Final = re.compile(
    r".*\.(safetensors|gguf)|(.*model.*|consolidated.*|.*weights.*)\.(bin|pt|pth|h5|msgpack|ckpt.*)", re.IGNORECASE
)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights that ``from_pretrained`` reads: safetensors, or what ``torch.save`` wrote.

    Raises:
        SourceError: it holds weights in other files alone; a model would have initial values in their place.
    """
    if any((folder / name).is_file() for file in _READ for name in (file, f"{file}.index.json")):
        return True
    unread = sorted(file.name for file in folder.iterdir() if _WEIGHTS.fullmatch(file.name))
    if unread:
        raise SourceError(
            f"{folder} holds weights, and none under a name that transformers reads: {first_names(unread)}.\n"
            f"Try: {' or '.join(_READ)}, whole or as several files with an index, as save_pretrained writes them; or "
            "--no-weights, which takes the configuration alone."
        )
    return False


def refused_name(error: pickle.UnpicklingError) -> str:
    """What ``torch.load(weights_only=True)`` refused. Its message advises to load it all the same."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"it names {match[1]}" if match else str(error).partition("\n")[0]
