"""A real S3-speaking server for tests, as a process of its own, and a door before it that can do harm."""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LIMIT_S = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """moto's S3. It forgets everything when it ends."""

    def __init__(self):
        self.port = free_port()
        self.start()

    def start(self):
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert self.process.poll() is None, "moto's server has ended"
                assert time.monotonic() < deadline, "moto's server does not come up"
                time.sleep(0.05)

    def ask(self, method, path, body=None):
        asked = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        asked.request(method, path, body, {"Host": "s3.amazonaws.com", "Authorization": AUTHORIZATION})
        answer = asked.getresponse()
        found = answer.status, answer.read()
        asked.close()
        return found

    def end(self):
        self.process.kill()
        self.process.wait()


AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"


REFUSALS = {
    "500": ("InternalError", "We encountered an internal error."), "403": ("AccessDenied", "Access Denied"),
    "503": ("SlowDown", "Please reduce your request rate."),
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """One request at the door."""

    protocol_version = "HTTP/1.1"

    def handle_one(self):
        door = self.server.door
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else b""
        mode = door.takes(self.command, self.path)
        time.sleep(door.latency_s)
        door.carry(len(body))
        if mode == "hang":
            door.released.wait(LIMIT_S)
            self.close_connection = True
        elif mode in REFUSALS:
            name, text = REFUSALS[mode]
            self.reply(int(mode), {}, f"<Error><Code>{name}</Code><Message>{text}</Message></Error>".encode())
        else:
            self.hand_on(door.inner, body)

    def hand_on(self, port, body):
        inner = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        try:
            inner.request(self.command, self.path, body, dict(self.headers))
            answer = inner.getresponse()
            self.server.door.carry(int(answer.headers.get("Content-Length") or 0) if self.command == "GET" else 0)
            self.reply(answer.status, dict(answer.getheaders()), answer.read(), answer.headers.get("Content-Length"))
        except OSError:
            self.close_connection = True
        finally:
            inner.close()

    def reply(self, status, headers, content, told=None):
        self.send_response_only(status)
        for key, value in headers.items():
            if key.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(key, value)
        self.send_header("Content-Length", told if self.command == "HEAD" and told else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one  # noqa: N815 - the names that the server looks for

    def log_message(self, *words):
        pass


class Door:
    """Hands requests on, or does not: `mode` is read at each. `part`: of those that read a key with it in its name."""

    def __init__(self, server):
        self.mode, self.inner, self.released = "open", server.port, threading.Event()
        self.part, self.asked = "", []
        self.latency_s, self.rate, self.busy_every, self.fails_from = 0.0, 0, 0, 0
        self._free_s, self._lock = 0.0, threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.door = self
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def takes(self, method, path):
        """How it takes a request. From the n-th on (`fails_from`) all are refused; every n-th is too much for it."""
        self.asked.append((method, path))
        if self.fails_from and len(self.asked) >= self.fails_from:
            return "403"
        if self.busy_every and len(self.asked) % self.busy_every == 0:
            return "503"
        return self.mode if not self.part or (method == "GET" and self.part in path) else "open"

    def carry(self, size):
        """Take as long as `latency_s` and so many bytes at `rate` a second take, of all requests together."""
        with self._lock:
            now = time.monotonic()
            self._free_s = max(self._free_s, now) + (size / self.rate if self.rate else 0.0)
            left = self._free_s - now
        time.sleep(left)

    def close(self):
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def environment(port, deadline_s=30):
    """What a process needs to speak with it."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        "EVERSTEP_STORAGE_DEADLINE": str(deadline_s), "PATH": os.environ["PATH"],
    }  # fmt: skip
