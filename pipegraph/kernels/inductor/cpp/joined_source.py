"""Sources that each define a function `kernel`, as one that defines `kernel_0`, `kernel_1` and so on.

A compiler takes half a second to read the headers and to link, and a tenth to compile a kernel: that half a second is
spent once for all kernels of a graph.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$\n?", re.MULTILINE)


def joined_source(sources: Sequence[str]) -> str:
    """Return one source with the functions of all sources, each in its own namespace.

    Include directives come before the first function: no header is read within a namespace. `extern "C"` functions
    with one name are one function even in two namespaces, so a macro adds a number to each name.
    """
    includes = dict.fromkeys(line.strip() for source in sources for line in _INCLUDE.findall(source))
    lines = list(includes)
    for index, source in enumerate(sources):
        lines += [f"#define kernel {function_name(index)}", f"namespace part_{index} {{"]
        lines += [_INCLUDE.sub("", source), "}", "#undef kernel"]
    return "\n".join([*lines, ""])


def function_name(index: int) -> str:
    """The name of the function of a source that was joined to others."""
    return f"kernel_{index}"
