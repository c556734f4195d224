"""A local Hugging Face hub with the endpoints that huggingface_hub uses."""

import hashlib
import json
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

REVISION = "0123456789" * 4


class Hub(ThreadingHTTPServer):
    """Serves `files`: {"models/OWNER/NAME" or "datasets/OWNER/NAME": {path: bytes}}.

    Attributes:
        gated: repositories whose files are refused.
        asked: the files that were asked for, each with the first byte.
        cut: a file of which half is sent before the connection ends; once.
        held: a file of which half is sent, and no more. `waits` says that it has come so far.
        endless: a file that is sent again and again, up to 64 MB.
        instead: the content that is sent for a file, in place of the one that is listed.
        tree: what is answered in place of the list of files.
        link: the page that each page of the list names as the next one.
        sent: bytes of content that were sent.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files, self.gated, self.asked = files, set[str](), list[tuple[str, int]]()
        self.cut, self.held, self.waits, self.ended = "", "", threading.Event(), threading.Event()
        self.endless, self.instead, self.tree, self.link, self.sent = (
            "",
            dict[str, bytes](),
            b"",
            "",
            0,
        )
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
        for name, value in {
            "Content-Length": f"{len(body)}",
            "X-Repo-Commit": REVISION,
            **headers,
        }.items():
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
            about = {
                "id": repo.partition("/")[2],
                "sha": REVISION,
                "siblings": [],
                "private": False,
                "tags": [],
            }
            tree = (
                self.server.tree
                or json.dumps([listed(path, files[path]) for path in files]).encode()
            )
            links = {"Link": f'<{self.server.link}>; rel="next"'} if self.server.link else {}
            self.answer(
                200,
                tree if api[2] else json.dumps(about).encode(),
                Content_Type="application/json",
                **links,
            )
        elif repo in self.server.gated:
            self.answer(401, X_Error_Code="GatedRepo")
        elif file:
            self.file(file[2], self.server.instead.get(file[2], files[file[2]]))

    do_HEAD = do_GET

    def file(self, name: str, content: bytes) -> None:
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or "00")[1])
        tag, part = (
            f'"{hashlib.sha1(content).hexdigest()}"',
            f"bytes {start}-{len(content) - 1}/{len(content)}",
        )
        if self.command == "GET":
            self.server.asked.append((name, start))
        if self.command == "GET" and name == self.server.endless:
            return self.send_again_and_again(content)
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

    def send_again_and_again(self, content: bytes) -> None:
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        with suppress(ConnectionError):
            while self.server.sent < 64_000_000:
                self.server.sent += self.wfile.write(content)


def listed(path: str, content: bytes) -> dict[str, Any]:
    """Return the listing of a file: with a Git hash, or with SHA-256 if it is large."""
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
    if len(content) > 1000:
        pointer = {
            "oid": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 130,
        }
        return entry | {"oid": "0" * 40, "lfs": pointer}
    return entry | {"oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
