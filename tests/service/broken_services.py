"""Services that are none: small HTTP servers that answer wrongly, slowly or not at all."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def answering(
    status: int = 200,
    body: bytes = b"{}",
    kind: str = "application/json",
    others: Mapping[str, tuple[int, bytes]] | None = None,
) -> Iterator[str]:
    """Every request has this answer, but for `others`: the last part of a path -> status and body."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            code, data = (others or {}).get(self.path.rsplit("/", 1)[-1], (status, body))
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def accepting(*, closes: bool, first: bytes = b"") -> Iterator[str]:
    """Connections are taken, and closed at once, after these bytes, or never answered."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if closes:
                time.sleep(0.01)
                if first:
                    connection.recv(65536)
                    connection.sendall(first)
                connection.close()
            else:
                taken.append(connection)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        for connection in taken:
            connection.close()


def unused() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
