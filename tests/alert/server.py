"""A webhook: an HTTP server that keeps what it is sent."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook:
    """Where messages arrive. `refuses`: it answers with an error; `hangs`: it does not answer at all."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.asked = 0
        self.refuses = False
        self.hangs = False
        self._over = threading.Event()
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.asked += 1
                if webhook.hangs:
                    webhook._over.wait()
                    return
                if not webhook.refuses:
                    webhook.got.append(json.loads(body))
                self.send_response(500 if webhook.refuses else 200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address, as apprise has it, with what nobody should read."""
        return f"json://someone:hush@127.0.0.1:{self._server.server_port}/hook"

    @property
    def titles(self) -> list[str]:
        """Of the messages, in the order of their arrival."""
        return [message["title"] for message in self.got]

    def close(self) -> None:
        """End it."""
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    """A server that ends with the block."""
    server = Webhook()
    try:
        yield server
    finally:
        server.close()
