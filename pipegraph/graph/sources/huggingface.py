"""``hf:`` — a model from a Hugging Face transformers configuration, read from disk and never downloaded."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pipegraph.arguments import argument, require_path
from pipegraph.device import require_room
from pipegraph.errors import SourceError, first_names, nearest
from pipegraph.graph.adapters import base_model_of, base_names
from pipegraph.graph.initialisation import initialisation_recorded
from pipegraph.graph.sources.model_source import ModelSource, parameters_on_meta
from pipegraph.regular_file import read_regular_file

# ---- stored weights --------------------------------------------------------------------------------------------------
# The files of weights in the folder of a Hugging Face model, as transformers looks for them.


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
            f"{folder} holds weights, and none under a name that transformers reads: {first_names(unread)}.",
            f"{' or '.join(_READ)}, whole or as several files with an index, as save_pretrained writes them; or "
            "--no-weights, which takes the configuration alone.",
        )
    return False


def refused_name(error: pickle.UnpicklingError) -> str:
    """What ``torch.load(weights_only=True)`` refused. Its message advises to load it all the same."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"it names {match[1]}" if match else str(error).partition("\n")[0]


# ---- huggingface -----------------------------------------------------------------------------------------------------


def load_config(model: str, weights: bool, batch: int, seq: int, attention_mask: bool = False) -> ModelSource:
    """Build the architecture that ``hf:DIR`` or ``hf:CONFIG.json`` names, with inputs of ``batch`` × ``seq`` tokens.

    Weights are read from the folder if it holds any; otherwise they are the architecture's own initialisation under
    seed 0, so that two loads give the same model.

    Args:
        attention_mask: whether the inputs have a mask, of ones.
    """
    path = config_file(model)
    try:
        import transformers
    except ImportError as error:
        raise SourceError(
            f"{model} needs Hugging Face transformers, which is not installed.", "pip install 'pipegraph[hf]'."
        ) from error
    config, fields = _read_config(path)
    # A cache of past keys is state between calls: a training step has none, and it would cross every boundary.
    for part in (config, config.get_text_config()):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    builder = _architecture(transformers, config, path)
    torch.manual_seed(0)
    is_stored = weights and has_weights(path.parent)
    initial_values = "" if is_stored else f"all parameters, because {path.parent} has a configuration and no weights"
    with nullcontext() if weights else parameters_on_meta(), _default_dtype(config.dtype):
        try:
            if is_stored:
                options = {"local_files_only": True, "weights_only": True, "output_loading_info": True}
                built, info = builder.from_pretrained(path.parent, config=config, **options)
                if missing := sorted(info["missing_keys"]):
                    initial_values = f"{first_names(missing)}, which the weights in {path.parent} lack"
            else:
                with initialisation_recorded() as mark:
                    built = builder(config)
                    mark(built)
        except pickle.UnpicklingError as error:
            raise SourceError(
                f"{path.parent} holds pickled weights that are damaged, or hold more than tensors, which is not read: "
                f"{refused_name(error)}.",
                "weights in safetensors, which save_pretrained writes, from a source that you trust.",
            ) from error
        except Exception as error:
            folder = repr(str(path.parent))
            tried = f".from_pretrained({folder})" if is_stored else f"(AutoConfig.from_pretrained({folder}))"
            raise SourceError(
                f"{path}: transformers could not build {builder.__name__}{' from these weights' * is_stored}: {error}",
                f"{builder.__name__}{tried} in Python.",
            ) from error
    built.train()
    return ModelSource(
        name=f"hf:{path.name}",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        model=built,
        args=(),
        kwargs=_example_inputs(built, config, path, batch, seq, attention_mask),
        rebuild=lambda: load_config(model, weights, batch, seq).model,
        inputs_of=lambda rows: _example_inputs(built, config, path, rows, seq, attention_mask),
        config={**fields, "architectures": [builder.__name__]},
        initial_values=initial_values,
    )


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Make parameters in the configuration's dtype, as ``AutoModel.from_config`` does."""
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype or previous_dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous_dtype)


def config_file(model: str) -> Path:
    path = require_path(model.removeprefix("hf:"), "MODEL is a file", error=SourceError)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        folder = path.parent
        json_files = [str(entry) for entry in sorted(folder.glob("*.json"))] if folder.is_dir() else []
        raise SourceError(
            f"No configuration file {path}.{nearest(str(path), json_files)} A configuration is never downloaded.",
            "hf: followed by a folder with a config.json, or by the file itself.",
        )
    return path


def _read_config(path: Path) -> tuple[Any, dict[str, Any]]:
    """The configuration, and its fields as they are in the file."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        fields = json.loads(read_regular_file(path))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON: {error}", f"python -m json.tool {path}.") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if kind not in CONFIG_MAPPING:
        raise SourceError(
            f"{path}: model_type {kind!r} is not an architecture of the installed transformers."
            f"{nearest(str(kind), CONFIG_MAPPING)}",
            "a model_type that transformers knows, such as llama.",
        )
    return AutoConfig.from_pretrained(path, trust_remote_code=False), fields


def _architecture(transformers: Any, config: Any, path: Path) -> Any:
    """The class that the configuration names, or the language model of its type."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    mappings = (
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        if config.is_encoder_decoder
        else transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_MAPPING,
    )
    for mapping in mappings:
        if type(config) in mapping:
            return mapping[type(config)]
    raise SourceError(f"{path}: no model class for {type(config).__name__}.", "name one in its architectures.")


