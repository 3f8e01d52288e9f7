"""A small HTTP server that speaks llama-server's streaming completion format: what the bench's client talks to in
tests. Its tokens are a fixed function of the prompt; the first comes with the prompt, the others two a round.

As a program it takes llama-server's arguments: `stock_stand_in.py --port N -np N ...`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKENS_A_ROUND = 2
ROUND_S = 0.002


def continuation(prompt, n):
    """The tokens this server writes."""
    return [(sum(prompt) * 31 + 7 * i) % 200 for i in range(n)]


class Handler(BaseHTTPRequestHandler):
    """`broken`: every stream ends in its middle."""

    protocol_version = "HTTP/1.1"
    slots, broken = 4, False

    def do_GET(self):
        """/health and /props."""
        body = json.dumps({"status": "ok", "total_slots": self.slots, "model_path": "/models/stand-in.gguf"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        """/completion, streamed."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["stream"] and request["ignore_eos"] and not request["cache_prompt"]
        prompt, n = request["prompt"], request["n_predict"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = continuation(prompt, n)
        begin = time.perf_counter()
        for i, token in enumerate(tokens):
            if (i + 1) % TOKENS_A_ROUND == 0:
                time.sleep(ROUND_S)
            self._event({"content": "x", "tokens": [token], "stop": False})
            if self.broken and i == n // 2:
                self.close_connection = True
                self.connection.close()
                return
        rounds = (n - 1 + TOKENS_A_ROUND - 1) // TOKENS_A_ROUND
        timings = {
            "prompt_n": len(prompt), "prompt_ms": 1.0, "predicted_n": n, "draft_n": 2 * rounds,
            "draft_n_accepted": n - 1 - rounds, "predicted_ms": (time.perf_counter() - begin) * 1e3,
        }  # fmt: skip
        self._event({"content": "", "tokens": [], "stop": True, "timings": timings})
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event):
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *args):
        """Nothing is logged."""


@contextlib.contextmanager
def running(**attributes):
    """The URL of a server in this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), attributes))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    given = dict(zip(sys.argv, sys.argv[1:], strict=False))
    if given.get("-c") == "1":
        sys.exit("this server does not start")
    Handler.slots = int(given["-np"])
    ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
