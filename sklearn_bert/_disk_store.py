"""Computed vectors in a folder, shared by the processes of a machine.

One SQLite database in write-ahead mode holds a row for each text and shelf: its float32 numbers as
raw bytes with a checksum for each layer. Nothing is ever unpickled. Rows are appended in the order
they come and found through an index of short keys, so reading does not slow down as they grow many.
Putting does, since new keys fall all over the index; SQLite is given memory for it, lest it write
the same pages out and read them back several times in one transaction.

Claims are rows too. Their owner is a process, which holds a lock on a file of its own in the folder
``workers`` for as long as it lives: the operating system lets go of the lock when the process ends,
however it ends, so a claim of the dead is told from one of the living without a clock.

The rule for other modules: go through ``_cache``, which turns every failure here into a warning.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import re
import sqlite3
import threading
import time
import uuid
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._process_lock import ProcessLock, is_locked
from ._store import CacheInfo, Shelf

__all__ = ["DATABASE", "DiskStore", "StoreFormatError", "remove_store"]

DATABASE = "features.sqlite"
_FORMAT = 1
_APPLICATION_ID = 0x62657274  # "bert"
_SCHEMA = """
CREATE TABLE shelves (
    id INTEGER PRIMARY KEY, namespace TEXT, pooling TEXT, layers TEXT, hidden_size INTEGER,
    UNIQUE (namespace, pooling, layers, hidden_size));
CREATE TABLE rows (
    id INTEGER PRIMARY KEY, shelf INTEGER, text BLOB, n_tokens INTEGER, used INTEGER,
    checksums BLOB, block BLOB);
CREATE UNIQUE INDEX rows_by_text ON rows (shelf, text);
CREATE INDEX rows_by_use ON rows (used);
CREATE TABLE claims (
    namespace TEXT, text BLOB, owner TEXT, PRIMARY KEY (namespace, text)) WITHOUT ROWID;
