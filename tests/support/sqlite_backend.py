"""A backend for torch that knows nothing of rdzv: one row of an SQLite table."""

from __future__ import annotations

import sqlite3

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend


class SqliteBackend(RendezvousBackend):
    def __init__(self, path, run_id):
        self._path = path
        self._run_id = run_id
        with self._connect() as db:
            db.execute("CREATE TABLE IF NOT EXISTS rdzv (run TEXT PRIMARY KEY, version INTEGER, state BLOB)")

    @property
    def name(self):
        return "sqlite"

    def get_state(self):
        try:
            with self._connect() as db:
                row = db.execute("SELECT state, version FROM rdzv WHERE run = ?", (self._run_id,)).fetchone()
        except sqlite3.Error as error:
            raise RendezvousConnectionError("sqlite failed") from error
        return row

    def set_state(self, state, token=None):
        try:
            with self._connect() as db:
                if token is None:
                    query = "INSERT OR IGNORE INTO rdzv VALUES (?, 1, ?)"
                    done = db.execute(query, (self._run_id, state)).rowcount
                else:
                    query = "UPDATE rdzv SET state = ?, version = version + 1 WHERE run = ? AND version = ?"
                    done = db.execute(query, (state, self._run_id, token)).rowcount
        except sqlite3.Error as error:
            raise RendezvousConnectionError("sqlite failed") from error
        row = self.get_state()
        return None if row is None else (*row, done == 1)

    def _connect(self):
        return sqlite3.connect(self._path, timeout=5, isolation_level=None)
