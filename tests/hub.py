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
        gated: Repositories that reject requests for files.
        requests: Name and first byte of each requested file.
        cut: File whose connection closes after half of the content, once.
        held: File whose connection stalls after half of the content. `stalled` is set then.
        endless: File that is sent repeatedly, up to 64 MB.
        replaced: Content to send for a file in place of the listed content.
        tree: Response in place of the list of files.
        link: URL of the next page, which each page of the list contains.
        sent: Number of sent bytes of the endless file.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.gated = set[str]()
        self.requests = list[tuple[str, int]]()
        self.cut = ""
        self.held = ""
        self.stalled = threading.Event()
        self.ended = threading.Event()
        self.endless = ""
        self.replaced = dict[str, bytes]()
        self.tree = b""
        self.link = ""
        self.sent = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def respond(self, code: int, body: bytes = b"", **headers: str) -> None:
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
        repo = ""
        if api:
            repo = api[1]
        elif file:
            repo = re.sub("^(?!datasets/)", "models/", file[1])
        files = self.server.files.get(repo)

        if files is None:
            self.respond(404, X_Error_Code="RepoNotFound")
        elif api and api[2]:
            self.send_file_list(files)
        elif api:
            about = {"id": repo.partition("/")[2], "sha": REVISION, "private": False}
            about |= {"siblings": [], "tags": []}
            self.respond(200, json.dumps(about).encode(), Content_Type="application/json")
        elif repo in self.server.gated:
            self.respond(401, X_Error_Code="GatedRepo")
        elif file:
            name = file[2]
            self.send_file(name, self.server.replaced.get(name, files[name]))

    do_HEAD = do_GET

    def send_file_list(self, files: dict[str, bytes]) -> None:
        tree = json.dumps([list_file(path, files[path]) for path in files]).encode()
        headers = {"Content-Type": "application/json"}
        if self.server.link:
            headers["Link"] = f'<{self.server.link}>; rel="next"'
        self.respond(200, self.server.tree or tree, **headers)

    def send_file(self, name: str, content: bytes) -> None:
        """Send a file from the requested first byte, or fail as the server is configured."""
        requested_range = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(requested_range[1]) if requested_range else 0
        if self.command == "GET":
            self.server.requests.append((name, start))
            if name == self.server.endless:
                return self.send_repeatedly(content)
            if name in (self.server.cut, self.server.held):
                return self.send_half(name, content)

        tag = f'"{hashlib.sha1(content).hexdigest()}"'
        part = f"bytes {start}-{len(content) - 1}/{len(content)}"
        code = 206 if start else 200
        self.respond(code, content[start:], ETag=tag, Content_Range=part)

    def send_half(self, name: str, content: bytes) -> None:
        """Send half of a file, then close the connection, or stall until the server ends."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        if name == self.server.held:
            self.server.stalled.set()
            self.server.ended.wait()
        self.server.cut = ""
        self.close_connection = True

    def send_repeatedly(self, content: bytes) -> None:
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        with suppress(ConnectionError):
            while self.server.sent < 64_000_000:
                self.server.sent += self.wfile.write(content)


def list_file(path: str, content: bytes) -> dict[str, Any]:
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
