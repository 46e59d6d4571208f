"""A page that is served while what it shows changes: the document, and two addresses of data beside it.

`/now` says how far things are, and which data the page should have; `/story` are those data, which a page asks for when
they have changed. Nothing else is served, nothing of the disk, and nothing can be sent: methods other than GET and HEAD
are refused. So are requests to any name that is not this machine's own: a page from elsewhere, whose name was made to
lead here (DNS rebinding), must not read this one.

One thread looks at the source, however many pages are open, and only while one of them asks.
"""

import gzip
import hashlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, NamedTuple, Protocol

from rewound.foundations.errors import InputError
from rewound.reports.charts import Json
from rewound.reports.page import as_json, document

HOST: Final = "127.0.0.1"
"""Where the page is served unless another place is named: for this machine alone."""
PORT: Final = 8421
INTERVAL: Final = 2.0
"""Seconds between two looks, and between two questions of a page."""
_ASLEEP: Final = 5 * INTERVAL  # without a question for so long, nobody looks
_PATIENCE: Final = 1.5  # seconds that a page waits for a look where the last one is old
_SHARE: Final = 0.1  # of the time that may be spent on looking, and as much on the data of the page
_LONGEST: Final = 30.0  # seconds between two looks, however long they take


class Source(Protocol):
    """What a live page shows; an `InputError` says why it cannot be looked at."""

    title: str

    def look(self) -> Json:
        """How far things are."""

    def story(self) -> Json | None:
        """The data of the page; None: they have not changed since they were last asked for."""


class _Data(NamedTuple):
    """The data of the page, and their digest."""

    story: Json
    content: bytes
    tag: str


class Lookout:
    """The last look at a source, for all who ask."""

    def __init__(self, source: Source, empty: Json) -> None:
        self._source = source
        self._changed = threading.Condition()
        self._asked = time.monotonic()
        self._ended = False
        self._now: Json = {}
        self._data = _data(empty)
        self._seen: float | None = None
        self._since: float | None = None  # when the look began that is under way
        self._trouble = ""
        shell = document(source.title, {}, live=True)
        self.instance = hashlib.sha256(shell).hexdigest()[:16]
        """Another one where the page has other scripts or another subject: an open page then loads anew."""

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, a thread looks whenever somebody asks."""
        thread = threading.Thread(target=self._look_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _look_on(self) -> None:
        drawn, took = -float("inf"), 0.0
        while not self._ended:
            began, pause = time.monotonic(), INTERVAL
            try:
                self._since = began
                now, self._since = self._source.look(), None
                pause = min(max(INTERVAL, (time.monotonic() - began) / _SHARE), _LONGEST)
                self._note(now=now)
                if time.monotonic() - drawn > took / _SHARE:
                    drawn = time.monotonic()
                    if (story := self._source.story()) is not None:
                        self._note(data=_data(story))
                    took = time.monotonic() - drawn
            except Exception as error:  # a page that stands still must say why, whatever it is
                self._since = None
                self._note(trouble=str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}")
            with self._changed:
                self._changed.wait_for(lambda: self._ended, pause)
                self._changed.wait_for(lambda: self._ended or time.monotonic() - self._asked < _ASLEEP)

    def _note(self, *, now: Json | None = None, data: _Data | None = None, trouble: str = "") -> None:
        with self._changed:
            self._trouble = trouble
            if now is not None:
                self._now, self._seen = now, time.monotonic()
            self._data = data or self._data
            self._changed.notify_all()

    def now(self) -> bytes:
        """How far things are, and how old that is; whoever asks keeps the thread looking."""
        with self._changed:
            self._asked = time.monotonic()
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._trouble) or self._age() < 2 * INTERVAL, _PATIENCE)
            waiting = 0.0 if self._since is None else time.monotonic() - self._since
            return as_json(
                {
                    **self._now,
                    "age": None if self._seen is None else round(self._age(), 1),
                    "waiting": round(waiting, 1),
                    "trouble": self._trouble,
                    "story": self._data.tag,
                    "instance": self.instance,
                    "interval": INTERVAL,
                }
            ).encode()

    def _age(self) -> float:
        return float("inf") if self._seen is None else time.monotonic() - self._seen

    def story(self) -> bytes:
        """The data of the page, with their digest."""
        return self._data.content

    def page(self) -> bytes:
        """The document with the data as they are."""
        data = self._data
        return document(self._source.title, {**data.story, **self._marks(data)}, live=True)

    def _marks(self, data: _Data) -> Json:
        return {"tag": data.tag, "instance": self.instance}


def _data(story: Json) -> _Data:
    text = as_json(story)
    tag = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _Data(story, as_json({**story, "tag": tag}).encode(), tag)


class Server(ThreadingHTTPServer):
    """Serves what a lookout sees; `port` 0 is any that is free."""

    daemon_threads = True

    def __init__(self, lookout: Lookout, host: str, port: int) -> None:
        self.lookout, self.host = lookout, host
        self.own_names = {"localhost", host.lower(), socket.gethostname().lower()}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if not 0 <= port < 2**16:
            raise InputError(f"--port must be from 0 to 65535, not {port}; 0 is any that is free")
        try:
            super().__init__((host, port), _Handler)
        except socket.gaierror as error:
            raise InputError(f"--host {host} is no address of this machine; leave it out for 127.0.0.1") from error
        except OSError as error:
            taken = f"port {port} of {host} cannot be used ({(error.strerror or str(error)).lower()})"
            raise InputError(f"{taken}; give another with --port, or 0 for any that is free") from error

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    @property
    def is_private(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.server_address[0]).is_loopback  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        """A page that was closed in the middle of an answer is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # seconds for a request, so that one that never ends holds no thread
    server_version, sys_version = "rewound", ""

    def do_GET(self) -> None:
        lookout = self.server.lookout
        match self.path.partition("?")[0]:
            case _ if not self._is_for_us():
                self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"this page has another address\n")
            case "/":
                self._answer(HTTPStatus.OK, lookout.page(), "text/html; charset=utf-8")
            case "/now":
                self._answer(HTTPStatus.OK, lookout.now(), "application/json")
            case "/story":
                self._answer(HTTPStatus.OK, lookout.story(), "application/json")
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"there is nothing here but /\n")

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"this page can only be read\n")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _is_for_us(self) -> bool:
        """Whether the browser asks this machine: by an address, or by one of its names."""
        given = self.headers.get("Host", "").lower()
        name = given.removeprefix("[").partition("]")[0] if given.startswith("[") else given.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.server.own_names
        return True

    def _answer(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        if len(content) > 2**14 and "gzip" in self.headers.get("Accept-Encoding", ""):
            content, encoding = gzip.compress(content, 1), "gzip"
        else:
            encoding = ""
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal is for the sweep."""
