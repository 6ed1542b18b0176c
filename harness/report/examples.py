"""Where hypothesis keeps failing examples that several runs share: a folder, or a Redis server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

PASSWORD = "DRAFTPROOF_REDIS_PASSWORD"
SECONDS = 10.0
"""In which a server must answer."""


def is_server(where: str) -> bool:
    return "://" in where


def checked(where: str) -> str:
    """Raises ValueError for a URL that is no Redis server's, or holds a password, without showing it."""
    if not is_server(where):
        return where
    parts = urlsplit(where)
    if parts.password or parts.query:
        raise ValueError(f"the URL of the example database: take the password out of it, and set {PASSWORD}")
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError(f"example database {where}: must be a folder, redis://HOST:PORT/NUMBER or rediss://...")
    return where


def database(where: str) -> ExampleDatabase:
    """Raises ValueError when the server does not answer: every test would fail of it."""
    from hypothesis.database import DirectoryBasedExampleDatabase

    if not is_server(checked(where)):
        return DirectoryBasedExampleDatabase(Path(where).absolute())
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis, RedisError
    except ImportError as error:
        raise ValueError(f"example database {where}: needs the package redis: pip install redis") from error
    password = os.environ.get(PASSWORD)
    server = Redis.from_url(where, password=password, socket_timeout=SECONDS, socket_connect_timeout=SECONDS)
    try:
        server.ping()
    except RedisError as error:
        raise ValueError(f"example database {where}: {error}; is the server there, and {PASSWORD} right?") from error
    return RedisExampleDatabase(server)
