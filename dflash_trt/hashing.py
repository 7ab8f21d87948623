"""SHA-256 of files of many gigabytes: several at once, and each once, however often it is linked."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dflash_trt.progress import Advance

_CHUNK = 1 << 20  # bytes; hashing one lets other threads run
_TOLD = 1 << 25  # bytes between two reports: a rate of smaller ones would jump
_MOST_AT_ONCE = 8  # beyond it the disk, not the processor, is what there is to wait for


def bytes_to_hash(paths: Iterable[Path]) -> int:
    """What `sha256_of` will read of them."""
    return sum(files[0].stat().st_size for files in _distinct(paths))


def sha256_of(paths: Iterable[Path], advance: Advance = lambda amount: None) -> dict[Path, str]:
    """The hex digest of each file.

    Args:
        advance: called with the number of bytes hashed, from several threads.

    Raises:
        OSError: a file that cannot be read.
    """
    groups = sorted(_distinct(paths), key=lambda files: files[0].stat().st_size, reverse=True)
    stopped = threading.Event()

    def digest(file: Path) -> str:
        sha256, buffer, untold = hashlib.sha256(), bytearray(_CHUNK), 0
        with open(file, "rb", buffering=0) as stream:
            while not stopped.is_set() and (count := stream.readinto(buffer)):
                sha256.update(memoryview(buffer)[:count])
                untold += count
                if untold >= _TOLD:
                    advance(untold)
                    untold = 0
        advance(untold)
        return sha256.hexdigest()

    with ThreadPoolExecutor(min(_MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        try:
            digests = pool.map(digest, [files[0] for files in groups])
            return {path: found for files, found in zip(groups, digests, strict=True) for path in files}
        except BaseException:  # Ctrl-C too: leaving the pool waits for its threads
            stopped.set()
            raise


def _distinct(paths: Iterable[Path]) -> list[list[Path]]:
    """The paths, those of one file together."""
    files: dict[tuple[int, int], list[Path]] = {}
    for path in paths:
        stat = path.stat()
        files.setdefault((stat.st_dev, stat.st_ino), []).append(path)
    return list(files.values())
