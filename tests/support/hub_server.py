"""A server with the part of the Hugging Face Hub's API that uploads use: repositories, preupload, LFS, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_write"
OWNER = "me"
"""The only namespace that the token may write."""


@dataclass
class Repository:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class FakeHub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """LFS objects by sha256."""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self) -> None:
        name, tree, _ = self.path.removeprefix("/api/models/").partition("?")[0].partition("/tree/")
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.answer(404, {"error": "Repository not found"})
        elif tree:
            files = repository.files.items()
            entries = [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in files]
            self.answer(200, entries)
        else:
            self.answer(200, {"id": name, "private": repository.private, "sha": "0" * 40, "siblings": []})

    def do_PUT(self) -> None:
        content = self.content()
        assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
        self.hub.stored[self.path.rpartition("/")[2]] = content
        self.answer(200, {})

    def do_POST(self) -> None:
        content = self.content()
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid credentials"})
        if path == "/api/repos/create":
            return self.create(json.loads(content))
        if path.endswith("/info/lfs/objects/batch"):
            return self.batch(json.loads(content))
        name = "/".join(path.split("/")[3:5])
        if not name.startswith(f"{OWNER}/"):
            return self.answer(403, {"error": f"You don't have the rights to write to {name}"})
        if "/preupload/" in path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(content)["files"]
            ]
            return self.answer(200, {"files": files})
        return self.commit(name, content)

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != OWNER:
            return self.answer(403, {"error": f"You don't have the rights to create a model under {name}"})
        if name in self.hub.repositories:
            return self.answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
        self.hub.repositories[name] = Repository(private=asked.get("visibility") == "private")
        return self.answer(200, {"url": f"{self.hub.url}/{name}"})

    def batch(self, asked: dict[str, Any]) -> None:
        objects = [
            one | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}} for one in asked["objects"]
        ]
        self.answer(200, {"objects": objects, "transfer": "basic"})

    def commit(self, name: str, content: bytes) -> None:
        files = self.hub.repositories[name].files
        for line in map(json.loads, content.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.hub.stored[line["value"]["oid"]]
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        self.answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/1", "commitOid": "1" * 40})

    def content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""
