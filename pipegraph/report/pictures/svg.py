"""What the pictures have in common: their font, their greys, and how numbers and texts are written into SVG."""

from __future__ import annotations

from html import escape

LIGHT, GREY, DARK = "#f1f3f5", "#6b7280", "#111827"
LINE = "#d1d5db"
FONT = "font-family=\"'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif\""
LETTER = 5.9
"""About the width of a letter of 11 pixels."""


def px(number: float) -> str:
    """Pixels, of two decimals at most, so that equal pictures are equal files.

    >>> px(1.0), px(0.128)
    ('1', '0.13')
    """
    return f"{number:.2f}".rstrip("0").rstrip(".")


def text(text: str) -> str:
    """Escaped, and without the control characters that XML has no place for: a name may hold anything.

    >>> text("<a>")
    '&lt;a&gt;'
    """
    return escape("".join(character if character.isprintable() else "\ufffd" for character in text))


def picture(width: float, height: float, name: str, drawing: list[str]) -> str:
    """A whole file on a white ground; ``name`` is what a reader that sees no pictures says."""
    size = f'width="{px(width)}" height="{px(height)}" viewBox="0 0 {px(width)} {px(height)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT} font-size="11" fill="{DARK}">',
            f"<title>{text(name)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *drawing,
            "</svg>\n",
        ]
    )
