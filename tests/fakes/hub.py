"""A small server that speaks as much of the Hugging Face Hub's API as a download takes."""

import contextlib
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

INFO, TREE = re.compile(r"/api/models/(.+?)/revision/(.+)"), re.compile(r"/api/models/(.+?)/tree/(.+)")
FILE = re.compile(r"/(.+?/.+?)/resolve/(.+?)/(.+)")
RANGE = re.compile(r"bytes=(\d+)-(\d+)")
JSON = {"Content-Type": "application/json"}


@contextlib.contextmanager
def hub(repositories):
    """Serves repositories: the content of each file, by name and revision. Yields the address and the files sent whole."""
    sent = []
    commits = {(name, hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()): files
               for (name, revision), files in repositories.items()}  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if asked := INFO.fullmatch(self.path.split("?")[0]):
                self.info(*asked.groups())
            elif asked := TREE.fullmatch(self.path.split("?")[0]):
                tree = [{"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for file, content in commits[asked.groups()].items()]  # fmt: skip
                self.answer(200, json.dumps(tree).encode(), JSON)
            elif asked := FILE.fullmatch(self.path):
                self.file(*asked.groups())
            else:
                self.answer(404, b"")

        do_HEAD = do_GET

        def info(self, name, revision):
            commit = hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()
            commit = revision if (name, revision) in commits else commit
            if (name, commit) in commits:
                siblings = [{"rfilename": file} for file in commits[name, commit]]
                body = json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode()
                return self.answer(200, body, JSON)
            known = any(name == one for one, _ in commits)
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})

        def file(self, name, commit, file):
            content = commits[name, commit][file]
            headers = {"X-Repo-Commit": commit, "ETag": hashlib.sha1(content).hexdigest()}
            if asked := RANGE.fullmatch(self.headers.get("Range") or ""):
                first, last = map(int, asked.groups())
                return self.answer(206, content[first : last + 1], headers)
            if self.command == "GET":
                sent.append(file)
            self.answer(200, content, headers)

        def answer(self, status, body, headers=()):
            self.send_response(status)
            for item in (*dict(headers).items(), ("Content-Length", str(len(body)))):
                self.send_header(*item)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
