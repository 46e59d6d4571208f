"""A store in a bucket of an object store, given by its URL: `s3://bucket/prefix`, `az://...` or `gs://...`.

A file is an object. To create one is a put with a condition, which the server refuses where there is an object: a
server that does not is refused itself (`probe`). An answer may be lost, or belong to a request that was repeated:
what is created therefore carries a token of its call, which is read back where the answer does not settle it.

Tensors are fetched into a cache on this machine, by the object's tag. It holds at most `$REWOUND_CACHE_GIB` and can be
deleted at any time. Each of its files has a digest of its content in its name, and one that has changed is fetched
again.

Credentials come from the environment, or the profile of the AWS tools, and are neither printed nor kept. obstore would
ask the machine's metadata service where there are none; this is left to who asks for it.
"""

import configparser
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from rewound.foundations.errors import InputError, first_line
from rewound.foundations.wholefiles import FORGOTTEN, default_cache, remove_unfinished, unfinished
from rewound.states.storage.backend import Backend, Listed, ReadOnly, Source, refusals_explained

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

T = TypeVar("T")
_PART: Final = 16 * 2**20  # bytes of one request: any connection moves them within the time-out
_LARGEST: Final = 2**63
_ATTEMPTS: Final = 5
_TOKEN: Final = "creator"  # the name of the token among an object's metadata
_FIRST_PATIENCE, _PATIENCE = timedelta(seconds=3), timedelta(seconds=90)
"""How long a request is repeated while the server does not answer: one that never did, and one that did before."""


