"""Finds the files of a log by path, glob or URL, and reads remote ones by ranges, with retries.

`s3://` and `gs://` are read by pyarrow, without the GIL; `http(s)://` and every other scheme by fsspec.
"""

from __future__ import annotations

import dataclasses
import glob
import io
import os
import random
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, BinaryIO, Protocol, TypeVar

from rowstead.spec.data import FILE_LOGS, FileLogSpec, ParquetSpec, SplitSpec
from rowstead.spec.errors import DataError, install_command

T = TypeVar("T")
Read = Callable[[int, int], bytes]
"""Reads the bytes of a file from a start to a stop; threads may share it."""

PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses between attempts, each made up to half longer or shorter at random."""
EXTRAS = {"s3": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http"}
"""The extra of this package that a scheme needs."""
CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "http": "give a URL that needs no password",
}
_DENIED = re.compile(
    "DENIED|OAuth2|ACCESS_KEY|SIGNATURE|TOKEN|UNAUTHENTICATED|Unauthorized|Forbidden|HTTP status 40[013]|redential"
)
_MISSING = re.compile("NO_SUCH|NOT_FOUND|HTTP status 404|does not exist|Bucket .* not found")


@dataclass(frozen=True)
class RemoteFile:
    """An open remote file."""

    size: int
    """Bytes."""
    read: Read
    etag: str | None = None
    """A digest of its content, by the bucket."""


class RemoteFiles(Protocol):
    """The files of one bucket or server."""

    def find(self, url: str) -> list[str]:
        """URLs of the files that a URL or glob names."""

    def open(self, url: str) -> RemoteFile:
        """Open a file."""


class BucketFiles:
    """The files of a bucket of S3 or Google Cloud Storage, by pyarrow."""

    def __init__(self, url: str) -> None:
        from pyarrow import fs

        self._fs = fs
        self._scheme, _, path = url.partition("://")
        self._bucket = path.partition("/")[0]
        is_s3 = EXTRAS[self._scheme] == "s3"
        _ = fs.S3FileSystem if is_s3 else fs.GcsFileSystem  # an ImportError where pyarrow is built without it
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")  # otherwise that of the bucket
        options = (f"?region={region}" if region else "") if is_s3 else "?retry_limit_seconds=10"
        self._filesystem = fs.FileSystem.from_uri(f"{self._scheme}://{self._bucket}{options}")[0]

    def find(self, url: str) -> list[str]:
        from fsspec.utils import glob_translate

        path = url.partition("://")[2]
        if glob.has_magic(path):
            fixed = re.split(r"[*?[]", path)[0].rpartition("/")[0]
            selector = self._fs.FileSelector(fixed, allow_not_found=True, recursive="/" in path[len(fixed) + 1 :])
            infos, pattern = self._filesystem.get_file_info(selector), glob_translate(path)
        else:
            infos, pattern = self._filesystem.get_file_info([path]), re.escape(path)
        found = [f"{self._scheme}://{info.path}" for info in infos if info.is_file and re.fullmatch(pattern, info.path)]
        if not found and self._filesystem.get_file_info(self._bucket).type == self._fs.FileType.NotFound:
            raise DataError(f"no such bucket: `{self._bucket}`; check its name, your region and your endpoint")
        return found

    def open(self, url: str) -> RemoteFile:
        file = self._filesystem.open_input_file(url.partition("://")[2])
        etag = (file.metadata() or {}).get("ETag")
        return RemoteFile(
            file.size(), lambda start, stop: file.read_at(stop - start, start), etag and etag.decode(errors="replace")
        )


class FsspecFiles:
    """Files that fsspec can read."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._filesystem = url_to_fs(url)[0]

    def find(self, url: str) -> list[str]:
        if _is_glob(url):
            return list(map(self._filesystem.unstrip_protocol, self._filesystem.glob(url)))
        self._filesystem.info(url)
        return [url]

    def open(self, url: str) -> RemoteFile:
        size = self._filesystem.size(url)
        if size is None:
            raise DataError(f"the server does not say how large `{url}` is; use one that supports range requests")
        return RemoteFile(size, lambda start, stop: self._filesystem.cat_file(url, start=start, end=stop))


