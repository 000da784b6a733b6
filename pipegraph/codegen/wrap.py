"""Break long lines of generated source the way a formatter would."""

from __future__ import annotations

from collections.abc import Iterator

LINE_LENGTH = 120
_OPEN, _CLOSE = "([{", ")]}"


def wrap(line: str, indent: int) -> list[str]:
    """``line`` at ``indent`` spaces, broken inside its last bracket if it is too long.

    First the bracket's content goes on a line of its own (arguments of a call only), then every element on its own
    line with a trailing comma.
    """
    pad = " " * indent
    if len(pad + line) <= LINE_LENGTH:
        return [pad + line]
    start, stop = _last_bracket(line)
    if start < 0:
        return [pad + line]
    head, content, tail = line[: start + 1], line[start + 1 : stop], line[stop:]
    elements = _split(content)
    inner = " " * (indent + 4)
    literal = not head[:-1] or head[-2] in " =([{"
    if len(inner + content) <= LINE_LENGTH and not content.endswith(",") and not (literal and len(elements) > 1):
        return [pad + head, inner + content, pad + tail]
    if " for " in content and len(elements) == 1 and head[-1] in "[{":
        before, _, after = content.rpartition(" for ")
        return [pad + head, *wrap(before, indent + 4), f"{inner}for {after}", pad + tail]
    if len(elements) == 1 and content[-1] in _CLOSE:
        return [pad + head, *wrap(content, indent + 4), pad + tail]
    lines = [pad + head]
    for element in elements:
        broken = wrap(element, indent + 4)
        lines += [*broken[:-1], f"{broken[-1]},"]
    return [*lines, pad + tail]


def _last_bracket(line: str) -> tuple[int, int]:
    """Positions of the outermost bracket pair that closes last."""
    depth, start, found = 0, -1, (-1, -1)
    for position, character in _code(line):
        if character in _OPEN:
            if depth == 0:
                start = position
            depth += 1
        elif character in _CLOSE:
            depth -= 1
            if depth == 0 and position - start > 1:
                found = (start, position)
    return found


def _split(content: str) -> list[str]:
    """Elements between commas outside brackets and strings."""
    depth, first, elements = 0, 0, []
    for position, character in _code(content):
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif character == "," and depth == 0:
            elements.append(content[first:position].strip())
            first = position + 1
    elements.append(content[first:].strip())
    return [element for element in elements if element]


def _code(text: str) -> Iterator[tuple[int, str]]:
    """The characters outside string literals, with their positions."""
    quote, escaped = "", False
    for position, character in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        else:
            yield position, character