class Bucket(Backend):
    """The objects below a URL, which `as_location` has checked."""

    def __init__(self, url: str, *, is_probed: bool = False) -> None:
        self.url, self._is_probed = url, is_probed
        self._store = _opened(url, _PATIENCE if is_probed else _FIRST_PATIENCE)
        self._cache = _Cache(default_cache() / "stores", url)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.url, self._is_probed)  # another process finds its credentials itself

    @property
    def name(self) -> str:
        return self.url

    def probe(self) -> None:
        if self._is_probed:
            return
        try:  # the object stays: whoever opens the store next is refused at once
            is_created_twice = self.create("probe", b"1") and self.create("probe", b"2")
        except ReadOnly:  # nothing can be claimed here, and reading needs no conditions
            is_created_twice = False
        if is_created_twice:
            raise InputError(
                f"cannot use store {self.url}: its server ignores conditions (If-None-Match), so that two workers "
                "could own one node; use a server that has conditional writes, or a folder"
            )
        self._is_probed, self._store = True, _opened(self.url, _PATIENCE)

    def read(self, path: str, most: int) -> bytes | None:
        return self._unless_replaced(path, lambda: b"".join(self._content(path, most)[1]))

    def fetch(self, path: str) -> Path | None:
        def fetched() -> Path:
            return self._cache.found(self._cached_name(path, _tag(obstore.head(self._store, path)))) or downloaded()

        def downloaded() -> Path:
            tag, parts = self._content(path)
            with self._cache.new_file() as file:
                with file.open("wb") as written:
                    written.writelines(parts)
                return self._cache.kept(self._cached_name(path, tag), file)

        return self._unless_replaced(path, fetched)

    def _content(self, path: str, most: int = _LARGEST) -> tuple[str, Iterator[bytes]]:
        """The tag of an object as it is now, and its first bytes, in parts; `PreconditionError` if it is replaced."""
        try:
            first = obstore.get(self._store, path, options={"range": (0, min(most, _PART))})
        except GenericError as error:  # no range of an empty object can be had
            if "status code: 416" not in str(error) or (found := obstore.head(self._store, path))["size"]:
                raise
            return _tag(found), iter([b""])
        end, tag = min(first.meta["size"], most), first.meta["e_tag"]

        def parts() -> Iterator[bytes]:
            yield bytes(first.bytes())
            for begin in range(_PART, end, _PART):
                options: GetOptions = {"range": (begin, min(begin + _PART, end)), "if_match": tag}
                try:
                    yield bytes(obstore.get(self._store, path, options=options).bytes())
                except FileNotFoundError:
                    raise PreconditionError(path) from None

        return _tag(first.meta), parts()

    def _unless_replaced(self, path: str, attempt: Callable[[], T]) -> T | None:
        """What the attempt to read a file gives, made again if the file is replaced meanwhile; None without a file."""
        with self._refusals_explained():
            for _ in range(_ATTEMPTS):
                try:
                    return attempt()
                except FileNotFoundError as error:
                    if _says_no_bucket(str(error)):
                        raise
                    return None
                except PreconditionError:
                    continue
        raise InputError(f"cannot use store {self.url}: {path} is replaced faster than it can be read; try again later")

    def write(self, path: str, source: Source, *, durable: bool = True) -> None:
        if isinstance(source, bytes):
            with self._refusals_explained(writes=True):
                obstore.put(self._store, path, source)
            return
        with self._cache.new_file() as file:
            source(file)
            with self._refusals_explained(writes=True):
                written = obstore.put(self._store, path, file, chunk_size=_PART, max_concurrency=4)
            if tag := written["e_tag"]:
                self._cache.kept(self._cached_name(path, tag), file)

    def create(self, path: str, content: bytes, *, durable: bool = True) -> bool:
        token = secrets.token_hex(16)
        with self._refusals_explained(writes=True):
            for attempt in range(_ATTEMPTS):
                try:
                    obstore.put(self._store, path, content, mode="create", attributes={_TOKEN: token})
                    return True
                except (PermissionDeniedError, UnauthenticatedError):
                    raise
                except BaseError:  # there is one, or the answer was lost
                    if (creator := self._creator(path)) is not None:
                        return creator == token
                    if attempt + 1 == _ATTEMPTS:
                        raise
        raise AssertionError  # the last attempt ends by an answer or an error

    def _creator(self, path: str) -> str | None:
        """The token of the call that has created a file; None: there is no file."""
        try:
            found = obstore.get(self._store, path, options={"range": (0, 1)})
        except FileNotFoundError:
            return None
        return found.attributes.get(_TOKEN, "")

    def remove(self, path: str) -> None:
        with self._refusals_explained(writes=True), suppress(FileNotFoundError):
            obstore.delete(self._store, path)

    def list(self, prefix: str) -> dict[str, Listed]:
        found: dict[str, Listed] = {}
        folder = prefix.rpartition("/")[0]  # obstore lists whole folders
        with self._refusals_explained():
            for chunk in obstore.list(self._store, folder or None, chunk_size=1000):
                for each in chunk:
                    if each["path"].startswith(prefix):
                        # The tag alone is often a hash of the content, and a sign of life may say the same again.
                        version = f"{each['e_tag']} {each['last_modified'].timestamp()}"
                        found[each["path"]] = Listed(version, each["size"])
        return found

    def sweep_up(self, after: float = FORGOTTEN) -> None:
        with self._cache.refusals_explained():
            remove_unfinished(self._cache.folder, after)

    def _cached_name(self, path: str, tag: str) -> str:
        return hashlib.blake2b(f"{self.url} {path} {tag}".encode(), digest_size=16).hexdigest()

    @contextmanager
    def _refusals_explained(self, *, writes: bool = False) -> Iterator[None]:
        """Inside, what the server refuses becomes a sentence for a person."""
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise self._refusal(error, writes=writes) from None  # obstore's text may have a token of the URL in it

    def _refusal(self, error: Exception, *, writes: bool) -> InputError:
        text = re.sub(r"https?://\S+", "the server", str(error).partition("\n\nDebug source")[0])
        code = f" ({found[1]})" if (found := re.search(r"<Code>(\w+)", text)) else ""
        if _says_no_bucket(text):
            reason = f"there is no bucket {self.url.split('/')[2]}; create it, or correct the URL"
        elif re.search("AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocation|configured region", text):
            expected = re.search(r"(?:expecting '|<Region>)([a-z0-9-]+)", text)
            name = f" ({expected[1]})" if expected else ""
            reason = f"the bucket is in another region; set AWS_REGION to the bucket's{name}"
        elif "RequestTimeTooSkewed" in text:
            reason = "this machine's clock is too far from the server's; set it, and run the same command again"
        elif isinstance(error, PermissionDeniedError | UnauthenticatedError):
            reason = f"the credentials may not {'write' if writes else 'read'} there{code}; give some that may"
            if writes:
                return ReadOnly(f"cannot use store {self.url}: {reason}, or choose another with --store")
        elif answer := re.search(r"status code: (\d+[^:]*)", text):
            reason = f"its server answers {answer[1].strip()}{code}; try again later, nothing stored is lost"
        elif "HTTP error" in text:
            reason = "its server does not answer; run the same command again when it does, nothing stored is lost"
        else:
            reason = " ".join(text.split())
        return InputError(f"cannot use store {self.url}: {reason}")


def _reopened(url: str, is_probed: bool) -> Bucket:
    return Bucket(url, is_probed=is_probed)


def _tag(found: "ObjectMeta") -> str:
    """Another one for another content."""
    return found["e_tag"] or f"{found['last_modified']} {found['size']}"


def _says_no_bucket(text: str) -> bool:
    return "NoSuchBucket" in text or "ContainerNotFound" in text or "The specified bucket does not exist" in text


# Tensors on this machine


