"""Small models as packages, each with what makes a pipeline of it hard."""

from __future__ import annotations

from collections.abc import Callable

from tests.runtime.packages import Sketch, Stage


def chain(stages: int, width: int = 8) -> Sketch:
    """Linear and tanh, `stages` times."""
    parts, values = [], {"x": ("float32", (2, width), False)}
    for index in range(stages):
        name = f"h{index}"
        parts.append(
            Stage(
                "x" if index == 0 else f"h{index - 1}",
                name,
                f"self.layer{index} = nn.Linear({width}, {width})",
                f"return torch.tanh(self.layer{index}({'x' if index == 0 else f'h{index - 1}'}))",
            )
        )
        values[name] = ("float32", (2, width), True)
    return Sketch(tuple(parts), values, f"h{stages - 1}")


def skips() -> Sketch:
    """Four stages: `a` goes to 1, 2 and 3; integers and floats without gradient cross over; `a` is returned as well."""
    wide = ("float32", (2, 5, 8), True)
    return Sketch(
        stages=(
            Stage(
                "tokens",
                "a, cosine, mask",
                "self.embed = nn.Embedding(6, 8)\n"
                "self.register_buffer('table', torch.arange(40.0).reshape(5, 8), persistent=False)",
                "a = self.embed(tokens)\nreturn a, torch.cos(self.table).expand(len(tokens), 5, 8), tokens > 2",
            ),
            Stage("a", "b", "self.one = nn.Linear(8, 8)", "return torch.tanh(self.one(a)) + a"),
            Stage("a, b, cosine", "c, b2", "self.two = nn.Linear(8, 8)", "return self.two(a + b) * cosine, b"),
            Stage(
                "c, a, b2, mask, weights, cosine",
                "logits, a",
                "self.norm = nn.LayerNorm(8)\nself.head = nn.Linear(8, 4)",
                "logits = self.head(self.norm(c + a * b2 + cosine)) * weights[:, None, None]\n"
                "return logits.masked_fill(mask[:, :, None], 0.5), a",
            ),
        ),
        values={
            "tokens": ("int64", (2, 5), False),
            "weights": ("float32", (2,), False),
            "a": wide,
            "cosine": ("float32", (2, 5, 8), False),
            "mask": ("bool", (2, 5), False),
            "b": wide,
            "b2": wide,
            "c": wide,
            "logits": ("float32", (2, 5, 4), True),
        },
        outputs={"logits": "logits", "hidden": ["a", None]},
        kwargs={"weights": "weights"},
    )


def tied() -> Sketch:
    """Three stages: the embedding is the head under another name; `shared.weight` stands in all three."""
    return Sketch(
        stages=(
            Stage(
                "tokens",
                "a",
                "self.embed = nn.Embedding(6, 8)\nself.shared = nn.Linear(8, 8, bias=False)",
                "return self.shared(self.embed(tokens))",
            ),
            Stage("a", "b", "self.shared = nn.Linear(8, 8, bias=False)", "return torch.tanh(self.shared(a))"),
            Stage(
                "b",
                "logits",
                "self.shared = nn.Linear(8, 8, bias=False)\nself.output = nn.Linear(8, 6, bias=False)",
                "return self.output(self.shared(b))",
            ),
        ),
        values={
            "tokens": ("int64", (2, 5), False),
            "a": ("float32", (2, 5, 8), True),
            "b": ("float32", (2, 5, 8), True),
            "logits": ("float32", (2, 5, 6), True),
        },
        outputs="logits",
        tied=(("embed.weight", "output.weight"),),
    )


def frozen() -> Sketch:
    """Three stages: the first is frozen whole and needs no gradient, the second in part."""
    return Sketch(
        stages=(
            Stage("x", "a", "self.one = nn.Linear(8, 8).requires_grad_(False)", "return self.one(x)"),
            Stage(
                "a",
                "b",
                "self.two = nn.Linear(8, 8)\nself.two.bias.requires_grad_(False)",
                "return torch.tanh(self.two(a))",
            ),
            Stage("b", "c", "self.three = nn.Linear(8, 8)", "return self.three(b)"),
        ),
        values={
            "x": ("float32", (2, 8), False),
            "a": ("float32", (2, 8), False),
            "b": ("float32", (2, 8), True),
            "c": ("float32", (2, 8), True),
        },
        outputs="c",
    )


def aliases() -> Sketch:
    """Two stages: outputs that are the input itself or views of it, and one that nothing uses."""
    plain = ("float32", (2, 8), True)
    return Sketch(
        stages=(
            Stage("x", "a, left, unused", "self.one = nn.Linear(8, 8)", "a = self.one(x)\nreturn a, a[:, :4], a * 2"),
            Stage("a, left", "a, b", "self.two = nn.Linear(4, 8)", "return a, self.two(left)"),
        ),
        values={
            "x": ("float32", (2, 8), False),
            "a": plain,
            "left": ("float32", (2, 4), True),
            "unused": plain,
            "b": plain,
        },
        outputs=["b", "a"],
    )


def normed() -> Sketch:
    """Two stages with batch norm and dropout, whose mode and statistics matter."""
    return Sketch(
        stages=(
            Stage(
                "x", "a", "self.one = nn.Linear(8, 8)\nself.norm = nn.BatchNorm1d(8)", "return self.norm(self.one(x))"
            ),
            Stage("a", "b", "self.two = nn.Linear(8, 8)\nself.drop = nn.Dropout(0.5)", "return self.drop(self.two(a))"),
        ),
        values={"x": ("float32", (4, 8), False), "a": ("float32", (4, 8), True), "b": ("float32", (4, 8), True)},
        outputs="b",
    )


PARITY: dict[str, Callable[[], Sketch]] = {
    "chain2": lambda: chain(2),
    "chain3": lambda: chain(3),
    "chain4": lambda: chain(4),
    "skips": skips,
    "tied": tied,
    "frozen": frozen,
    "aliases": aliases,
}
"""Packages without random or per-batch layers, for which every schedule must give the numbers of plain autograd."""
