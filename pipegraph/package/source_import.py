"""Packages on disk, imported under names of their own, so that two of them, or two versions of one, do not meet.

Only files that `pipeline.json` lists are imported, and always from their text: Python would trust an old or foreign
``.pyc`` of a file.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import weakref
from collections.abc import Container, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

from pipegraph.errors import PackageError, path_from_here

_numbers = itertools.count()
PACKAGE_NAME: Final = "_pipegraph_package_"
"""What the names of imported packages begin with."""


class ImportedPackage:
    """The Python package in a folder.

    Its modules leave ``sys.modules`` when nothing that `keep_for` was called with is left, or at the end of a ``with``.

    Args:
        files: the files that may be imported.
        texts: their texts, if they are not on disk.

    Attributes:
        name: of its module.
        module: what ``__init__.py`` defines.

    Raises:
        PackageError: a file is not among `files`. Whatever the source raises is raised as it is.
    """

    def __init__(self, folder: Path, files: Container[str], texts: Mapping[str, str] | None = None) -> None:
        self.name = f"{PACKAGE_NAME}{next(_numbers)}"
        self._users = 0
        _SOURCE_FINDER.packages[self.name] = folder, files, texts
        if _SOURCE_FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _SOURCE_FINDER)
        try:
            self.module: ModuleType = importlib.import_module(self.name)
        except BaseException:
            self._remove()
            raise

    def __enter__(self) -> ImportedPackage:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def keep_for(self, user: object) -> None:
        """Keep the modules as long as this object lives, because its methods may import others of them."""
        self._users += 1
        weakref.finalize(user, self._release).atexit = False

    def _release(self) -> None:
        self._users -= 1
        if not self._users:
            self._remove()

    def _remove(self) -> None:
        _SOURCE_FINDER.packages.pop(self.name, None)
        for name in [name for name in sys.modules if name.partition(".")[0] == self.name]:
            del sys.modules[name]


class _TextLoader(SourceFileLoader):
    """Compiles the text of a file, and neither reads nor writes a cache."""

    def __init__(self, fullname: str, path: str, text: str | None) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return super().get_data(path) if self._text is None else self._text.encode()

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _SourceFinder(MetaPathFinder):
    """Finds the modules of imported packages. `packages` has the folder, the listed files and, perhaps, the texts."""

    def __init__(self) -> None:
        self.packages: dict[str, tuple[Path, Container[str], Mapping[str, str] | None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inside = fullname.partition(".")
        if package not in self.packages:
            return None
        folder, files, texts = self.packages[package]
        name = f"{inside.replace('.', '/') or '__init__'}.py"
        place = folder / name
        if name not in texts if texts is not None else not place.is_file():
            return None
        if name not in files:
            raise PackageError(
                f"{path_from_here(place)} would be imported, and pipeline.json does not list it.",
                "its content in a file of the package that is listed, or in a module outside of the package.",
            )
        loader = _TextLoader(fullname, str(place), None if texts is None else texts[name])
        locations = None if inside else [str(folder)]
        return spec_from_file_location(fullname, place, loader=loader, submodule_search_locations=locations)


_SOURCE_FINDER: Final = _SourceFinder()
