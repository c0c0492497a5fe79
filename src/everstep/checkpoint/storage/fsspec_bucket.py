"""Object stores by way of fsspec: S3 through s3fs, and what else it knows (`pip install everstep[s3]`).

Every call has a deadline, whatever is behind it: it runs on a thread that is left alone when the deadline has passed,
and the save fails by name. What a store answers in other words than OSError is told as one.
"""

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar

from everstep.checkpoint.fileops import Data
from everstep.checkpoint.storage.bucket import Item
from everstep.checkpoint.unreachable import DEADLINE, deadline_s
from everstep.errors import ConfigurationError

T = TypeVar("T")
PART = 16 << 20
"""S3 takes 10,000 parts: a shard of up to 156 GiB."""
CONFLICTS = 4
OURS = "everstep"


def connect(url: str) -> "FsspecBucket":
    """Return the bucket behind a URL. Nothing is asked of it yet. ConfigurationError where a package is missing."""
    try:
        from fsspec import asyn  # noqa: PLC0415 - an extra
        from fsspec.core import url_to_fs  # noqa: PLC0415 - an extra

        _own_the_threads(asyn)
        limit = deadline_s()
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if url.startswith(("s3://", "s3a://")):
            times = {"connect_timeout": limit / 8, "read_timeout": limit / 4}
            options["config_kwargs"] = {**times, "retries": {"max_attempts": 2, "mode": "standard"}}
        files, root = url_to_fs(url, **options)
    except ImportError as error:
        raise ConfigurationError(
            f"checkpoints in {url} need a package that is not installed ({error}): pip install 'everstep[s3]' for S3, "
            "or the one that fsspec names for this kind of store"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{url} is no storage that fsspec knows: {error}") from error
    if hasattr(files, "retries"):
        files.retries = 3
    return FsspecBucket(url, files, root.rstrip("/"), limit)


def _own_the_threads(asyn: Any) -> None:
    """Give fsspec's threads our name where we are the first to want them: they are no leftovers of a user's call."""
    if asyn.loop[0] is not None:
        return
    loop = asyn.get_loop()
    asyn.iothread[0].name = f"{OURS}-{asyn.iothread[0].name}"
    loop.set_default_executor(ThreadPoolExecutor(4, thread_name_prefix=f"{OURS}-storage"))


class FsspecBucket:
    """`Bucket` over a file system of fsspec."""

    def __init__(self, url: str, files: Any, root: str, limit_s: float) -> None:
        self.url = url
        self._files, self._root, self._limit_s = files, root, limit_s

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _call(self, key: str, call: Callable[[], T]) -> T:
        """Do something within the deadline; every failure is an OSError with the object's URL."""
        where, done, found = f"{self.url}/{key}", threading.Event(), list[T]()
        failed: list[BaseException] = []

        def work() -> None:
            try:
                found.append(call())
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                failed.append(error)
            done.set()

        threading.Thread(target=work, name="everstep-storage-call", daemon=True).start()
        if not done.wait(self._limit_s):
            raise TimeoutError(
                errno.ETIMEDOUT, f"the store has not answered for {self._limit_s:g} s ({DEADLINE} is that limit)", where
            )
        if failed:
            raise _as_os_error(failed[0], where)
        return found[0]

    def create(self, key: str, data: bytes) -> bool:
        """See `Bucket.create`."""
        for left in range(CONFLICTS, -1, -1):
            try:
                self._call(key, lambda: self._files.pipe_file(self._path(key), data, mode="create"))
            except FileExistsError:
                return False
            except OSError as error:
                if "PreconditionFailed" in str(error):  # in the words of another store
                    return False
                if left == 0 or "ConditionalRequestConflict" not in str(error):  # two at one instant: ask again
                    raise
            else:
                return True
        raise AssertionError

    def put(self, key: str, data: bytes) -> None:
        """See `Bucket.put`."""
        self._call(key, lambda: self._files.pipe_file(self._path(key), data))

    def get(self, key: str) -> bytes:
        """See `Bucket.get`."""
        return bytes(self._call(key, lambda: self._files.cat_file(self._path(key))))

    def read(self, key: str, offset: int, count: int) -> bytes:
        """See `Bucket.read`."""
        try:
            found = self._call(key, lambda: self._files.cat_file(self._path(key), start=offset, end=offset + count))
        except FileNotFoundError:
            raise
        except OSError:
            if self._ends_before(key, offset):
                return b""  # stores refuse a range beyond the end, each in its own words
            raise
        return bytes(found)

    def _ends_before(self, key: str, offset: int) -> bool:
        """True where an object is known to have nothing at `offset`."""
        try:
            return int(self._call(key, lambda: self._files.info(self._path(key)))["size"]) <= offset
        except OSError:
            return False

    def items(self, prefix: str) -> list[Item]:
        """See `Bucket.items`."""
        try:
            found: dict[str, dict[str, Any]] = self._call(prefix, lambda: self._find(prefix))
        except FileNotFoundError:
            return []
        if not found and not self._is_s3:
            self._call(prefix, self._look_for_the_bucket)
        root = self._root.strip("/") + "/"
        listed = [
            Item(path.lstrip("/").removeprefix(root), int(info["size"] or 0), _changed(info))
            for path, info in found.items()
            if info.get("type") != "directory"
        ]
        return sorted((item for item in listed if item.key.startswith(prefix)), key=lambda item: item.key)

    def _find(self, prefix: str) -> dict[str, dict[str, Any]]:
        above, _, name = prefix.rpartition("/")
        below = f"{self._root}/{above}" if above else self._root
        if self._is_s3:
            return self._files.find(below, prefix=name, detail=True)  # type: ignore[no-any-return]
        failed: list[OSError] = []  # what cannot be listed would be left out without a word
        found: dict[str, dict[str, Any]] = self._files.find(below, detail=True, on_error=failed.append)
        for error in failed:
            if not isinstance(error, FileNotFoundError):
                raise error
        return found

    def _look_for_the_bucket(self) -> None:
        """Raise OSError where there is none: to some clients that is an empty listing."""
        bucket = self._root.strip("/").partition("/")[0]
        try:
            self._files.info(bucket)
        except FileNotFoundError as error:
            raise OSError(errno.ENODEV, f"the bucket {bucket} does not exist") from error
        except OSError:
            return  # to look at a bucket may be a right of its own

    @property
    def _is_s3(self) -> bool:
        kinds = self._files.protocol
        return "s3" in ((kinds,) if isinstance(kinds, str) else kinds)

    def delete(self, key: str) -> None:
        """See `Bucket.delete`."""
        try:
            self._call(key, lambda: self._files.rm_file(self._path(key)))
        except FileNotFoundError:
            return

    def upload(self, key: str) -> "FsspecUpload":
        """See `Bucket.upload`."""
        file = self._call(key, lambda: self._files.open(self._path(key), "wb", block_size=PART))
        return FsspecUpload(file, lambda call: self._call(key, call))

    def abort_uploads(self, prefix: str) -> list[str]:
        """See `Bucket.abort_uploads`: S3's; other stores forget them by themselves, or are not known to have any."""
        if not self._is_s3:
            return []
        bucket, _, root = self._root.partition("/")
        aborted: list[str] = []
        words: dict[str, str] = {"Bucket": bucket, "Prefix": f"{root}/{prefix}" if root else prefix}
        while True:
            answer = self._s3(prefix, "list_multipart_uploads", **words)
            for found in answer.get("Uploads", ()):
                key: str = found["Key"]
                self._s3(key, "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=found["UploadId"])
                aborted.append(key.removeprefix(f"{root}/"))
            if not answer.get("IsTruncated"):
                return aborted
            words |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def _s3(self, key: str, method: str, **words: str) -> dict[str, Any]:
        def call() -> dict[str, Any]:
            return self._files.call_s3(method, **words)  # type: ignore[no-any-return]

        return self._call(key, call)


class FsspecUpload:
    """`Upload` over a file that fsspec has opened for writing."""

    def __init__(self, file: Any, call: Callable[[Callable[[], Any]], Any]) -> None:
        self._file, self._call = file, call

    def write(self, data: Data) -> None:
        """See `Upload.write`."""
        self._call(lambda: self._file.write(data))

    def finish(self) -> None:
        """See `Upload.finish`."""
        self._call(self._file.close)

    def abandon(self) -> None:
        """See `Upload.abandon`. Never closed: that would make it an object, cut as it is."""
        discard = getattr(self._file, "discard", None)
        try:
            if discard is not None:
                self._call(discard)
        except OSError:
            return  # what is left of it is aborted at the next start
        finally:
            self._file.closed = True  # or its finalizer closes it
            self._file.buffer = None


def _as_os_error(error: BaseException, where: str) -> BaseException:
    if _code(error) == "NoSuchBucket":  # nothing is known of the object: it is the place that is not there
        return _caused(OSError(errno.ENODEV, str(error), where), error)
    if isinstance(error, OSError) and error.errno is not None:
        error.filename = error.filename or where
        return error
    if isinstance(error, OSError):  # made from a sentence alone
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), errno.EIO)
        return _caused(OSError(code, str(error), where), error)  # which makes it the kind that belongs to the code
    if isinstance(error, asyncio.TimeoutError):
        return TimeoutError(errno.ETIMEDOUT, "the store did not answer in time", where)
    if not isinstance(error, Exception):
        return error
    return _caused(OSError(errno.EIO, f"{type(error).__name__}: {error}", where), error)


def _code(error: BaseException) -> object:
    """What an S3 server calls it."""
    response: Any = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _caused(made: OSError, by: BaseException) -> OSError:
    made.__cause__ = by
    return made


_CODES: dict[type, int] = {
    FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST, PermissionError: errno.EACCES
}  # fmt: skip


def _changed(info: dict[str, Any]) -> float:
    found = next(
        (info[key] for key in ("LastModified", "last_modified", "mtime", "updated", "created") if key in info), 0
    )
    if isinstance(found, datetime):
        return found.timestamp()
    if isinstance(found, str):
        return datetime.fromisoformat(found).timestamp()
    return float(found or 0)
