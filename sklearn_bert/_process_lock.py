"""A lock on a file that lasts as long as its process.

The operating system releases it when the process ends, in whatever way, and a forked child does not
inherit it. So whether a process that left its name somewhere is still alive can be asked without
process numbers, which are used again, and without clocks.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

if os.name == "nt":  # pragma: no cover
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True


__all__ = ["ProcessLock", "is_locked"]

_POLL_SECONDS = 0.005
_WAIT_SECONDS = 60.0


class ProcessLock:
    """Hold a lock on a file until :meth:`release` or the end of the process.

    A process must not open the file a second time: closing it anywhere lets go of the lock.

    Parameters
    ----------
    path : Path
        File to lock; created if it does not exist.
    wait : bool
        Whether to wait, a minute at most, while another process holds the lock.

    Raises
    ------
    OSError
        If the file cannot be created, or the lock cannot be had.
    """

    def __init__(self, path: Path, *, wait: bool) -> None:
        self.path = path
        self._file = open(path, "ab")  # noqa: SIM115 - open as long as the lock is held
        deadline = time.monotonic() + (_WAIT_SECONDS if wait else 0)
        while not _try_lock(self._file):
            if time.monotonic() > deadline:
                self._file.close()
                raise OSError(f"{path} is locked by another process")
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Let go of the lock."""
        self._file.close()

    def remove(self) -> None:
        """Let go of the lock, and remove its file."""
        self.release()
        _remove(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock on a file; removes the file if none does."""
    try:
        file = open(path, "r+b")  # noqa: SIM115 - closed below
    except OSError:
        return False
    with file:
        if not _try_lock(file):
            return True
    _remove(path)
    return False


def _remove(path: Path) -> None:
    """Remove a file that nobody here has open; where another has, Windows does not let us."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
