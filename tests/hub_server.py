"""A hub on 127.0.0.1: what huggingface_hub asks of one to list, read and download models, and a log of what it sent.

As on the real hub, large files are redirects to a storage with an address of its own, and small files come at once.
"""

import json
import re
import threading
from collections.abc import Mapping
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

CHUNK_NBYTES = 64 * 1024
_LARGE = ".safetensors"


class Sent(NamedTuple):
    """A request and what was to be sent for it; ``nbytes`` counts the body, ``range`` is empty without one."""

    server: str
    method: str
    path: str
    range: str
    token: str
    status: int
    nbytes: int


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""


class Model(NamedTuple):
    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]


class HubServer:
    """The hub and its storage, each a server of its own.

    Attributes:
        models: By hub id.
        gated: Hub ids whose files are refused.
        private: Hub ids that need a token.
        log: Every request, in order.
        delivered: Bytes of bodies that were handed to the network.
        failure: The reply to every request from now on, if any.
        serves_ranges: Whether a range is honoured; if not, the whole file comes.
        tells_hashes: Whether model info tells sizes and hashes.
        stalled: While cleared, no request is answered.
    """

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.hub = _start(self, "hub")
        self.storage = _start(self, "storage")
        self.reset()

    def reset(self) -> None:
        """Forget the log and every misbehaviour, but not the models."""
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.log: list[Sent] = []
        self.delivered = 0
        self.failure: Reply | None = None
        self.serves_ranges = True
        self.tells_hashes = True
        self.stalled = threading.Event()
        self.stalled.set()

    @property
    def url(self) -> str:
        return _url(self.hub)

    def add(self, repo: str, folder: Path, ref: str = "main") -> str:
        """Publish the files of a folder under a ref, and return their commit."""
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
        commit = sha1(
            repr(sorted((name, sha256(body).hexdigest()) for name, body in files.items())).encode()
        ).hexdigest()
        model = self.models.setdefault(repo, Model({}, {}))
        model.commits[commit] = files
        model.refs[ref] = commit
        return commit

    def weight_requests(self) -> list[Sent]:
        """Return the requests that sent bytes of large files."""
        return [sent for sent in self.log if sent.server == "storage" and sent.method == "GET"]

    def close(self) -> None:
        for server in (self.hub, self.storage):
            server.shutdown()
            server.server_close()

    def answer(self, server: str, path: str, requested: str, token: str) -> Reply:
        self.stalled.wait(timeout=5)
        if self.failure:
            return self.failure
        if server == "storage":
            return self._send(self._stored(path.removeprefix("/")), requested, {"ETag": '"of-the-storage"'})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            return self._describe(found[1], found[2] == "tree", unquote(found[3] or "main"), token)
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(found[1], unquote(found[2]), unquote(found[3]), requested, token)
        return Reply(404)

    def _describe(self, repo: str, lists_tree: bool, revision: str, token: str) -> Reply:
        refusal = self._refusal(repo, revision, token)
        if refusal:
            return refusal
        commit = self._commit(repo, revision)
        files = self.models[repo].commits[commit]
        if lists_tree:
            return _json([{"type": "file", "path": path, **_describe_blob(path, body)} for path, body in files.items()])
        siblings = [{"rfilename": path, **self._hashes(path, body)} for path, body in files.items()]
        return _json({"id": repo, "sha": commit, "siblings": siblings})

    def _hashes(self, path: str, body: bytes) -> dict[str, object]:
        if not self.tells_hashes:
            return {}
        blob = _describe_blob(path, body)
        lfs = {"lfs": {"size": len(body), "sha256": _hash(path, body), "pointerSize": 134}} if "lfs" in blob else {}
        return {"size": len(body), "blobId": blob["oid"], **lfs}

    def _resolve(self, repo: str, revision: str, path: str, requested: str, token: str) -> Reply:
        refusal = self._refusal(repo, revision, token)
        if refusal:
            return refusal
        if repo in self.gated:
            return Reply(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted.\nAsk."})
        commit = self._commit(repo, revision)
        body = self.models[repo].commits[commit].get(path)
        headers = {"X-Repo-Commit": commit}
        if body is None:
            return Reply(404, {**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        hash_ = _hash(path, body)
        if not path.endswith(_LARGE):
            return self._send(body, requested, {**headers, "ETag": f'"{hash_}"'})
        linked = {"X-Linked-Size": str(len(body)), "X-Linked-Etag": f'"{hash_}"'}
        return Reply(302, {**headers, **linked, "Location": f"{_url(self.storage)}/{hash_}"})

    def _refusal(self, repo: str, revision: str, token: str) -> Reply | None:
        if token == "Bearer hf_expired":
            return Reply(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if repo not in self.models or (repo in self.private and not token):
            return Reply(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        if not self._commit(repo, revision):
            return Reply(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        return None

    def _commit(self, repo: str, revision: str) -> str:
        model = self.models[repo]
        return model.refs.get(revision, revision if revision in model.commits else "")

    def _stored(self, hash_: str) -> bytes:
        commits = (files for model in self.models.values() for files in model.commits.values())
        return next(body for files in commits for path, body in files.items() if _hash(path, body) == hash_)

    def _send(self, body: bytes, requested: str, headers: Mapping[str, str]) -> Reply:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", requested)
        if not asked or not self.serves_ranges:
            return Reply(200, headers, body)
        begin, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
        if begin > last:
            return Reply(416, {**headers, "Content-Range": f"bytes */{len(body)}"})
        return Reply(206, {**headers, "Content-Range": f"bytes {begin}-{last}/{len(body)}"}, body[begin : last + 1])


def _hash(path: str, body: bytes) -> str:
    if path.endswith(_LARGE):
        return sha256(body).hexdigest()
    return sha1(b"blob %d\0" % len(body) + body).hexdigest()


def _describe_blob(path: str, body: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"oid": sha1(body).hexdigest(), "size": len(body)}
    if path.endswith(_LARGE):
        return {**entry, "lfs": {"oid": _hash(path, body), "size": len(body), "pointerSize": 134}}
    return {**entry, "oid": _hash(path, body)}


def _json(value: object) -> Reply:
    return Reply(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def _start(owner: HubServer, name: str) -> ThreadingHTTPServer:
    class Handler(_Handler):
        hub = owner
        server_name = name

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    server_name: str

    def do_GET(self) -> None:
        log = self.hub.log  # a request that outlives its test belongs to that test's log
        requested, token = self.headers.get("Range", ""), self.headers.get("Authorization", "")
        path = urlsplit(self.path).path
        reply = self.hub.answer(self.server_name, path, requested, token)
        body = b"" if self.command == "HEAD" else reply.body
        if path != "/api/agent-harnesses":  # which huggingface_hub asks for itself, once a process
            log.append(Sent(self.server_name, self.command, path, requested, token, reply.status, len(body)))
        try:
            self.send_response(reply.status)
            for key, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(key, value.replace("\n", " "))
            self.end_headers()
            for begin in range(0, len(body), CHUNK_NBYTES):
                self.hub.delivered += len(body[begin : begin + CHUNK_NBYTES])
                self.wfile.write(body[begin : begin + CHUNK_NBYTES])
        except ConnectionError:
            pass  # the client has read enough

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass
