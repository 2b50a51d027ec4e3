"""A Hugging Face hub of this machine: the parts of its protocol that the client uses to ask, to download and to upload."""

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
from urllib.parse import unquote, urlsplit

TOKEN = "hf_goodtokengoodtoken"


@dataclass
class Repository:
    """
    Attributes:
        commits: their files, by 40 hexadecimal digits, the newest last.
        error: X-Error-Code of every answer without the token: RepoNotFound for a private repository, or GatedRepo.
        stated: other digests than those of the contents, by file.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    error: str = ""
    stated: dict[str, str] = field(default_factory=dict)

    def add(self, files: dict[str, bytes]) -> str:
        """Add a commit on top; return its name."""
        commit = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        last = list(self.commits.values())[-1:] or [{}]
        self.commits[commit] = {**last[0], **files}
        return commit

    def digest(self, name: str, content: bytes) -> str:
        """The ETag of a file: SHA-256 of one in LFS, else git's SHA-1."""
        if name.endswith((".safetensors", ".pth")):
            return self.stated.get(name) or hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Hub:
    """
    Attributes:
        asked: method, path and Authorization header of each request.
        made: what the client asked for when it made a repository, by name.
    """

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    uploaded: dict[str, bytes] = field(default_factory=dict)  # by SHA-256

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, token = unquote(urlsplit(self.path).path).strip("/"), self.headers.get("Authorization", "")
        self.hub.asked.append((self.command, path, token))
        status, headers, content = self._found(path.split("/"), token == f"Bearer {TOKEN}", body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _found(self, parts: list[str], is_known: bool, body: bytes) -> tuple[int, dict[str, str], bytes]:
        hub = self.hub
        if parts == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if self.command == "PUT":
            hub.uploaded[parts[-1]] = body
            return 200, {}, b""
        if self.command == "POST" and not is_known:
            return 401, {"X-Error-Message": "Invalid username or password."}, b"{}"
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            hub.made[name] = asked
            hub.repositories.setdefault(name, Repository())
            return self._json({"url": f"{hub.address}/{name}"})
        is_api = parts[:2] == ["api", "models"]
        user, name, *rest = parts[2:] if is_api else parts
        repository = hub.repositories.get(f"{user}/{name.removesuffix('.git')}")
        if repository is None:
            return 404 if is_known else 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repository.error and not is_known:
            return 401, {"X-Error-Code": repository.error, "X-Error-Message": "no access"}, b"{}"
        if is_api and rest[:1] == ["preupload"]:
            modes = [
                {"path": one["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if one["path"].endswith((".safetensors", ".jpg")) else "regular"}
                for one in json.loads(body)["files"]
            ]  # fmt: skip
            return self._json({"files": modes})
        if rest[-3:] == ["info", "lfs", "objects"] or rest[-2:] == ["objects", "batch"]:
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.address}/upload/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})
        if is_api and rest[:1] == ["commit"]:
            files: dict[str, bytes] = {}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.uploaded[value["oid"]]
            commit = repository.add(files)
            url = f"{hub.address}/{user}/{name}/commit/{commit}"
            return self._json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})
        if not repository.commits:
            return self._json({"id": f"{user}/{name}", "siblings": []})
        revision = rest[1] if len(rest) > 1 else "main"
        commit = list(repository.commits)[-1] if revision == "main" else revision
        if commit not in repository.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = repository.commits[commit]
        if is_api:
            siblings = [{"rfilename": name} for name in files]
            return self._json({"id": f"{user}/{name}", "sha": commit, "siblings": siblings})
        file = "/".join(rest[2:])
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        tag = f'"{repository.digest(file, files[file])}"'
        return 200, {"ETag": tag, "X-Repo-Commit": commit}, files[file]

    def _json(self, value: Any) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub() -> Iterator[Hub]:
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": state}))
    server.daemon_threads = True
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="hub")
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
