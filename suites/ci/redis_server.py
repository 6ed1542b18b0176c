"""A Redis server on loopback, behind a password."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fakeredis import TcpFakeServer


@contextmanager
def serving(password: str) -> Iterator[str]:
    """Its URL, without the password."""
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    server.fake_server.config[b"requirepass"] = password.encode()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