class _Cache:
    """Copies of objects by name; where they are too many, those that were not used for longest go."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self._name = folder, f"{url} (its cache {folder})"
        self._most = _cache_bytes()

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        """A path for a file that is being made; it goes unless it is kept."""
        with self.refusals_explained(), unfinished(self.folder) as file:
            yield file

    def found(self, name: str) -> Path | None:
        """The copy of that name, if it is still what was kept."""
        with self.refusals_explained():
            for file in self.folder.glob(f"{name}-*"):
                with suppress(FileNotFoundError):  # removed meanwhile
                    if file.name == f"{name}-{_file_digest(file)}":
                        os.utime(file)  # used last
                        return file
                    file.unlink()
        return None

    def kept(self, name: str, file: Path) -> Path:
        """A file that has just been made, from now on as the copy of that name."""
        with self.refusals_explained():
            copy = file.replace(self.folder / f"{name}-{_file_digest(file)}")
            self._make_room(copy)
            return copy

    def _make_room(self, newest: Path) -> None:
        files = [(found.st_mtime, found.st_size, path) for path, found in self._files() if path != newest]
        excess = sum(size for _, size, _ in files) + newest.stat().st_size - self._most
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if not entry.name.startswith("."):
                        yield Path(entry.path), entry.stat()

    @contextmanager
    def refusals_explained(self) -> Iterator[None]:
        with refusals_explained(self._name):
            yield


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _cache_bytes() -> int:
    given = os.environ.get("REWOUND_CACHE_GIB", "10")
    try:
        return int(float(given) * 2**30)
    except (ValueError, OverflowError):
        raise InputError(f"REWOUND_CACHE_GIB must be a number of GiB such as 10, not {given!r}") from None


# Credentials

_METADATA = "REWOUND_INSTANCE_METADATA"
_ENOUGH: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "s3": (
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),  # Kubernetes
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
        ("AWS_SKIP_SIGNATURE",),
    ),
    "az": (
        ("AZURE_STORAGE_ACCOUNT_KEY",),
        ("AZURE_STORAGE_SAS_TOKEN",),
        ("AZURE_STORAGE_SAS_KEY",),
        ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID"),
        ("AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_TENANT_ID"),
        ("AZURE_USE_AZURE_CLI",),
        ("AZURE_STORAGE_USE_EMULATOR",),
        ("AZURE_SKIP_SIGNATURE",),
    ),
    "gs": (
        ("GOOGLE_APPLICATION_CREDENTIALS",),
        ("GOOGLE_SERVICE_ACCOUNT",),
        ("GOOGLE_SERVICE_ACCOUNT_KEY",),
        ("GOOGLE_SKIP_SIGNATURE",),
    ),
}
"""Variables of the environment that say who asks; one of these groups is enough."""


def _opened(url: str, patience: timedelta) -> ObjectStore:
    """The client of a bucket; it asks nothing yet."""
    scheme, _, bucket, *folders = url.split("/")
    prefix = "/".join(folders) or None
    profile = _aws_profile() if scheme == "s3:" else {}
    _check_credentials(url, profile)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or profile.get("endpoint")
    options: Any = {
        "client_options": {"timeout": "60s", "connect_timeout": "10s"},
        "retry_config": {"max_retries": 4 if patience == _FIRST_PATIENCE else 20, "retry_timeout": patience},
    }
    try:
        if scheme == "s3:":
            if endpoint:
                options["endpoint"] = endpoint
                options["client_options"]["allow_http"] = endpoint.startswith("http:")  # as the user has named it
            return S3Store(bucket, prefix=prefix, **{**profile, **options})
        return (AzureStore if scheme == "az:" else GCSStore)(bucket, prefix=prefix, **options)
    except (BaseError, ValueError) as error:
        raise InputError(f"cannot use store {url}: {first_line(error)}; correct the environment") from None


def _check_credentials(url: str, profile: Mapping[str, str]) -> None:
    """An error if obstore would look for them in the machine's metadata, unless that is wanted."""
    scheme = url.partition(":")[0]
    given = any(all(os.environ.get(name) for name in group) for group in _ENOUGH[scheme])
    if given or "access_key_id" in profile or os.environ.get(_METADATA) == "1":
        return
    if scheme == "gs" and Path("~/.config/gcloud/application_default_credentials.json").expanduser().exists():
        return
    first = " and ".join(_ENOUGH[scheme][0])
    raise InputError(
        f"cannot use store {url}: there are no credentials; set {first} (or another usual way, see the docs), "
        f"or {_METADATA}=1 to ask the machine that this runs on"
    )


def _aws_profile() -> dict[str, str]:
    """What the files of the AWS tools say of the chosen profile, as far as the environment does not say it."""
    name = os.environ.get("AWS_PROFILE", "default")
    found: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(Path(os.environ.get(variable) or default).expanduser())
        except (configparser.Error, UnicodeDecodeError):
            raise InputError(f"{variable} or {default} is not a file of the AWS tools; correct it") from None
        found |= dict(parser[section]) if parser.has_section(section) else {}
    if "AWS_PROFILE" in os.environ and not found:
        raise InputError(f"AWS_PROFILE is {name!r}, and there is no such profile in ~/.aws; correct one of them")
    known = {"region": found.get("region"), "endpoint": found.get("endpoint_url")}
    if os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        known["region"] = None
    if not os.environ.get("AWS_ACCESS_KEY_ID"):
        known |= {to: found.get(f"aws_{to}") for to in ("access_key_id", "secret_access_key")}
        known["token"] = found.get("aws_session_token")
    return {name: value for name, value in known.items() if value}