"""
_PAGE_SIZE = 32768  # a row of a few tens of kilobytes fits
# Most memory of SQLite in a process: the pages of the index that a put changes should fit.
_PAGE_CACHE_KIB = 65536
_OWNER = re.compile("[0-9a-f]{32}")
_BUSY_SECONDS = 60.0
_KEYS_PER_QUERY = 500
# The time of use is written at most this often, so that reading a warm cache writes nothing.
_USE_RESOLUTION = 3600
_POLL_SECONDS = 0.02


class StoreFormatError(Exception):
    """The database is of another format, or not a feature cache at all."""

    def __init__(self, message: str, *, is_ours: bool) -> None:
        super().__init__(message)
        self.is_ours = is_ours


def remove_store(folder: str) -> None:
    """Remove the files of a store from a folder, and no others."""
    for suffix in ("", "-wal", "-shm"):
        Path(folder, DATABASE + suffix).unlink(missing_ok=True)
    for path in Path(folder, "workers").glob("*"):
        if _OWNER.fullmatch(path.name):
            path.unlink(missing_ok=True)


class DiskStore:
    """Rows in a SQLite database.

    Parameters
    ----------
    folder : str
        Created, readable by its owner only, if it does not exist.

    Raises
    ------
    OSError, sqlite3.Error, StoreFormatError
        If there is no usable database and none can be made.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._mutex = threading.RLock()
        self._owner: ProcessLock | None = None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._folder / "workers").mkdir(mode=0o700, exist_ok=True)
        # The first to come creates the database; switching to write-ahead mode does not wait for
        # others as everything else in SQLite does, so it happens under a lock.
        with ProcessLock(self._folder / "create.lock", wait=True):
            self._connection = _open(self._folder / DATABASE)
            for path in (self._folder / "workers").iterdir():
                if _OWNER.fullmatch(path.name):
                    is_locked(path)  # removes what the dead have left

    def shelves_holding(self, shelf: Shelf) -> list[Shelf]:
        """Return the shelves whose rows have all that rows of `shelf` have."""
        with self._mutex:
            stored = self._connection.execute(
                "SELECT layers FROM shelves WHERE namespace = ? AND pooling = ? "
                "AND hidden_size = ?",
                (shelf.namespace, shelf.pooling, shelf.hidden_size),
            ).fetchall()
        shelves = [replace(shelf, layers=tuple(json.loads(layers))) for (layers,) in stored]
        return [candidate for candidate in shelves if candidate.holds(shelf)]

    def read(
        self, shelf: Shelf, layers: Sequence[int], texts: Sequence[str]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
        """Read some layers of the rows of a shelf, leaving out rows that are damaged.

        Returns
        -------
        found : ndarray of shape (n_found,)
            Positions in `texts`.
        n_tokens : ndarray of shape (n_found,)
            Numbers of tokens.
        states : ndarray of shape (n_found, n_layers, hidden_size)
            float32.
        """
        positions = {_key(text): position for position, text in enumerate(texts)}
        parts = [shelf.layers.index(layer) for layer in layers]
        found, n_tokens, blocks, unused = [], [], [], []
        now = int(time.time())
        with self._mutex:
            for key, count, used, identity, *columns in self._rows(shelf, parts, list(positions)):
                block = _checked(columns, shelf, layers, key, count)
                if block is not None:
                    found.append(positions[key])
                    n_tokens.append(count)
                    blocks.append(block)
                if not isinstance(used, int) or used < now - _USE_RESOLUTION:
                    unused.append((now, identity))
            if unused:
                with self._transaction() as connection:
                    connection.executemany("UPDATE rows SET used = ? WHERE id = ?", unused)
        states = np.frombuffer(b"".join(blocks), "<f4").reshape(-1, len(parts), shelf.hidden_size)
        return np.array(found, np.intp), np.array(n_tokens, np.intp), states

    def put(
        self,
        shelf: Shelf,
        texts: Sequence[str],
        n_tokens: NDArray[np.intp],
        states: NDArray[np.float32],
        max_bytes: int,
    ) -> None:
        """Keep rows, dropping the least recently used ones beyond `max_bytes`."""
        now = int(time.time())
        records = []
        for text, count, block in zip(
            texts, n_tokens.tolist(), np.ascontiguousarray(states, "<f4"), strict=True
        ):
            key = _key(text)
            checksums = b"".join(
                _checksum(state, shelf, layer, key, count)
                for layer, state in zip(shelf.layers, block, strict=True)
            )
            records.append((key, count, now, checksums, block.tobytes()))
        with self._mutex, self._transaction() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO rows (shelf, text, n_tokens, used, checksums, block) "
                f"VALUES ({self._shelf_id(shelf)}, ?, ?, ?, ?, ?)",
                records,
            )
            self._shrink(max_bytes)

    def claim(self, namespace: str, texts: Sequence[str]) -> set[str]:
        """Claim those of `texts` that no living process has claimed, and return them."""
        keys = {_key(text): text for text in texts}
        with self._mutex, self._transaction() as connection:
            owner = self._own_name()
            claimed: dict[bytes, str] = {}
            for some in _pieces(list(keys)):
                claimed.update(
                    connection.execute(
                        "SELECT text, owner FROM claims WHERE namespace = ? AND text IN "
                        f"({_marks(some)})",
                        (namespace, *some),
                    )
                )
            dead = {name for name in set(claimed.values()) - {owner} if not self._is_alive(name)}
            connection.executemany("DELETE FROM claims WHERE owner = ?", [(n,) for n in dead])
            mine = [key for key in keys if key not in claimed or claimed[key] in dead]
            connection.executemany(
                "INSERT INTO claims VALUES (?, ?, ?)", [(namespace, key, owner) for key in mine]
            )
            return {keys[key] for key in mine}

    def release(self, namespace: str, texts: Collection[str]) -> None:
        """Give up claims."""
        with self._mutex, self._transaction() as connection:
            connection.executemany(
                "DELETE FROM claims WHERE namespace = ? AND text = ?",
                [(namespace, _key(text)) for text in texts],
            )

    def pause(self) -> None:
        """Wait a moment for other processes."""
        time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Close the database, and make all claims of this process void."""
        with self._mutex:
            self.abandon_claims()
            self._connection.close()

    def abandon_claims(self) -> None:
        """Make all claims of this process void, without writing to the database."""
        with self._mutex:
            if self._owner is not None:
                _remove_lock(self._owner, os.getpid())
                self._owner = None

    def info(self, max_bytes: int) -> CacheInfo:
        """Count what is kept."""
        with self._mutex:
            n_texts, n_vectors = self._connection.execute(
                "SELECT count(DISTINCT namespace || hex(text)), "
                "coalesce(sum(length(checksums) / 4), 0) "
                "FROM rows JOIN shelves ON shelves.id = rows.shelf"
            ).fetchone()
            return CacheInfo(n_texts, n_vectors, self._n_bytes(), max_bytes)

    def clear(self) -> None:
        """Forget all rows and give their space back."""
        with self._mutex:
            with self._transaction() as connection:
                connection.execute("DELETE FROM rows")
                connection.execute("DELETE FROM shelves")
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def prune(self, max_bytes: int) -> None:
        """Drop the least recently used rows beyond `max_bytes`, and give the space back."""
        with self._mutex:
            with self._transaction():
                self._shrink(max_bytes)
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _shelf_id(self, shelf: Shelf) -> int:
        values = (shelf.namespace, shelf.pooling, json.dumps(shelf.layers), shelf.hidden_size)
        self._connection.execute(
            "INSERT OR IGNORE INTO shelves (namespace, pooling, layers, hidden_size) "
            "VALUES (?, ?, ?, ?)",
            values,
        )
        return self._connection.execute(
            "SELECT id FROM shelves WHERE (namespace, pooling, layers, hidden_size) = (?, ?, ?, ?)",
            values,
        ).fetchone()[0]

    def _rows(self, shelf: Shelf, parts: Sequence[int], keys: Sequence[bytes]) -> Iterator[Any]:
        """Yield key, number of tokens, time of use, id, and checksum and bytes of each part."""
        width = 4 * shelf.hidden_size
        columns = "".join(
            f", substr(checksums, {4 * p + 1}, 4), substr(block, {width * p + 1}, {width})"
            for p in parts
        )
        named = (shelf.namespace, shelf.pooling, json.dumps(shelf.layers), shelf.hidden_size)
        for some in _pieces(keys):
            yield from self._connection.execute(
                f"SELECT text, n_tokens, used, id{columns} FROM rows WHERE shelf = (SELECT id FROM "
                "shelves WHERE (namespace, pooling, layers, hidden_size) = (?, ?, ?, ?)) "
                f"AND text IN ({_marks(some)})",
                (*named, *some),
            ).fetchall()

    def _shrink(self, max_bytes: int) -> None:
        """Drop the least recently used rows until a tenth of `max_bytes` is free."""
        n_bytes = self._n_bytes()
        if n_bytes <= max_bytes:
            return
        n_rows, size = self._connection.execute(
            "SELECT count(*), coalesce(sum(length(block)), 0) FROM rows"
        ).fetchone()
        share = min(1.0, (n_bytes - 0.9 * max_bytes) / max(size, 1))
        n_dropped = math.ceil(n_rows * share)
        self._connection.execute(
            "DELETE FROM rows WHERE id IN (SELECT id FROM rows ORDER BY used, id LIMIT ?)",
            (n_dropped,),
        )

    def _n_bytes(self) -> int:
        """Size of the database without its free pages."""
        pages = self._connection.execute("PRAGMA page_count").fetchone()[0]
        free = self._connection.execute("PRAGMA freelist_count").fetchone()[0]
        return (pages - free) * _PAGE_SIZE

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite may have rolled back already
                self._connection.execute("ROLLBACK")
            raise

    def _own_name(self) -> str:
        """Name under which this process claims; its lock is taken at the first claim."""
        if self._owner is None:
            with ProcessLock(self._folder / "create.lock", wait=True):
                self._owner = ProcessLock(self._folder / "workers" / uuid.uuid4().hex, wait=False)
            atexit.register(_remove_lock, self._owner, os.getpid())
        return self._owner.path.name

    def _is_alive(self, owner: str) -> bool:
        return is_locked(self._folder / "workers" / owner)


def _open(path: Path) -> sqlite3.Connection:
    """Open the database, creating it if it is not there; call under the lock for creation."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            connection.execute(f"PRAGMA page_size = {_PAGE_SIZE}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID}; "
                f"PRAGMA user_version = {_FORMAT}; COMMIT;"
            )
        elif (application, found) != (_APPLICATION_ID, _FORMAT):
            raise StoreFormatError(
                f"{path} is not a feature cache of format {_FORMAT} (it says {found})",
                is_ours=application == _APPLICATION_ID,
            )
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA cache_size = {-_PAGE_CACHE_KIB}")
    except BaseException:
        connection.close()
        raise
    return connection


