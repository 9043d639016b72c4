"""A Hub on 127.0.0.1 that the real clients of Hugging Face talk to.

It speaks as much of the Hub's HTTP interface as ``huggingface_hub``, ``transformers``,
``datasets`` and ``timm`` use to create repositories, push, look up and download, and it remembers
every byte that it was sent. The clients read ``HF_ENDPOINT`` when they are imported, so run them in
a process of their own, with ``hub.environment(...)``::

    with LoopbackHub() as hub:
        hub.add_dataset("clinic/scans", {"data/train-0.parquet": parquet_of(rows)})
        hub.python("import datasets; datasets.load_dataset('clinic/scans')", home=tmp_path)
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import yaml

USER = "dr-weber"
TOKEN = "hf_loopback"
READ_TOKEN = "hf_loopback_read"  # may read what USER may read, and write nothing
LFS_SUFFIXES = (".safetensors", ".parquet", ".png", ".jpg", ".bin", ".pt", ".zip", ".tar")
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
LICENSES = {"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-nc-4.0", "cc0-1.0", "other"}
LICENSES |= {"cc-by-sa-4.0", "cc-by-nc-sa-4.0", "gpl-3.0", "openrail", "unknown"}


@dataclass
class Repository:
    """One repository: each commit is the whole tree."""

    id: str
    kind: str
    private: bool
    gated: bool = False
    created_private: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def owner(self) -> str:
        return self.id.split("/")[0]

    @property
    def files(self) -> dict[str, bytes]:
        return self.trees[self.refs["main"]]

    def commit(self, changes: Mapping[str, bytes | None], branch: str, message: str) -> str:
        tree = dict(self.trees.get(self.refs.get(branch, ""), {}))
        for path, content in changes.items():
            if content is None:
                tree.pop(path, None)
            else:
                tree[path] = content
        seen = f"{self.id} {len(self.messages)} {sorted(tree)}".encode()
        sha = hashlib.sha1(seen + b"".join(tree[path] for path in sorted(tree))).hexdigest()
        self.trees[sha], self.refs[branch] = tree, sha
        self.messages.append(message)
        return sha

    def sha(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.trees else None)


@dataclass(frozen=True)
class Request:
    """What a client sent, without its token."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Failure:
    method: str
    path: str
    status: int | None
    skip: int
    times: int
    after: bool


