"""A Hugging Face Hub of a few files on a local port: enough of its protocol for huggingface_hub itself to talk to."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`repos`: id -> {file: bytes}. `downloads` records what was fetched; `gated` and `needs_token` name repos."""

    def __init__(self, repos: dict[str, dict[str, bytes]]):
        self.repos = repos
        self.gated: set[str] = set()
        self.token_of: dict[str, str] = {}
        self.downloads: list[str] = []
        self.requests = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self, with_body=True)

            def do_HEAD(self):
                hub.answer(self, with_body=False)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        self.requests += 1
        path = unquote(urlparse(request.path).path).strip("/")
        is_api = path.startswith("api/models/")
        path = path.removeprefix("api/models/")
        repo = next((repo for repo in self.repos if path == repo or path.startswith(repo + "/")), None)
        if repo is None or (
            repo in self.token_of and request.headers.get("authorization") != f"Bearer {self.token_of[repo]}"
        ):
            return send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        files = self.repos[repo]
        verb, _, rest = path.removeprefix(repo).strip("/").partition("/")
        revision, _, name = rest.partition("/")
        if revision not in ("", "main", COMMIT):
            return send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        if is_api and verb == "tree":
            listing = [{"type": "file", "path": n, "size": len(c), "oid": digest(c)} for n, c in files.items()]
            return send(request, 200, json.dumps(listing).encode())
        if is_api:
            info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}
            return send(request, 200, json.dumps(info).encode())
        if repo in self.gated:
            return send(request, 403, b"", {"X-Error-Code": "GatedRepo"})
        if name not in files:
            return send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        if with_body:
            self.downloads.append(name)
        headers = {"ETag": f'"{digest(files[name])}"', "X-Repo-Commit": COMMIT}
        return send(request, 200, files[name], headers, with_body)


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict | None = None, with_body: bool = True
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if with_body and request.command != "HEAD":
        request.wfile.write(body)