def _remove_lock(lock: ProcessLock, pid: int) -> None:
    if os.getpid() == pid:  # not a forked child of the process that holds it
        lock.remove()


def _key(text: str) -> bytes:
    """Key of a text: 128 bits of BLAKE2b of its exact characters."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


def _checksum(state: Any, shelf: Shelf, layer: int, key: bytes, n_tokens: int) -> bytes:
    """Checksum of a state and of all that says whose it is, so that no other passes for it."""
    whose = f"{shelf.namespace} {shelf.pooling} {layer} {key.hex()} {n_tokens}"
    return zlib.crc32(state, zlib.crc32(whose.encode())).to_bytes(4, "little")


def _checked(
    columns: Sequence[Any], shelf: Shelf, layers: Sequence[int], key: bytes, n_tokens: Any
) -> bytes | None:
    """Join the layers of a row, or return None if one does not fit its checksum."""
    for layer, checksum, state in zip(layers, columns[::2], columns[1::2], strict=True):
        whole = isinstance(state, bytes) and len(state) == 4 * shelf.hidden_size
        if not whole or _checksum(state, shelf, layer, key, n_tokens) != checksum:
            return None
    return b"".join(columns[1::2])


def _pieces(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (keys[i : i + _KEYS_PER_QUERY] for i in range(0, len(keys), _KEYS_PER_QUERY))


def _marks(keys: Sequence[bytes]) -> str:
    return ", ".join("?" * len(keys))