class RefusedError(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class LoopbackHub:
    """The server; enter it to start it.

    Attributes:
        endpoint: For ``HF_ENDPOINT``.
        repositories: By name; those of data sets are called ``datasets/<id>``.
        requests: All that was asked, in order.
        uploaded: By repository, the content of each path that was committed through HTTP.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.uploaded: dict[str, dict[str, bytes]] = {}
        self._lfs: dict[str, bytes] = {}
        self._decoded: list[bytes] = []
        self._failures: list[Failure] = []
        self._lock = threading.RLock()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    # ---- what tests prepare and look at ----

    def add_model(self, repo_id: str, files: Mapping[str, bytes] = {}, **settings: bool) -> str:
        """Put a model there, as someone did before; return its commit."""
        return self._add("model", repo_id, files, **settings)

    def add_dataset(self, repo_id: str, files: Mapping[str, bytes], **settings: bool) -> str:
        """Put a data set there (``gated=True``, ``private=True``); return its commit.

        A second call for the same name is a further commit on ``main``.
        """
        return self._add("dataset", repo_id, files, **settings)

    def _add(
        self,
        kind: str,
        repo_id: str,
        files: Mapping[str, bytes],
        *,
        private: bool = False,
        gated: bool = False,
    ) -> str:
        with self._lock:
            repository = self.repositories.setdefault(
                _key(kind, repo_id), Repository(repo_id, kind, private, gated, private)
            )
            return repository.commit(files, "main", "initial commit")

    def fail_next(
        self,
        method: str,
        path: str,
        *,
        status: int | None = 500,
        skip: int = 0,
        times: int = 1,
        after: bool = False,
    ) -> None:
        """Answer the next requests whose path contains ``path`` with an error.

        Args:
            method: HTTP method.
            path: Part of the path.
            status: Of the answer; None closes the connection without one.
            skip: How many requests pass before.
            times: How many fail.
            after: Whether the request is carried out and only its answer is lost.
        """
        with self._lock:
            self._failures.append(Failure(method, path, status, skip, times, after))

    @property
    def received_bytes(self) -> bytes:
        """All that any client sent: lines, headers, bodies, and files that came as base64."""
        with self._lock:
            lines = [
                f"{r.method} {unquote(r.path)} {r.headers}".encode() + b"\n" + r.body
                for r in self.requests
            ]
            return b"\n".join([*lines, *self._decoded, *self._lfs.values()])

    def asked(self, method: str, path: str) -> int:
        """How many requests there were of this method whose path contains ``path``."""
        return sum(r.method == method and path in r.path for r in self.requests)

    def environment(self, home: Path, *, token: str | None = TOKEN) -> dict[str, str]:
        """Variables of a process that has this Hub, an empty cache and this token."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        return {
            **kept,
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            **({} if token is None else {"HF_TOKEN": token}),
        }

    def python(
        self, code: str, *arguments: str, home: Path, token: str | None = TOKEN
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code in a process of its own that talks to this Hub; fail if it fails."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, *arguments],
            env=self.environment(home, token=token),
            cwd=Path(__file__).parent,  # so that it can import support and the like
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done


def _key(kind: str, repo_id: str) -> str:
    return repo_id if kind == "model" else f"{kind}s/{repo_id}"


def parquet_of(rows: Iterable[Mapping[str, Any]], features: Any = None) -> bytes:
    """A Parquet file as ``datasets`` writes it; images are given as ``png_of`` makes them."""
    from datasets import Dataset

    buffer = io.BytesIO()
    Dataset.from_list([dict(row) for row in rows], features=features).to_parquet(buffer)
    return buffer.getvalue()


def png_of(pixels: np.ndarray) -> bytes:
    """A PNG of (height, width) or (height, width, 3) bytes."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


# ---- metadata of cards, as the Hub checks it ----


def card_errors(content: str) -> list[str]:
    """What the Hub would refuse in the metadata block of a README.md."""
    block = re.match(r"---\s*\n(.*?)\n---\s*\n", content, re.DOTALL)
    if block is None:
        return []
    try:
        data = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    if not isinstance(data, dict):
        return ["metadata must be a mapping"]
    errors = []
    for name in ("tags", "datasets", "language", "metrics"):
        values = data.get(name, [])
        values = [values] if isinstance(values, str) else values
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            errors.append(f'"{name}" must be an array of strings')
    for name in ("base_model", "datasets"):
        values = data.get(name, [])
        for value in [values] if isinstance(values, str) else values or []:
            if not (isinstance(value, str) and REPO_ID.fullmatch(value)):
                errors.append(f'"{name}" with value {value!r} is not valid')
    if "license" in data and data["license"] not in LICENSES:
        errors.append(f'"license" must be one of {sorted(LICENSES)}')
    if data.get("license") == "other" and not data.get("license_name"):
        errors.append('"license_name" is required with license other')
    for name in ("pipeline_tag", "library_name"):
        if not isinstance(data.get(name, ""), str):
            errors.append(f'"{name}" must be a string')
    return errors + _model_index_errors(data.get("model-index", []))


def _model_index_errors(index: Any) -> list[str]:
    if not isinstance(index, list):
        return ['"model-index" must be an array']
    errors = []
    for i, model in enumerate(index):
        at = f'"model-index[{i}]'
        if not isinstance(model.get("name"), str):
            errors.append(f'{at}.name" is required')
        for j, result in enumerate(model.get("results", [])):
            here = f"{at}.results[{j}]"
            if not isinstance(result.get("task", {}).get("type"), str):
                errors.append(f'{here}.task.type" is required')
            if "dataset" in result:
                for name in ("type", "name"):
                    if not isinstance(result["dataset"].get(name), str):
                        errors.append(f'{here}.dataset.{name}" is required')
            if not result.get("metrics"):
                errors.append(f'{here}.metrics" is required')
            for k, metric in enumerate(result.get("metrics", [])):
                if not isinstance(metric.get("type"), str) or metric.get("value") is None:
                    errors.append(f'{here}.metrics[{k}]" needs type and value')
    return errors


def _card_data(content: bytes | None) -> dict[str, Any]:
    block = re.match(r"---\s*\n(.*?)\n---\s*\n", (content or b"").decode(), re.DOTALL)
    return {} if block is None else yaml.safe_load(block[1]) or {}


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _is_lfs(path: str) -> bool:
    return path.endswith(LFS_SUFFIXES)


def _file_info(path: str, content: bytes) -> dict[str, Any]:
    info: dict[str, Any] = {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": _git_oid(content),
    }
    if _is_lfs(path):
        sha = hashlib.sha256(content).hexdigest()
        info["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 134}
    return info


# ---- HTTP ----


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LoopbackHub
    mute = False

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client may hang up
            super().handle()

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - names of http.server

    def _serve(self) -> None:
        body = self._read()
        hub = self.hub
        with hub._lock:
            headers = {k: v for k, v in self.headers.items() if k.lower() != "authorization"}
            hub.requests.append(Request(self.command, self.path, headers, body))
            for failure in hub._failures:
                if failure.method == self.command and failure.path in self.path:
                    if failure.skip > 0:
                        failure.skip -= 1
                    elif failure.times > 0:
                        failure.times -= 1
                        self.mute = failure.after or failure.status is None
                        if failure.after:
                            break
                        if failure.status is None:
                            self.close_connection = True
                            return
                        self._answer(failure.status, {"error": "injected"})
                        return
            try:
                self._route(body)
            except RefusedError as refusal:
                extra = {"X-Error-Message": str(refusal)}
                if refusal.code:
                    extra["X-Error-Code"] = refusal.code
                self._answer(refusal.status, {"error": str(refusal)}, extra)

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(
        self, status: int, content: Any, headers: Mapping[str, str] = {}, *, length: int = -1
    ) -> None:
        if self.mute:
            self.close_connection = True
            return
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw) if length < 0 else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    # ---- who may do what ----

    @property
    def _token(self) -> str | None:
        header = self.headers.get("Authorization", "")
        token = header.removeprefix("Bearer ") or None
        if token not in (None, TOKEN, READ_TOKEN):
            raise RefusedError(401, "Invalid credentials in Authorization header")
        return token

    def _repository(self, kind: str, repo_id: str, *, content: bool = False) -> Repository:
        repository = self.hub.repositories.get(_key(kind, repo_id))
        is_known = self._token is not None
        if repository is None or (repository.private and not is_known):
            raise RefusedError(404 if is_known else 401, "Repository not found", "RepoNotFound")
        if repository.gated and content and not is_known:
            raise RefusedError(401, f"Access to {kind} {repo_id} is restricted.", "GatedRepo")
        return repository

    def _may_write(self, owner: str) -> None:
        if self._token is None:
            raise RefusedError(401, "Invalid username or password.")
        if self._token == READ_TOKEN or owner != USER:
            raise RefusedError(403, "You don't have the rights to write there")

    def _sha(self, repository: Repository, revision: str) -> str:
        sha = repository.sha(revision)
        if sha is None:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    # ---- routes ----

    def _route(self, body: bytes) -> None:
        parts = urlsplit(self.path)
        path, query = parts.path, parse_qs(parts.query)
        if path == "/api/whoami-v2":
            if self._token is None:
                raise RefusedError(401, "Invalid username or password.")
            role = "read" if self._token == READ_TOKEN else "write"
            auth = {"type": "access_token", "accessToken": {"displayName": "t", "role": role}}
            self._answer(200, {"type": "user", "name": USER, "orgs": [], "auth": auth})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            errors = card_errors(json.loads(body)["content"])
            report = {"errors": [{"message": e} for e in errors], "warnings": []}
            self._answer(400 if errors else 200, report)
        elif found := re.fullmatch(r"/lfs/(\w{64})", path):
            if hashlib.sha256(body).hexdigest() != found[1]:
                raise RefusedError(400, "content does not match its hash")
            self.hub._lfs[found[1]] = body
            self._answer(200, {})
        elif path == "/lfs/verify":
            self._answer(200 if json.loads(body)["oid"] in self.hub._lfs else 404, {})
        elif found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            self._lfs_batch(found[1], json.loads(body))
        elif found := re.fullmatch(
            r"/(datasets/)?([\w.-]+(?:/[\w.-]+)?)/resolve/([^/]+)/(.+)", path
        ):
            kind = "dataset" if found[1] else "model"
            self._resolve(kind, found[2], unquote(found[3]), unquote(found[4]))
        elif found := re.fullmatch(
            r"/api/(model|dataset)s/([\w.-]+/[\w.-]+)/(preupload|commit|branch|tree|paths-info)"
            r"/([^/]+)/?(.*)",
            path,
        ):
            action = {
                "preupload": self._preupload,
                "commit": self._commit,
                "branch": self._branch,
                "tree": self._tree,
                "paths-info": self._paths_info,
            }[found[3]]
            repository = self._repository(found[1], found[2])
            action(repository, unquote(found[4]), body, query, unquote(found[5]))
        elif found := re.fullmatch(
            r"/api/(model|dataset)s/([\w.-]+/[\w.-]+)/(settings|refs|auth-check)", path
        ):
            self._about(self._repository(found[1], found[2]), found[3], body)
        elif found := re.fullmatch(
            r"/api/(model|dataset)s/([\w.-]+(?:/[\w.-]+)?)(?:/revision/([^/]+))?", path
        ):
            self._info(self._repository(found[1], found[2]), unquote(found[3] or "main"))
        else:
            raise RefusedError(404, "Sorry, we can't find the page you are looking for.")

    def _create(self, asked: dict[str, Any]) -> None:
        owner = asked.get("organization") or USER
        self._may_write(owner)
        kind, repo_id = asked.get("type") or "model", f"{owner}/{asked['name']}"
        answer = {"url": f"{self.hub.endpoint}/{_key(kind, repo_id)}", "name": repo_id}
        if _key(kind, repo_id) in self.hub.repositories:
            self._answer(409, {**answer, "error": "You already created this model repo"})
            return
        private = asked.get("visibility") == "private" or asked.get("private") is True
        repository = Repository(repo_id, kind, private, created_private=private)
        repository.commit({".gitattributes": b"*.safetensors lfs\n"}, "main", "initial commit")
        self.hub.repositories[_key(kind, repo_id)] = repository
        self._answer(200, answer)

    def _about(self, repository: Repository, what: str, body: bytes) -> None:
        if what == "settings":
            self._may_write(repository.owner)
            changes = json.loads(body)
            if "visibility" in changes or "private" in changes:
                is_private = changes.get("visibility") == "private" or changes.get("private")
                repository.private = is_private is True
            self._answer(200, {"private": repository.private})
        elif what == "auth-check":
            self._repository(repository.kind, repository.id, content=True)
            self._answer(200, {})
        else:
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
                for name, sha in repository.refs.items()
            ]
            self._answer(200, {"branches": branches, "tags": [], "converts": []})

    def _info(self, repository: Repository, revision: str) -> None:
        sha = self._sha(repository, revision)
        tree = repository.trees[sha]
        card = _card_data(tree.get("README.md"))
        self._answer(
            200,
            {
                "_id": repository.id,
                "id": repository.id,
                "author": repository.owner,
                "sha": sha,
                "private": repository.private,
                "gated": "auto" if repository.gated else False,
                "disabled": False,
                "lastModified": "2026-01-01T00:00:00.000Z",
                "createdAt": "2026-01-01T00:00:00.000Z",
                "tags": card.get("tags", []),
                "pipeline_tag": card.get("pipeline_tag"),
                "library_name": card.get("library_name"),
                "cardData": card,
                "siblings": [{"rfilename": p, "size": len(tree[p])} for p in sorted(tree)],
            },
        )

    def _preupload(self, repository: Repository, revision: str, body: bytes, *_: Any) -> None:
        self._may_write(repository.owner)
        tree = repository.trees[self._sha(repository, revision)]
        answers = []
        for file in json.loads(body)["files"]:
            path, old = file["path"], tree.get(file["path"])
            self.hub._decoded.append(base64.b64decode(file["sample"]))
            oid = None
            if old is not None:
                oid = hashlib.sha256(old).hexdigest() if _is_lfs(path) else _git_oid(old)
            mode = "lfs" if _is_lfs(path) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer(200, {"files": answers})

    def _lfs_batch(self, name: str, asked: dict[str, Any]) -> None:
        kind, repo_id = ("dataset", name[9:]) if name.startswith("datasets/") else ("model", name)
        self._may_write(self._repository(kind, repo_id).owner)
        objects = []
        for item in asked["objects"]:
            if item["oid"] not in self.hub._lfs:
                here = self.hub.endpoint
                item = {
                    **item,
                    "actions": {
                        "upload": {"href": f"{here}/lfs/{item['oid']}"},
                        "verify": {"href": f"{here}/lfs/verify"},
                    },
                }
            objects.append(item)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repository: Repository, revision: str, body: bytes, *_: Any) -> None:
        self._may_write(repository.owner)
        self._sha(repository, revision)
        message, changes = "", {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                changes[value["path"]] = self.hub._lfs[value["oid"]]
            elif entry["key"] == "deletedFile":
                changes[value["path"]] = None
            else:
                raise RefusedError(400, f"unknown operation {entry['key']}")
        if errors := card_errors((changes.get("README.md") or b"").decode()):
            raise RefusedError(400, "; ".join(errors))
        sha = repository.commit(changes, revision, message)
        kept = self.hub.uploaded.setdefault(_key(repository.kind, repository.id), {})
        for path, content in changes.items():
            if content is not None:
                kept[path] = content
                self.hub._decoded.append(content)
        url = f"{self.hub.endpoint}/{_key(repository.kind, repository.id)}/commit/{sha}"
        self._answer(200, {"success": True, "commitOid": sha, "commitUrl": url})

    def _branch(self, repository: Repository, branch: str, body: bytes, *_: Any) -> None:
        self._may_write(repository.owner)
        if branch in repository.refs:
            raise RefusedError(409, "Reference already exists")
        start = json.loads(body or b"{}").get("startingPoint", "main")
        repository.refs[branch] = self._sha(repository, start)
        self._answer(200, {})

    def _tree(
        self,
        repository: Repository,
        revision: str,
        _body: bytes,
        query: dict[str, list[str]],
        folder: str,
    ) -> None:
        sha = self._sha(repository, revision)
        tree = repository.trees[sha]
        prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        inside = sorted(path for path in tree if path.startswith(prefix))
        if prefix and not inside:
            raise RefusedError(404, f"{folder} does not exist on {revision!r}", "EntryNotFound")
        is_recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries, folders = [], set()
        for path in inside:
            below = path.removeprefix(prefix).split("/")
            depth = len(below) if is_recursive else min(2, len(below))
            folders |= {prefix + "/".join(below[:i]) for i in range(1, depth)}
            if is_recursive or len(below) == 1:
                entries.append(_file_info(path, tree[path]))
        entries += [{"type": "directory", "path": f, "oid": sha} for f in sorted(folders)]
        self._answer(200, [self._expanded(entry, sha, query) for entry in entries])

    def _paths_info(
        self,
        repository: Repository,
        revision: str,
        body: bytes,
        query: dict[str, list[str]],
        _rest: str,
    ) -> None:
        sha = self._sha(repository, revision)
        tree = repository.trees[sha]
        is_json = "json" in self.headers.get("Content-Type", "")
        asked = json.loads(body) if is_json else parse_qs(body.decode())
        entries = []
        for path in asked.get("paths", []):
            if path in tree:
                entries.append(_file_info(path, tree[path]))
            elif any(p.startswith(f"{path.strip('/')}/") for p in tree):
                entries.append({"type": "directory", "path": path, "oid": sha})
        expand = {"expand": [str(v) for v in np.atleast_1d(asked.get("expand", "false"))]}
        self._answer(200, [self._expanded(entry, sha, {**query, **expand}) for entry in entries])

    def _expanded(
        self, entry: dict[str, Any], sha: str, query: dict[str, list[str]]
    ) -> dict[str, Any]:
        if query.get("expand", ["false"])[0].lower() not in ("true", "1"):
            return entry
        last = {"id": sha, "title": "commit", "date": "2026-01-01T00:00:00.000Z"}
        return {**entry, "lastCommit": last}

    def _resolve(self, kind: str, repo_id: str, revision: str, path: str) -> None:
        repository = self._repository(kind, repo_id, content=True)
        sha = self._sha(repository, revision)
        content = repository.trees[sha].get(path)
        headers = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if content is None:
            missing = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            self._answer(404, b"Entry not found", {**headers, **missing})
            return
        if _is_lfs(path):
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            headers["X-Linked-Size"] = str(len(content))
            headers["ETag"] = headers["X-Linked-Etag"]
        else:
            headers["ETag"] = f'"{_git_oid(content)}"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, content, headers)
            return
        first = int(asked[1])
        last = min(int(asked[2]) if asked[2] else len(content) - 1, len(content) - 1)
        if first >= len(content):
            raise RefusedError(416, "Range not satisfiable")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self._answer(206, content[first : last + 1], headers)
