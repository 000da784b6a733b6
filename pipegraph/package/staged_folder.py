"""Writes a folder next to its final place and moves it there at once: readers find the old folder or the new one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from pipegraph.errors import PackageError
from pipegraph.units import format_bytes

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOCK_SECONDS: Final = 10.0
_AT_FDCWD, _SWAP = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)


@contextmanager
def staged_folder(folder: Path, check: Callable[[], None]) -> Iterator[Path]:
    """Yield a new folder next to ``folder``, which replaces it at the end. After an error the new folder is removed.

    If two callers write at the same time, the second one replaces the folder of the first, if ``check`` allows it.

    Args:
        folder: the final place. A folder that is there is removed at the end.
        check: raises if the folder that is there at the end must not be replaced.

    Raises:
        PackageError: the folder cannot be written, or the disk is full.
    """
    folder = Path(os.path.realpath(folder))  # a link to it stays
    above = existing_parent(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise unwritable(folder, above, error) from None
    try:
        with write_errors(folder):
            yield staging
            # Set the permissions of the user's umask, because mkdtemp and safetensors write for the owner alone.
            mode = _default_mode(staging)
            for file in staging.iterdir():
                file.chmod(mode)
            staging.chmod(mode | (mode & 0o444) >> 2)
            with _locked(folder.parent):
                check()
                replace_folder(folder, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn each OSError of the body, which writes what takes the place of a folder, into a PackageError."""
    try:
        yield
    except OSError as error:
        raise _write_error(folder, error) from error


def existing_parent(folder: Path) -> Path:
    """Return the innermost folder around a path that exists."""
    path = folder.absolute()
    return next((parent for parent in path.parents if parent.exists()), path)  # the root has none around it


def unwritable(folder: Path, above: Path, error: OSError) -> PackageError:
    """Return the error for a folder that cannot be written; ``above`` is the part of its path that exists."""
    if error.errno in _FULL:
        return _write_error(folder, error)
    why = f"takes no new folder ({error.strerror})" if above.is_dir() else "is a file, not a folder"
    return PackageError(f"{folder} cannot be written: {above} {why}.", "-o with another folder.")


def _write_error(folder: Path, error: OSError) -> PackageError:
    why = error.strerror or str(error)
    if error.errno not in _FULL:
        return PackageError(f"{folder} cannot be written: {why}.", "-o with another folder.")
    above = existing_parent(folder)
    disk = shutil.disk_usage(above)
    return PackageError(
        f"{folder} cannot be written: {why}. The disk of {above} has {format_bytes(disk.free)} free of "
        f"{format_bytes(disk.total)}.",
        "make room there, or -o with a folder on another disk.",
    )


def _default_mode(folder: Path) -> int:
    """Return the permissions of a new file there."""
    file = folder / ".mode"
    file.touch()
    try:
        return file.stat().st_mode & 0o777
    finally:
        file.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock of the folder while the body runs. Not every file system has one; nobody keeps it for long."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)  # which unlocks it


def replace_folder(folder: Path, staging: Path) -> None:
    """Put ``staging`` in the place of ``folder``; what was there is afterwards in the place of ``staging``."""
    if not folder.exists() or not any(folder.iterdir()):
        staging.rename(folder)
    elif not _swap(folder, staging):
        # This file system cannot swap two folders: for a moment no folder is there.
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        folder.rename(old / "old")
        try:
            staging.rename(folder)
        except OSError:
            (old / "old").rename(folder)
            raise
        finally:
            with suppress(OSError):
                shutil.rmtree(old)


def _swap(folder: Path, staging: Path) -> bool:
    """Exchange two folders in one moment, as Linux can. Return whether that is done."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(staging), _SWAP) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(folder))
