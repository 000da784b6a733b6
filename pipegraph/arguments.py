"""Arguments in messages, as the one who asked writes them, and the check of their types at the door.

Who calls a function of pipegraph reads ``stages=2``; who typed a command reads ``--stages 2``.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Final, cast

from pipegraph.errors import ArgumentError, PipegraphError, one_line

_OPTIONS: Final = {"memory_bytes": "--memory", "out": "-o"}
"""The options that are not called as the argument of Python is."""

_NO_VALUE: Final = object()
_CLIPPED: Final = 100
"""Characters that a message shows of a name that is too long."""
_asked_by_command = False


@contextmanager
def asked_by_command() -> Iterator[None]:
    """Name arguments as options of the command line meanwhile, in this process."""
    global _asked_by_command
    previous_flag, _asked_by_command = _asked_by_command, True
    try:
        yield
    finally:
        _asked_by_command = previous_flag


def for_asker(python: str, command: str) -> str:
    """Return the text for who called a function, or the one for who typed a command."""
    return command if _asked_by_command else python


def argument(name: str, value: Any = _NO_VALUE, option: str | None = None) -> str:
    """Return an argument, with a value or alone: ``points=["layers.4"]``, or ``--points layers.4`` for a command.

    True and False make a flag: ``--overwrite``, ``--no-weights``. ``option`` is how the command calls it, if not as
    Python does.

    >>> argument("stages", 2), argument("balance", "time"), argument("points", ["layers.4"]), argument("ranks")
    ('stages=2', 'balance="time"', 'points=["layers.4"]', 'ranks')
    """
    option = option or _OPTIONS.get(name, f"--{name.replace('_', '-')}")
    if value is _NO_VALUE:
        return for_asker(name, option)
    if isinstance(value, bool):
        return for_asker(f"{name}={value}", option if value else f"--no-{option.removeprefix('--')}")
    is_list = isinstance(value, Collection) and not isinstance(value, str)
    plain = ",".join(map(str, value)) if is_list else str(value)
    return for_asker(f"{name}={_literal(list(value) if is_list else value)}", f"{option} {plain}")


def _literal(value: Any) -> str:
    """Return a value as Python source, with the quotes that the documentation has."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def require_type(
    value: object, kinds: Any, rule: str, advice: str = "", error: type[PipegraphError] = ArgumentError
) -> None:
    """Raise an error that says ``rule`` a function takes, and what this is, unless it is of one of the ``kinds``.

    ``rule`` is a clause, such as ``plan() takes what pipegraph.capture returns``. No bool is taken for a number.
    """
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, allowed) and (not isinstance(value, bool) or bool in allowed or object in allowed):
        return
    advice = f"\nTry: {advice}." if advice else ""
    raise error(f"{rule}; this is {_described(value)}.{advice}")


def _described(value: object) -> str:
    """Return ``a UNet`` for an object, ``the class UNet`` for a class, and a number, a text or None itself."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}…"
    name = type(value).__name__
    return f"a{'n' if name[0] in 'aeioAEIO' else ''} {name}"


def require_path(value: object, rule: str, advice: str = "", error: type[PipegraphError] = ArgumentError) -> Path:
    """Return a path. Raises an error as `require_type` does, and if no file can have this name.

    Of a path through a folder that does not exist, ``absent/../out``, the part without it is returned: the file system
    finds nothing under the whole one, also if there is a folder ``out``.
    """
    require_type(value, (str, PathLike), rule, advice, error)
    path = Path(cast("str | PathLike[str]", value))
    try:
        os.lstat(path)
    except (ValueError, OSError) as problem:
        if isinstance(problem, ValueError) or problem.errno == errno.ENAMETOOLONG:
            why = "it is too long" if isinstance(problem, OSError) else str(problem)
            name = str(path) if len(str(path)) <= _CLIPPED else f"{str(path)[:_CLIPPED]}…"
            raise error(f"No file or folder can be called {one_line(name)}: {one_line(why)}.") from None
        if ".." in path.parts:
            absolute = os.path.realpath(path)
            return Path(absolute if path.is_absolute() else os.path.relpath(absolute))
    return path
