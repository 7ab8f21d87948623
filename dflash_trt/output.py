"""Writing a bundle so that it is there whole, or not at all.

A build works in a hidden sibling, `.NAME.RANDOM.partial`, which it holds a lock on, and renames it when done. A folder
whose lock can be taken belongs to a build that was killed (process ids would not tell: they repeat, in containers and
on shared filesystems), and the next build of the same output removes it.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_trt.bundle import is_bundle
from dflash_trt.errors import BundleError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def atomic_output(
    output: Path, *, force: bool, kind: str = "a bundle", is_one: Callable[[Path], bool] = is_bundle
) -> Iterator[Path]:
    """A temporary sibling of `output` that becomes `output` when the block ends without an error.

    Args:
        force: an existing output is replaced, if it is of the same kind.
        kind, is_one: what is written, in words, and whether a folder is one.

    Raises:
        BundleError: `output` exists (and is not to be replaced), or its folder cannot be written.
    """

    def check() -> None:
        if not output.exists() and not output.is_symlink():
            return
        if not is_one(output):
            what = f"exists already and is not {kind}, which --force would replace"
            raise BundleError(what, where=str(output), mend="Choose another place, or remove it yourself")
        if not force:
            mend = "Choose another place, or replace it with --force"
            raise BundleError("exists already", where=str(output), mend=mend)

    _clear_abandoned(output)
    check()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
        temporary.chmod(0o777 & ~_umask())
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise BundleError(what, where=str(output), mend="Choose another place") from error
    lock = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
        check()
        if output.exists():
            _replace(output, temporary)
        else:
            temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _replace(output: Path, temporary: Path) -> None:
    """Puts `temporary` in the place of `output`; the old one is then in the place of `temporary`, to be removed."""
    if not output.is_symlink() and _exchange(output, temporary):
        return
    # No exchange on this filesystem: a kill between the two renames is undone by the next build's clearing.
    replaced = temporary.with_suffix(".replaced")
    try:
        output.rename(replaced)
        temporary.rename(output)
    except BaseException:
        if not output.exists():
            replaced.rename(output)
        raise
    _remove(replaced)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two paths in one step (Linux); False where that cannot be done."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _clear_abandoned(output: Path) -> None:
    """Removes what killed builds of this output left behind, and puts back a bundle one of them had set aside."""
    for left in sorted(output.parent.glob(f".{glob.escape(output.name)}.*.*")):
        parts = left.name.removeprefix(f".{output.name}.").split(".")
        if len(parts) != 2 or parts[1] not in ("partial", "replaced") or _is_locked(left):
            continue
        if parts[1] == "replaced" and not output.exists():
            left.rename(output)
        else:
            _remove(left)


def _is_locked(folder: Path) -> bool:
    """Whether a build that is still running holds the folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
