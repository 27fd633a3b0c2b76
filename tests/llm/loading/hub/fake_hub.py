"""A Hugging Face Hub with a few files on a local port. Implements the part of the protocol that huggingface_hub
uses."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = (".safetensors", ".bin", ".gguf")


class FakeHub:
    """Serves `repos`: id -> {file: bytes}. Records requests, and can send faulty answers."""

    def __init__(self, repos: dict[str, dict[str, bytes]]):
        self.repos = repos
        self.gated: set[str] = set()
        self.token_of: dict[str, str] = {}
        """The token that each repository requires."""
        self.cuts: dict[str, list[int]] = {}
        """For each file, numbers of bytes after which the connection of an answer ends. Later answers are whole."""
        self.cut_for_good: dict[str, int] = {}
        """For each file, the number of bytes of its content that are ever sent."""
        self.resets: set[str] = set()
        """Files whose connection ends with a reset."""
        self.sent_instead: dict[str, bytes] = {}
        """Bytes sent instead of a file's content. The headers still give the content's size and digest."""
        self.ignores_ranges = False
        self.status: int | None = None
        """The HTTP status of all answers, if set."""
        self.downloads: list[str] = []
        self.sent: Counter[str] = Counter()
        """Number of bytes sent of each file."""
        self.ranges: list[str] = []
        """The requested ranges."""
        self.requests = 0
        self.asked: list[str] = []
        """Paths and headers of all requests."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self, with_body=True)

            def do_HEAD(self):
                hub.answer(self, with_body=False)

            do_POST = do_PUT = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        self.requests += 1
        self.asked.append(f"{request.path} {request.headers}")
        if self.status is not None:
            return send(request, self.status, b"")
        path = unquote(urlparse(request.path).path).strip("/")
        is_api = path.startswith("api/models/")
        path = path.removeprefix("api/models/")
        repo = next((repo for repo in self.repos if path == repo or path.startswith(repo + "/")), None)
        given = request.headers.get("authorization")
        if repo in self.token_of and given not in (None, f"Bearer {self.token_of[repo]}"):
            return send(request, 401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        if repo is None or (repo in self.token_of and given is None):
            return send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        files = self.repos[repo]
        verb, _, rest = path.removeprefix(repo).strip("/").partition("/")
        revision, _, name = rest.partition("/")
        if revision not in ("", "main", "v1", COMMIT):
            return send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        if is_api and verb == "tree":
            listing = [{"type": "file", "path": n, "size": len(c), "oid": digest(n, c)} for n, c in files.items()]
            return send(request, 200, json.dumps(listing).encode())
        if is_api:
            siblings = [{"rfilename": n, "size": len(c), "blobId": digest(n, c)} for n, c in files.items()]
            return send(request, 200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
        if repo in self.gated:
            return send(request, 403, b"", {"X-Error-Code": "GatedRepo"})
        if name not in files:
            return send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{digest(name, files[name])}"', "X-Repo-Commit": COMMIT}
        if not with_body:
            return send(request, 200, files[name], headers, with_body)
        self.downloads.append(name)
        self._send_file(request, name, self.sent_instead.get(name, files[name]), headers)

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, content: bytes, headers: dict) -> None:
        status, begin, stop = 200, 0, len(content)
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
            self.ranges.append(found[0])
            if not self.ignores_ranges:
                status, begin = 206, int(found[1])
                stop = min(stop, int(found[2]) + 1) if found[2] else stop
                if begin >= stop:
                    return send(request, 416, b"", {"Content-Range": f"bytes */{len(content)}"})
                headers |= {"Content-Range": f"bytes {begin}-{stop - 1}/{len(content)}"}
        body = content[begin:stop]
        limit = self.cuts[name].pop(0) if self.cuts.get(name) else len(body)
        limit = min(limit, max(0, self.cut_for_good.get(name, stop) - begin))
        self.sent[name] += min(limit, len(body))
        send(request, status, body[:limit], headers | {"Content-Length": str(len(body))})
        if limit < len(body):
            request.wfile.flush()
            if name in self.resets:
                request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.close_connection = True
            request.connection.close()


def digest(name: str, content: bytes) -> str:
    return (hashlib.sha256 if name.endswith(WEIGHTS) else hashlib.sha1)(content).hexdigest()


def send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict | None = None, with_body: bool = True
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if with_body and request.command != "HEAD":
        request.wfile.write(body)
