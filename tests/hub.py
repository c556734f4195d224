"""A Hugging Face hub on this machine: the answers that huggingface_hub asks for, and no more."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

REVISION = "0123456789" * 4


class Hub(ThreadingHTTPServer):
    """Serves `files`: {"models/OWNER/NAME" or "datasets/OWNER/NAME": {path: bytes}}.

    Attributes:
        gated: repositories whose files are refused.
        asked: the files that were asked for, each with the first byte.
        cut: a file of which half is sent before the connection ends; once.
        held: a file of which half is sent, and no more. `waits` says that it has come so far.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files, self.gated, self.asked = files, set[str](), list[tuple[str, int]]()
        self.cut, self.held, self.waits, self.ended = "", "", threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": f"{len(body)}", "X-Repo-Commit": REVISION, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    def do_GET(self) -> None:
        api = re.match(r"/api/((?:models|datasets)/[^/]+/[^/?]+)(/tree/)?", self.path)
        file = re.match(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/\w+/([^?]+)", self.path)
        repo = api[1] if api else re.sub("^(?!datasets/)", "models/", file[1]) if file else ""
        if (files := self.server.files.get(repo)) is None:
            self.answer(404, X_Error_Code="RepoNotFound")
        elif api:
            rows = [{"type": "file", "path": path, "size": len(files[path]), "oid": path} for path in files]
            about = {"id": repo.partition("/")[2], "sha": REVISION, "siblings": [], "private": False, "tags": []}
            self.answer(200, json.dumps(rows if api[2] else about).encode(), Content_Type="application/json")
        elif repo in self.server.gated:
            self.answer(401, X_Error_Code="GatedRepo")
        elif file:
            self.file(file[2], files[file[2]])

    do_HEAD = do_GET

    def file(self, name: str, content: bytes) -> None:
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or "00")[1])
        tag, part = f'"{hashlib.sha1(content).hexdigest()}"', f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            self.server.asked.append((name, start))
        if self.command == "HEAD" or name not in (self.server.cut, self.server.held):
            return self.answer(206 if start else 200, content[start:], ETag=tag, Content_Range=part)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        if name == self.server.held:
            self.server.waits.set()
            self.server.ended.wait()
        self.server.cut, self.close_connection = "", True
