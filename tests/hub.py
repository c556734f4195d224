"""A Hugging Face hub on this machine: the answers that huggingface_hub asks for, and no more."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "0123456789" * 4


class Hub(ThreadingHTTPServer):
    """Serves `files`: {"models/OWNER/NAME" or "datasets/OWNER/NAME": {path: bytes}}.

    Attributes:
        gated: repositories whose files are refused.
        asked: the files that were asked for, each with the first byte.
        cut: a file of which half is sent before the connection ends; once.
        held: a file of which half is sent, and the rest after `free` is set. `waits` says that it has come so far.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files, self.gated, self.asked = files, set[str](), list[tuple[str, int]]()
        self.cut = self.held = ""
        self.waits, self.free = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.free.set()
        self.shutdown()
        self.server_close()


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": len(body), "X-Repo-Commit": REVISION, **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)(/revision/\w+|/tree/\w+)?", path):
            files = self.server.files.get(found[1])
            if files is None:
                return self.answer(404, X_Error_Code="RepoNotFound")
            if "/tree/" in path:
                return self.json(
                    [{"type": "file", "path": p, "size": len(c), "oid": digest(c)} for p, c in files.items()]
                )
            name, siblings = found[1].partition("/")[2], [{"rfilename": path} for path in files]
            return self.json({"id": name, "sha": REVISION, "siblings": siblings, "private": False, "tags": []})
        found = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/\w+/(.+)", path)
        assert found, path
        repo = found[1] if found[1].startswith("datasets/") else f"models/{found[1]}"
        if repo in self.server.gated:
            return self.answer(401, X_Error_Code="GatedRepo")
        self.file(found[2], self.server.files[repo][found[2]])

    do_HEAD = do_GET

    def json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def file(self, name: str, content: bytes) -> None:
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        headers = {"ETag": f'"{digest(content)}"', "Accept_Ranges": "bytes"}
        if self.command == "HEAD":
            return self.answer(200, content, **headers)
        self.server.asked.append((name, start))
        if name not in (self.server.cut, self.server.held):
            more = {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
            return self.answer(206 if start else 200, content[start:], **headers, **more)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        if name == self.server.held:
            self.server.waits.set()
            self.server.free.wait()
        self.server.cut, self.close_connection = "", True


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