def _example_inputs(
    model: Any, config: Any, path: Path, batch: int, seq: int, attention_mask: bool = False
) -> dict[str, Any]:
    """One microbatch: token ids [batch, seq] int64, with a mask of ones if it is asked for, or pixels [batch, channels,
    size, size] float32.

    Raises SourceError for a model that takes something else, such as sound, and ArgumentError for more than there is
    room for.
    """
    if model.main_input_name not in ("pixel_values", "input_ids"):
        raise SourceError(
            f"{path}: {type(model).__name__} takes {model.main_input_name}; hf: makes token ids and pixels.",
            "a model file that defines build_model() and example_inputs.",
        )
    generator = torch.Generator().manual_seed(0)
    batch_argument = argument("batch", batch)
    if model.main_input_name == "pixel_values":
        size, channels = _of_pixels(config, "image_size") or 224, _of_pixels(config, "num_channels") or 3
        height, width = (size, size) if isinstance(size, int) else size
        require_room(batch * channels * height * width * model.dtype.itemsize, f"pixel_values with {batch_argument}")
        return {"pixel_values": torch.randn(batch, channels, height, width, generator=generator, dtype=model.dtype)}
    require_room(batch * seq * torch.int64.itemsize, f"input_ids with {batch_argument} and {argument('seq', seq)}")
    vocabulary = config.get_text_config().vocab_size
    inputs = {"input_ids": torch.randint(0, vocabulary, (batch, seq), generator=generator)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(0, vocabulary, (batch, seq), generator=generator)
    if attention_mask:
        inputs |= {name.replace("input_ids", "attention_mask"): torch.ones_like(ids) for name, ids in inputs.items()}
    return inputs


def _of_pixels(config: Any, name: str) -> Any:
    """A field of a configuration, or of the first one inside it that has it, such as that of a backbone; else None."""
    field = getattr(config, name, None)
    inside = (getattr(config, part, None) for part in config.sub_configs)
    return next((value for value in (field, *(_of_pixels(part, name) for part in inside if part)) if value), None)


# How a parameter is cut into stored tensors, as transformers prints it: along its first dimension, or one tensor for
# each index of the first dimension (experts), whole or cut along the second.
_CUTS = {("Chunk(dim=0)",), ("SplitModulelist(dim=0)",), ("Chunk(dim=1)", "SplitModulelist(dim=0)")}


def checkpoint_names(model: nn.Module) -> dict[str, Any]:
    """The entry ``checkpoint`` of a manifest; empty for a model that is not of transformers.

    ``base_model_prefix`` is what the names in a checkpoint of the base model lack. ``stored`` holds, for each name of
    ``state_dict()`` that ``save_pretrained`` does not write as it is, the names of its parts in the order in which they
    are joined; ``*`` stands for the index of the first dimension. No parts: only transformers can read it. For a model
    of PEFT it is the checkpoint of the model that it adapts, and ``adapters`` are the names that this one lacks.
    """
    transformers: Any = sys.modules.get("transformers")
    base = base_model_of(model)
    whole = model if base is None else base
    if transformers is None or not isinstance(whole, transformers.PreTrainedModel):
        return {}
    names = {name: name for name in model.state_dict()} if base is None else base_names(model)
    stored: dict[str, list[str]] = {}
    renamings, converters = _transforms(whole)
    for name, base_name in names.items():
        parts = [name] if base_name is None else _parts(base_name, renamings, converters)
        if parts != [name]:
            stored[name] = parts
    entry: dict[str, Any] = {"base_model_prefix": whole.base_model_prefix, "stored": stored}
    if adapters := [name for name, base_name in names.items() if base_name is None]:
        entry["adapters"] = adapters
    return entry


def tp_plan_of(model: nn.Module) -> dict[str, str]:
    """The model's own plan of tensor parallelism, in transformers' form; empty for a model that has none."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}
    plan = getattr(model, "tp_plan", None) or {}
    return {str(pattern): str(style) for pattern, style in plan.items()}


def _transforms(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The renamings and the conversions that ``save_pretrained`` applies.

    transformers has no public interface for them; ``core_model_loading.revert_weight_conversion`` does the same to the
    tensors themselves.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter
    except ImportError:  # transformers 4 stores every tensor under its own name
        return [], []
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [rule.reverse_transform() for rule in reversed(mapping) if not isinstance(rule, PrefixChange)]
    converters = [rule for rule in reverse if isinstance(rule, WeightConverter)]
    return [rule for rule in reverse if rule not in converters], converters


def _parts(name: str, renamings: list[Any], converters: list[Any]) -> list[str]:
    parts = [name]
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            if tuple(map(repr, converter.operations)) not in _CUTS:
                return []
            first = converter.target_patterns[0]
            parts = [renamed.replace(first, target_pattern) for target_pattern in converter.target_patterns]
            break
    for renaming in renamings:
        parts = [renaming.rename_source_key(part)[0] for part in parts]
    return parts