@dataclass(frozen=True)
class LogFile:
    """One file, local or remote."""

    path: str
    """Path or URL, as messages show it."""
    remote: RemoteFiles | None = None
    """Where the file is; None for a local one."""

    @property
    def is_local(self) -> bool:
        return self.remote is None

    @cached_property
    def _opened(self) -> RemoteFile:
        assert self.remote is not None
        return retry(self.path, partial(self.remote.open, self.path))

    @property
    def size(self) -> int:
        """Bytes of a remote file."""
        return self._opened.size

    @property
    def etag(self) -> str | None:
        """The bucket's digest of a remote file, where it has one."""
        return self._opened.etag

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a remote file."""

        def attempt() -> bytes:
            data = self._opened.read(start, stop)
            if len(data) > stop - start:
                raise DataError(f"the server of `{self.path}` does not support range requests; use one that does")
            if len(data) < stop - start:
                raise OSError(f"got {len(data)} of {stop - start} bytes")
            return data

        return retry(self.path, attempt)

    def ranges(self) -> RangeFile:
        """The remote file as an object that pyarrow can read, with a position of its own."""
        return RangeFile(self)


def find_files(patterns: Iterable[str], suffixes: Sequence[str] = ParquetSpec.suffixes) -> list[LogFile]:
    """The files that paths, folders, globs and URLs name, in that order; those of one folder or glob are sorted.

    Of a folder they are those in it and below it that end in one of `suffixes`. Names that begin with `_` or `.` are skipped, as Spark does.
    """
    found = [
        file
        for pattern in patterns
        for file in (_find_remote(pattern, suffixes) if "://" in pattern else _find_local(pattern, suffixes))
    ]
    for file in found:
        if any("\ud800" <= c <= "\udfff" for c in file.path):  # bytes that Python could not decode, and pyarrow cannot open
            raise DataError(
                f"`{os.fsencode(file.path).decode('utf-8', 'backslashreplace')}` has a name that is not UTF-8; rename it"
            )
    return found


def _find_local(pattern: str, suffixes: Sequence[str]) -> list[LogFile]:
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        return _find_in_folder(pattern, path, suffixes)
    if os.path.exists(path):
        check_regular(path)
        return [LogFile(path)]
    if not glob.has_magic(path):
        raise DataError(f"no file `{pattern}` (looked in {os.path.dirname(os.path.abspath(path))})")
    found = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
    if not found:
        raise DataError(f"no file matches `{pattern}`{_suggest(path)}")
    return [LogFile(p) for p in found]


def _find_in_folder(pattern: str, path: str, suffixes: Sequence[str]) -> list[LogFile]:
    found, others = [], Counter[str]()
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(("_", "."))]
        for name in names:
            if name.startswith(("_", ".")):
                continue
            if name.lower().endswith(tuple(suffixes)):
                found.append(os.path.join(folder, name))
            else:
                others[os.path.splitext(name)[1] or name] += 1
    if not found:
        ends = ", ".join(f"`{suffix}`" for suffix in suffixes)
        has = ", ".join(f"{count:,} that end in `{end}`" for end, count in others.most_common(3))
        raise DataError(f"folder `{pattern}` has no files that end in {ends}" + (f"; it has {has}" if has else ""))
    return [LogFile(p) for p in sorted(found)]


def _suggest(path: str) -> str:
    """What else to write for a glob that matches nothing, if a folder above has files; empty if not."""
    fixed = re.split(r"[*?[]", path)[0]
    folder = fixed.rpartition("/")[0] or "."
    if not os.path.isdir(folder):
        return f": there is no folder `{folder}`"
    kind = os.path.splitext(path)[1]
    below = any(name.endswith(kind) for _, _, names in os.walk(folder) for name in names)
    return f"; name the folder itself for all files below it: `{folder}`" if below and kind else ""


def choose_file_log(paths: tuple[str, ...], like: FileLogSpec | None = None, **options: Any) -> FileLogSpec:
    """The spec of a log in these files by how their names end: Parquet, or text.

    It has the settings of `like` where both are of one kind; of another kind only those that all kinds have.
    """
    kind = _kind_of(paths[0], like)
    if like is not None:
        shared = {field.name for field in dataclasses.fields(FileLogSpec)} if kind is not type(like) else vars(like).keys()
        options = {name: getattr(like, name) for name in shared} | options
    return kind(**options | {"train": paths, "eval": (), "test": (), "test_fraction": 0.0, "split": SplitSpec()})


def _kind_of(path: str, like: FileLogSpec | None) -> type[FileLogSpec]:
    ends = [path.partition("?")[0].rstrip("/").lower()]
    local = os.path.expanduser(path)
    if os.path.isdir(local):
        ends = [name.lower() for _, _, names in os.walk(local) for name in names if not name.startswith(("_", "."))]
    for kind in (*([type(like)] if like is not None else []), *FILE_LOGS):
        if any(end.endswith(kind.suffixes) for end in ends):
            return kind
    return type(like) if like is not None else FILE_LOGS[0]


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise a DataError unless there is a regular file at `path`: reading from a pipe or a device may never end."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise DataError(f"`{path}` cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise DataError(f"`{path}` is {_KINDS.get(stat.S_IFMT(mode), 'not a file')}; give a regular file")


def open_regular(path: str) -> BinaryIO:
    """Open a local file for reading, unbuffered; a DataError if it is not a regular one."""
    check_regular(path)
    return open(path, "rb", buffering=0)


def _find_remote(url: str, suffixes: Sequence[str]) -> list[LogFile]:
    if url.endswith("/"):
        return _find_in_remote_folder(url, suffixes)
    scheme = url.partition("://")[0]
    kind: Callable[[str], RemoteFiles] = BucketFiles if EXTRAS.get(scheme) in ("s3", "gs") else FsspecFiles
    try:
        remote = retry(url, partial(kind, url))
        found = sorted(retry(url, partial(remote.find, url)))
    except DataError:
        raise
    except (ImportError, ValueError) as error:  # a missing package, an unknown scheme
        remedy = f". Run: {install_command(EXTRAS[scheme])}" if scheme in EXTRAS else ""
        raise DataError(f"cannot open `{url}`: {error}{remedy}") from None
    if not found:
        raise DataError(f"no file {'matches ' if _is_glob(url) else ''}`{url}`")
    return [LogFile(each, remote) for each in found]


def _find_in_remote_folder(url: str, suffixes: Sequence[str]) -> list[LogFile]:
    def is_seen(path: str) -> bool:
        names = path[len(url) :].split("/")
        return path.lower().endswith(tuple(suffixes)) and not any(name.startswith(("_", ".")) for name in names)

    found = [file for file in _find_remote(f"{url}**/*", suffixes) if is_seen(file.path)]
    if not found:
        raise DataError(f"folder `{url}` has no files that end in {', '.join(f'`{suffix}`' for suffix in suffixes)}")
    return found


def _is_glob(url: str) -> bool:
    """Whether a URL has wildcards; the question mark before a query is none."""
    return glob.has_magic(url.partition("?")[0] if url.startswith("http") else url)


def retry(url: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` until it succeeds. Errors that may pass are tried again after growing pauses; others are raised as DataErrors."""
    for pause_s in PAUSES_S:
        try:
            return attempt()
        except (ImportError, ValueError):  # DataErrors too
            raise
        except Exception as error:  # noqa: BLE001, RUF100 - every library has its own
            if _is_lasting(error):
                raise _explain(url, error) from None
        time.sleep(pause_s * random.uniform(0.5, 1.5))
    try:
        return attempt()
    except Exception as error:  # noqa: BLE001, RUF100
        raise _explain(url, error) from None


