"""The models of the zoo that the tests split."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.survey.survey_case import TOKENS, Inputs, Size, SurveyCase, images, rows, token_numbers
from pipegraph.graph.sources import load
from tests.zoo.architectures import CONFIGURATIONS
from tests.zoo.handwritten import HANDWRITTEN

# Convolutions alone take any size; the vision transformer is made for one.
_PIXELS: dict[str, tuple[Size, ...]] = {
    "ViTForImageClassification": ((16, 16), (12, 12), (24, 24)),
    "ResNetForImageClassification": ((37, 41), (31, 29), (43, 53)),
    "ConvNextForImageClassification": ((37, 41), (31, 29), (43, 53)),
}


def from_configuration(name: str, fields: dict[str, Any]) -> nn.Module:
    """What ``hf:`` builds of a configuration."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"architectures": [name], **fields}))
        return load(f"hf:{folder}", batch=2, seq=8).model


def transformers_case(name: str, fields: dict[str, Any]) -> SurveyCase:
    """A language model, a translator or an image classifier of transformers."""
    build = partial(from_configuration, name, fields)
    if name in _PIXELS:
        return SurveyCase(name, "transformers", build, _by_name("pixel_values", images()), _PIXELS[name])
    make_inputs = _translation if "decoder_start_token_id" in fields else _by_name("input_ids", token_numbers(96))
    return SurveyCase(name, "transformers", build, make_inputs, TOKENS)


def _translation(batch: int, size: Size) -> Inputs:
    """Text of one length, and of another."""
    (length,) = size
    texts = (torch.randint(3, 96, (batch, tokens)) for tokens in (length, length + 4))
    return (), dict(zip(("input_ids", "decoder_input_ids"), texts, strict=True))


def _by_name(name: str, inputs: Any) -> Any:
    """The only argument, by its name."""

    def named(batch: int, size: Size) -> Inputs:
        ((value,), _) = inputs(batch, size)
        return (), {name: value}

    return named


def _towers(batch: int, size: Size) -> Inputs:
    query, document = size
    return (torch.randint(50, (batch, query)), torch.randint(50, (batch, document))), {}


_HANDWRITTEN = {
    "U-Net": (images(), ((24, 40), (16, 24), (56, 40))),
    "two towers": (_towers, ((13, 17), (7, 11), (19, 23))),
    "mixture of experts": (rows(12), ()),
    "one module called twice": (rows(16), ()),
    "recurrent cell": (rows(12), TOKENS),
}

ZOO = (
    *(transformers_case(name, fields) for name, fields in CONFIGURATIONS.items()),
    *(
        SurveyCase(name, "own", lambda name=name: HANDWRITTEN[name]()[0], inputs, sizes)
        for name, (inputs, sizes) in _HANDWRITTEN.items()
    ),
)
"""Hugging Face architectures, and hand-written models that are not a chain of equal layers."""
