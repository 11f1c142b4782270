"""A model hub on loopback that speaks as much of the protocol as the real client asks for."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

MOST_REQUESTS = 500


class Hub:
    """Serve repositories: ``{id: {commit: {file name: content}}}`` and their branches.

    Every request is noted in ``requests``; with ``down = True`` each is answered by 503.
    """

    def __init__(self, repositories, branches):
        self.repositories = repositories
        self.branches = branches
        self.requests = []
        self.down = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self, body=True)

            def do_HEAD(self):
                hub.answer(self, body=False)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request, body):
        path = unquote(urlsplit(request.path).path)
        self.requests.append(f"{request.command} {path}")
        if self.down or len(self.requests) > MOST_REQUESTS:
            return self._send(request, 503, b"", {}, body)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._describe(request, "/".join(parts[2:4]), parts[4:], body)
        return self._file(request, "/".join(parts[:2]), parts[2:], body)

    def _commit(self, repository, revision):
        commit = self.branches.get((repository, revision), revision)
        return commit if commit in self.repositories.get(repository, {}) else None

    def _describe(self, request, repository, rest, body):
        if repository not in self.repositories:
            return self._error(request, "RepoNotFound", body)
        commit = self._commit(repository, rest[1] if len(rest) > 1 else "main")
        if commit is None:
            return self._error(request, "RevisionNotFound", body)
        files = self.repositories[repository][commit]
        if rest and rest[0] == "tree":
            answer = [
                {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
                for name, content in files.items()
            ]
        else:
            answer = {
                "id": repository,
                "modelId": repository,
                "sha": commit,
                "private": False,
                "tags": [],
                "downloads": 0,
                "siblings": [{"rfilename": name} for name in files],
            }
        return self._send(
            request, 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, body
        )

    def _file(self, request, repository, rest, body):
        commit = self._commit(repository, rest[1]) if rest[:1] == ["resolve"] else None
        content = self.repositories.get(repository, {}).get(commit, {}).get("/".join(rest[2:]))
        if content is None:
            return self._error(request, "EntryNotFound", body)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"'}
        return self._send(request, 200, content, headers, body)

    def _error(self, request, code, body):
        return self._send(request, 404, b"", {"X-Error-Code": code}, body)

    @staticmethod
    def _send(request, status, content, headers, body):
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(content)


def _oid(content):
    return hashlib.sha1(content).hexdigest()