def _is_lasting(error: Exception) -> bool:
    """Whether another attempt is pointless."""
    status = getattr(error.__cause__ or error, "status", None)  # of an HTTP response
    if status is not None:
        return 400 <= status < 500 and status not in (408, 429)
    if isinstance(error, (FileNotFoundError, PermissionError)) and error.__cause__ is None:
        return True
    return bool(_DENIED.search(str(error)) or _MISSING.search(str(error)))


def _explain(url: str, error: Exception) -> DataError:
    """The error for a file that cannot be read, with a remedy."""
    cause = error.__cause__ or error
    text = (str(cause).splitlines() or [type(cause).__name__])[0]
    status = getattr(cause, "status", None)
    if status in (401, 403) or isinstance(error, PermissionError) or _DENIED.search(text):
        return DataError(f"access to `{url}` is denied ({text}); {CREDENTIALS[EXTRAS.get(url.partition('://')[0], 'http')]}")
    if status == 404 or isinstance(cause, FileNotFoundError) or _MISSING.search(text):
        return DataError(f"no file `{url}`: {text}")
    return DataError(f"cannot read `{url}`: {text}; {len(PAUSES_S) + 1} attempts failed")


class RangeFile(io.RawIOBase):
    """A remote file as a file object, with a position of its own, so that threads do not interfere."""

    def __init__(self, file: LogFile) -> None:
        self._file, self._size, self._position = file, file.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._position + size, self._size)
        if stop <= self._position:
            return b""
        data = self._file.read(self._position, stop)
        self._position = stop
        return data
