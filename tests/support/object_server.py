"""An S3 server for tests (moto's), in this process, that can be told to misbehave."""

import logging
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Answer: TypeAlias = Callable[..., Any]
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "the-access-key",
    "AWS_SECRET_ACCESS_KEY": "the-secret-key",
    "AWS_REGION": "us-east-1",
}


class ObjectServer:
    """The server at `endpoint`."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.requests: list[tuple[str, str]] = []
        """What was asked for: methods and paths."""
        self.last_authorization = ""
        self._count, self._lock = 0, threading.Lock()
        self.behave()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def behave(self) -> None:
        """Do what a server should, from now on."""
        self.requests.clear()
        self.ignores_conditions = False
        self.lost_answers = 0
        """How many of the next puts are done, and answered by an error."""
        self.dropped_puts = 0
        """How many of the next puts are not done, and answered by an error."""
        self.denied: set[str] = set()
        """Methods that nobody may use."""
        self.region: str | None = None
        """Where all buckets are; None: where they are looked for."""
        self.is_late = False
        """Whether its clock is hours away from everybody's."""

    def downloads(self) -> int:
        """How many states were read."""
        return sum(method == "GET" and "/states/" in path for method, path in self.requests)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a client finds it."""
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.endpoint}

    def new_bucket(self) -> str:
        """The URL of an empty bucket."""
        self._count += 1
        name = f"bucket-{self._count}"
        with urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")):
            return f"s3://{name}"

    def _serve(self, environ: dict[str, Any], start_response: Answer) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        self.requests.append((method, environ["PATH_INFO"]))
        self.last_authorization = environ.get("HTTP_AUTHORIZATION", "")

        def refused(status: str, code: str, message: str = "") -> list[bytes]:
            start_response(status, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()]

        if method in self.denied:
            return refused("403 Forbidden", "AccessDenied", "Access Denied")
        if self.is_late:
            return refused("403 Forbidden", "RequestTimeTooSkewed", "The difference is too large.")
        if self.region and self.region not in self.last_authorization:
            wrong = f"The authorization header is malformed; the region is wrong; expecting '{self.region}'"
            return refused("400 Bad Request", "AuthorizationHeaderMalformed", wrong)
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if method == "PUT" and self.dropped_puts:
            self.dropped_puts -= 1
            return refused("503 Service Unavailable", "SlowDown")
        with self._lock:  # moto replaces an object in several steps
            if method == "PUT" and self.lost_answers:
                self.lost_answers -= 1
                list(self._app(environ, lambda *_: None))
                return refused("503 Service Unavailable", "SlowDown")
            return list(self._app(environ, start_response))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving() -> Iterator[ObjectServer]:
    server = ObjectServer()
    try:
        yield server
    finally:
        server.close()
