"""A small Hugging Face Hub on this machine, for its real client: repositories, commits, large files, tokens.

It is strict: a request that the real hub does not know, an upload whose hash or size differs, a commit of a large file
that was not uploaded, or metadata that the hub refuses, is an error and is kept in `HubServer.refused`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LICENCES = {"mit", "apache-2.0", "cc-by-4.0", "bsd-3-clause", "openrail", "other"}
PIPELINES = {"reinforcement-learning", "text-generation"}


class Refused(Exception):
    def __init__(self, status, message, code=None, content=None):
        super().__init__(message)
        self.status, self.code, self.content = status, code, content


class Repository:
    def __init__(self, private):
        self.private = private
        self.commits = {}  # files of each commit, newest last
        self.commit({})

    def commit(self, files):
        text = repr(sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items()))
        name = hashlib.sha1(f"{len(self.commits)}{text}".encode()).hexdigest()
        self.commits[name] = files
        return name

    @property
    def newest(self):
        return list(self.commits)[-1]


class HubServer:
    """The hub; use it as a context manager.

    Parameters
    ----------
    tokens : dict
        The account of each token that may write. ``user`` may also write to the organisations in `organisations`.
    """

    def __init__(self, tokens, organisations=()):
        self.tokens, self.organisations = tokens, set(organisations)
        self.repositories, self.objects = {}, {}
        self.requests, self.refused = [], []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def files(self, name):
        """The files of a repository's newest commit."""
        repository = self.repositories[name]
        return repository.commits[repository.newest]

    def answer(self, method, target, headers, body):
        """Return status, headers and content of an answer."""
        parts = urlsplit(target)
        path, query = unquote(parts.path), parse_qs(parts.query)
        account = self._account(headers.get("Authorization"))
        with self._lock:
            self.requests.append(f"{method} {path}")
            for pattern, methods, handler in ROUTES:
                if (match := re.fullmatch(pattern, path)) and method in methods:
                    return handler(self, account, body, query, headers, method, *match.groups())
        raise Refused(400, f"{method} {path} is no request of the hub")

    def _account(self, header):
        if header is None:
            return None
        scheme, _, token = header.partition(" ")
        if scheme != "Bearer" or token not in self.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.tokens[token]

    def _repository(self, account, name):
        repository = self.repositories.get(name)
        if repository is None or (repository.private and account != name.split("/")[0]):
            raise Refused(404 if account else 401, "Repository not found", "RepoNotFound")
        return repository

    def _writable(self, account, name):
        if account is None:
            raise Refused(401, "Unauthorized")
        repository = self._repository(account, name)
        if name.split("/")[0] not in {account, *self.organisations}:
            raise Refused(403, "Forbidden: you may not write here")
        return repository

    def _commit(self, repository, revision):
        commit = repository.newest if revision == "main" else revision
        if commit not in repository.commits:
            raise Refused(404, "Invalid rev id", "RevisionNotFound")
        return commit

    def harnesses(self, account, body, query, headers, method):
        return 200, {}, {}

    def create(self, account, body, query, headers, method):
        wanted = json.loads(body)
        if wanted.keys() - {"name", "organization", "private", "type", "visibility"}:
            raise Refused(400, f"unknown keys {sorted(wanted)}")
        if account is None:
            raise Refused(401, "Unauthorized")
        owner = wanted.get("organization") or account
        name = f"{owner}/{wanted['name']}"
        if owner not in {account, *self.organisations}:
            raise Refused(403, f"Forbidden: you may not create {name}")
        url = f"{self.endpoint}/{name}"
        if name in self.repositories:
            raise Refused(409, "You already created this model repo", content={"error": "exists", "url": url})
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.repositories[name] = Repository(bool(private))
        return 200, {}, {"url": url, "name": name, "id": name}

    def validate(self, account, body, query, headers, method):
        wanted = json.loads(body)
        match = re.match(r"---\n(.*?)\n---\n", wanted["content"], re.DOTALL)
        errors = [] if match else ["no metadata"]
        if match:
            data = yaml.safe_load(match[1])
            if data.get("license", "mit") not in LICENCES:
                errors.append(f'"license" must be one of {sorted(LICENCES)}')
            if data.get("pipeline_tag") not in PIPELINES:
                errors.append('"pipeline_tag" must be known')
            if not all(isinstance(tag, str) and tag for tag in data.get("tags", [])):
                errors.append('"tags" must be texts')
            for model in data.get("model-index", []):
                for result in model["results"]:
                    if not {"type", "name"} <= result["dataset"].keys() or not result["task"].get("type"):
                        errors.append('"model-index" must name task and dataset')
                    if any("value" not in metric or "type" not in metric for metric in result["metrics"]):
                        errors.append('"metrics" must have type and value')
        if errors:
            raise Refused(400, "invalid", content={"errors": [{"message": text} for text in errors], "warnings": []})
        return 200, {}, {"errors": [], "warnings": []}

    def preupload(self, account, body, query, headers, method, name, revision):
        self._commit(self._writable(account, name), revision)
        files = []
        for file in json.loads(body)["files"]:
            sample = base64.b64decode(file["sample"])
            if file["path"].startswith("/") or ".." in file["path"].split("/") or len(sample) != min(file["size"], 512):
                raise Refused(400, f"bad file {file['path']}")
            mode = "lfs" if b"\0" in sample else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None})
        return 200, {}, {"files": files}

    def batch(self, account, body, query, headers, method, name):
        self._writable(account, name)
        wanted = json.loads(body)
        if wanted["operation"] != "upload" or wanted["hash_algo"] != "sha256" or "basic" not in wanted["transfers"]:
            raise Refused(400, "bad batch")
        objects = []
        for item in wanted["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.objects:
                href = f"{self.endpoint}/upload/{item['oid']}/{item['size']}"
                answer["actions"] = {"upload": {"href": href}, "verify": {"href": f"{self.endpoint}/verify"}}
            objects.append(answer)
        return 200, {}, {"transfer": "basic", "objects": objects}

    def upload(self, account, body, query, headers, method, oid, size):
        if hashlib.sha256(body).hexdigest() != oid or len(body) != int(size):
            raise Refused(400, "the content has another hash")
        self.objects[oid] = body
        return 200, {"ETag": f'"{oid}"'}, b""

    def verify(self, account, body, query, headers, method):
        wanted = json.loads(body)
        if len(self.objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise Refused(404, "not uploaded")
        return 200, {}, {}

    def commit(self, account, body, query, headers, method, name, revision):
        repository = self._writable(account, name)
        files = dict(repository.commits[self._commit(repository, revision)])
        first, *lines = [json.loads(line) for line in body.splitlines()]
        if first["key"] != "header" or not first["value"]["summary"]:
            raise Refused(400, "a commit needs a header")
        for line in lines:
            value, key = line["value"], line["key"]
            if key == "file" and value["encoding"] == "base64":
                data = base64.b64decode(value["content"], validate=True)
                if b"\0" in data:
                    raise Refused(400, f"{value['path']} is binary and must be uploaded as a large file")
                files[value["path"]] = data
            elif key == "lfsFile" and value["oid"] in self.objects:
                files[value["path"]] = self.objects[value["oid"]]
            elif key == "deletedFile" and value["path"] in files:
                del files[value["path"]]
            else:
                raise Refused(400, f"cannot commit {line}")
        oid = repository.commit(files)
        return 200, {}, {"success": True, "commitOid": oid, "commitUrl": f"{self.endpoint}/{name}/commit/{oid}"}

    def info(self, account, body, query, headers, method, name, revision="main"):
        repository = self._repository(account, name)
        commit = self._commit(repository, revision)
        siblings = [{"rfilename": file} for file in repository.commits[commit]]
        found = {"_id": "0", "id": name, "modelId": name, "sha": commit, "private": repository.private}
        return 200, {}, {**found, "tags": [], "siblings": siblings, "downloads": 0, "likes": 0}

    def tree(self, account, body, query, headers, method, name, revision):
        repository = self._repository(account, name)
        files = repository.commits[self._commit(repository, revision)]
        if query.get("recursive", ["false"])[0].lower() not in ("true", "1"):
            raise Refused(400, "only whole trees are listed here")
        return 200, {}, [{"type": "file", "path": p, "size": len(d), "oid": _oid(d)} for p, d in files.items()]

    def resolve(self, account, body, query, headers, method, name, revision, path):
        repository = self._repository(account, name)
        commit = self._commit(repository, revision)
        data = repository.commits[commit].get(path)
        if data is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{_oid(data)}"', "Accept-Ranges": "bytes"}, data


def _oid(data):
    return hashlib.sha256(data).hexdigest()


_NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    ("/api/agent-harnesses", ("GET",), HubServer.harnesses),  # newer clients ask for it
    ("/api/repos/create", ("POST",), HubServer.create),
    ("/api/validate-yaml", ("POST",), HubServer.validate),
    (rf"/api/models/{_NAME}/preupload/([\w.-]+)", ("POST",), HubServer.preupload),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", ("POST",), HubServer.batch),
    (r"/upload/([0-9a-f]{64})/(\d+)", ("PUT",), HubServer.upload),
    ("/verify", ("POST",), HubServer.verify),
    (rf"/api/models/{_NAME}/commit/([\w.-]+)", ("POST",), HubServer.commit),
    (rf"/api/models/{_NAME}", ("GET",), HubServer.info),
    (rf"/api/models/{_NAME}/revision/([\w.-]+)", ("GET",), HubServer.info),
    (rf"/api/models/{_NAME}/tree/([\w.-]+)", ("GET",), HubServer.tree),
    (rf"/{_NAME}/resolve/([\w.-]+)/(.+)", ("GET", "HEAD"), HubServer.resolve),
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _read(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _serve(self):
        hub, body = self.server.hub, self._read()
        try:
            status, headers, content = hub.answer(self.command, self.path, self.headers, body)
        except Refused as e:
            hub.refused.append(f"{e.status} {self.command} {self.path}: {e}")
            status, headers = e.status, {"X-Error-Message": str(e), **({"X-Error-Code": e.code} if e.code else {})}
            content = {"error": str(e)} if e.content is None else e.content
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/octet-stream" if data is content else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = _serve
