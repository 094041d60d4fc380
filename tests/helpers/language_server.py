"""A client of a language server: what an editor asks it about a file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path


class LanguageServer:
    """The YAML language server, spoken to as an editor does over its standard streams.

    Parameters
    ----------
    program : str
        ``yaml-language-server``.
    root : Path
        The folder that is open.
    """

    def __init__(self, program: str, root: Path):
        self._process = subprocess.Popen([program, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._n_requests = 0
        self._diagnostics: dict[str, list[dict]] = {}
        capabilities = {"workspace": {"configuration": True}, "textDocument": {"publishDiagnostics": {}}}
        self._ask("initialize", {"processId": None, "rootUri": root.as_uri(), "capabilities": capabilities})
        self._send({"method": "initialized", "params": {}})

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.communicate()

    def open(self, path: Path, text: str) -> None:
        """Open a file, with a text that need not be saved."""
        document = {"uri": path.as_uri(), "languageId": "yaml", "version": 1, "text": text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})

    def diagnostics(self, path: Path) -> dict[int, str]:
        """Return the message at each line of an open file that has one, counted from 0."""
        while path.as_uri() not in self._diagnostics:
            self._answer(self._read())
        marks = self._diagnostics[path.as_uri()]
        return {mark["range"]["start"]["line"]: mark["message"] for mark in marks}

    def completions(self, path: Path, line: int, character: int) -> dict[str, str]:
        """Return the texts that may stand at a place of an open file, and what is said about them."""
        place = {"textDocument": {"uri": path.as_uri()}, "position": {"line": line, "character": character}}
        return {
            item["label"]: str(item.get("documentation"))
            for item in self._ask("textDocument/completion", place)["items"]
        }

    def _send(self, message: dict) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def _read(self) -> dict:
        length = 0
        while header := self._process.stdout.readline().strip():
            if header.lower().startswith(b"content-length:"):
                length = int(header.partition(b":")[2])
        if not length:
            raise RuntimeError("LanguageServer: the server has ended")
        return json.loads(self._process.stdout.read(length))

    def _ask(self, method: str, params: dict) -> dict:
        self._n_requests += 1
        self._send({"id": self._n_requests, "method": method, "params": params})
        while True:
            message = self._read()
            if message.get("id") == self._n_requests and "method" not in message:
                return message["result"]
            self._answer(message)

    def _answer(self, message: dict) -> None:
        """Do what the server asks for."""
        if message["method"] == "textDocument/publishDiagnostics":
            self._diagnostics[message["params"]["uri"]] = message["params"]["diagnostics"]
        elif message["method"] == "workspace/configuration":
            settings = {"yaml": {"validate": True, "completion": True, "schemaStore": {"enable": False}}}
            result = [settings.get(item.get("section"), {}) for item in message["params"]["items"]]
            self._send({"id": message["id"], "result": result})
        elif "id" in message:
            self._send({"id": message["id"], "result": None})
