"""HTTP/1.1 without a socket, as far as our commands, curl and Prometheus need it.

Rule 1: one request a connection; what follows it is not read.
Rule 2: the bytes may come from anybody who reaches the port: nonsense is answered with a status and a sentence, as soon
        as it can be told that it is nonsense, and never raises.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_HEAD = 8 * 1024
MOST_BODY = 64 * 1024
_END = b"\r\n\r\n"
_REASONS: Mapping[int, str] = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed", 409: "Conflict",
    411: "Length Required", 413: "Content Too Large", 431: "Request Header Fields Too Large",
    500: "Internal Server Error", 504: "Gateway Timeout",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """One whole request; header names are in lower case, the path is without its query."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""

    def json(self) -> Mapping[str, Any]:
        """Read the body as an object; ValueError for anything else. An empty body is an empty object."""
        try:
            found = json.loads(self.body or b"{}")
        except RecursionError:
            raise ValueError("nested beyond what can be read") from None
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found  # pyright: ignore[reportUnknownVariableType]  # what JSON held


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered; the connection ends with it."""

    status: int
    body: bytes
    kind: str = "application/json"

    def encode(self) -> bytes:
        """Return the bytes for the wire."""
        head = (
            f"HTTP/1.1 {self.status} {_REASONS.get(self.status, 'Unknown')}\r\nContent-Type: {self.kind}\r\n"
            f"Content-Length: {len(self.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + self.body


def answer(found: Mapping[str, Any]) -> Response:
    """Return an object as a response."""
    return Response(200, json.dumps(found, separators=(",", ":")).encode() + b"\n")


def refusal(status: int, text: str) -> Response:
    """Return an error, in words."""
    return Response(status, json.dumps({"error": text}).encode() + b"\n")


def parse(data: bytes) -> Request | Response | None:
    """Read what has come so far: a request, the refusal of what is none, or None while more must come."""
    if data and not b"A" <= data[:1] <= b"Z":
        return refusal(400, "this is the control end point of an Everstep agent; it speaks HTTP/1.1")
    head, end, rest = data.partition(_END)
    if len(head) > MOST_HEAD:
        return refusal(431, f"the head of a request has {MOST_HEAD} bytes at most")
    if not end:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):  # noqa: PLR2004 - method, path, version
        return refusal(400, f"not a request of HTTP/1.1: {first[:80]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    size = _size(headers)
    if isinstance(size, Response):
        return size
    if len(rest) < size:
        return None
    return Request(words[0], words[1].partition("?")[0], headers, rest[:size])


def _size(headers: Mapping[str, str]) -> int | Response:
    if "transfer-encoding" in headers:
        return refusal(411, "send a Content-Length; chunks are not read here")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()) or len(text) > 12:  # noqa: PLR2004 - digits of any size that counts
        return refusal(400, f"Content-Length {text[:40]!r} is not a number of bytes")
    size = int(text)
    return size if size <= MOST_BODY else refusal(413, f"the body of a request has {MOST_BODY} bytes at most")
