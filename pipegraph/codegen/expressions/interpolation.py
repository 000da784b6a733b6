"""Upsampling as people write it: ``F.interpolate``, of which every mode is an operation of its own."""

from __future__ import annotations

from typing import Any

from torch import fx

from pipegraph.codegen.syntax.expression import Expression, Form, Writer


def _interpolate(mode: str, antialias: bool = False) -> Form:
    """``F.interpolate(x, scale_factor=2, mode="bilinear")``, to a size or by a factor."""

    def write(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
        size, factors = arguments.get("output_size"), arguments.get("scale_factors")
        named: dict[str, Any] = {}
        if factors is not None and size is None:
            short = [int(each) if float(each).is_integer() else each for each in factors]
            named["scale_factor"] = short[0] if len(set(short)) == 1 else tuple(short)
        elif size is not None and "scale_factors" in arguments and all(isinstance(each, int) for each in size):
            named["size"] = tuple(size)
        else:
            return None
        if mode != "nearest":
            named["mode"] = mode
        if arguments.get("align_corners"):
            named["align_corners"] = True
        if antialias:
            named["antialias"] = True
        return writer.call("F.interpolate", [arguments["input"]], named)

    return write


INTERPOLATIONS: dict[str, Form] = {
    "interpolate nearest": _interpolate("nearest"),
    "interpolate nearest-exact": _interpolate("nearest-exact"),
    "interpolate linear": _interpolate("linear"),
    "interpolate bilinear": _interpolate("bilinear"),
    "interpolate trilinear": _interpolate("trilinear"),
    "interpolate bicubic": _interpolate("bicubic"),
    "interpolate bilinear antialias": _interpolate("bilinear", antialias=True),
    "interpolate bicubic antialias": _interpolate("bicubic", antialias=True),
}
