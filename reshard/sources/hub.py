"""MODEL as an id of the Hugging Face hub: its names, small files and safetensors headers, and only then its weights.

A ``HubFolder`` asks the hub once what a revision holds and speaks of that commit from then on. No weight byte moves
before ``download``. Addresses, tokens, mirrors (``HF_ENDPOINT``) and the cache are those of huggingface_hub, which is
imported in functions only: importing this module must stay cheap. Whatever it raises becomes a ``CheckpointError``.

Sources: ``HfApi.parse_safetensors_file_metadata`` of huggingface_hub for headers by range request; for the layout of
the cache https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

import glob
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from manifests.errors import CheckpointError
from manifests.header import Header, header_length, parse_header, read_header
from manifests.opening import read_file
from reshard.sources.folder import Folder, LocalFolder, WeightFile

FIRST_NBYTES = 128 * 1024
"""Bytes of the first range request; the headers of nearly all files fit."""

_LOG_IN = "log in with `hf auth login`"
_NOT_CACHED = "{repo}: not in the hub cache {cache} at revision {revision}; download it once with HF_HUB_OFFLINE unset"
_NOT_A_HUB = "{repo}: {endpoint} does not answer as a hub does ({detail}); check HF_ENDPOINT and the proxy"

# By the names of classes: huggingface_hub 1 speaks through httpx and 2 through httpx2, whose classes have equal names.
_REASONS = {
    "HFValidationError": "{repo}: not a hub id; one looks like org/name",
    "GatedRepoError": f"{{repo}}: gated; ask for access at {{endpoint}}/{{repo}} and {_LOG_IN}",
    "DisabledRepoError": "{repo}: disabled on the hub; use another repository",
    "RepositoryNotFoundError": "{repo}: no such repository on the hub, or it is private; "
    f"check the name or {_LOG_IN}",
    "RevisionNotFoundError": "{repo}: no revision {revision!r} on the hub; give a branch, a tag or a commit",
    "RemoteEntryNotFoundError": "{file}: not on the hub at revision {revision}; check the name and the revision",
    "LocalEntryNotFoundError": _NOT_CACHED,
    "OfflineModeIsEnabled": _NOT_CACHED,
    "FileMetadataError": _NOT_A_HUB,
    "JSONDecodeError": _NOT_A_HUB,
    "HfHubHTTPError": "{file}: the hub answered HTTP {status}; try again later",
    "TimeoutException": "{file}: no answer from {endpoint} in time; "
    "try again, or raise HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT (seconds)",
    "HTTPError": "{file}: no connection to {endpoint} ({detail}); "
    "check the network, or set HF_HUB_OFFLINE=1 to use the hub cache",
    "OSError": "{file}: cannot be fetched into the hub cache {cache} ({detail}); check its space and permissions",
    "Exception": "{file}: huggingface_hub failed ({kind}: {detail}); check HF_ENDPOINT and try again",
}
_STATUS_REASONS = {
    401: "{repo}: the hub refuses this login (HTTP 401); log in again with `hf auth login` or unset HF_TOKEN",
    403: "{repo}: the hub refuses access (HTTP 403); check the rights of the token",
    404: "{file}: the hub has no such thing (HTTP 404); check the name and the revision",
    429: f"{{repo}}: too many requests (HTTP 429); wait some minutes, or {_LOG_IN} for a higher limit",
}


def is_repo_id(text: str) -> bool:
    """Tell whether a text has the form of a hub id; whether it exists is not asked.

    >>> [is_repo_id(text) for text in ("Qwen/Qwen3-0.6B", "gpt2", "./folder", "a/b/c", "")]
    [True, True, False, False, False]
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # public, but not in __all__

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def locate(repo_id: str, revision: str = "", subfolder: str = "") -> Folder:
    """Return the folder of a hub id: in the local cache when huggingface_hub is offline, else on the hub.

    Raises:
        CheckpointError: It is not there, or cannot be reached.
    """
    from huggingface_hub import constants

    folder = cached_folder if constants.HF_HUB_OFFLINE else HubFolder
    return folder(repo_id, revision, subfolder)


class HubFolder:
    """A repository of the hub, or a folder in it, at one commit. Creating it makes one request.

    Attributes:
        label: The hub id and the subfolder.
        repo: The hub id.
        revision: The commit, whatever names it.
        ref: What names it: the branch, tag or commit that was asked for; ``main`` without one.
        subfolder: Relative to the root of the repository, or empty.
    """

    def __init__(self, repo_id: str, revision: str = "", subfolder: str = "") -> None:
        folder = _check_subfolder(repo_id, subfolder)
        self.repo = repo_id
        self.ref = revision or "main"
        self.subfolder = "" if folder == PurePosixPath() else str(folder)
        self.label = _label(repo_id, folder)
        self.revision, hashes = _list_files(repo_id, revision)
        self._hashes = {PurePosixPath(path).name: hash_ for path, hash_ in hashes.items() if _lies_in(path, folder)}
        if self.subfolder and not self._hashes:
            folders = sorted({path.partition("/")[0] for path in hashes if "/" in path})
            raise CheckpointError(
                f"{repo_id}: no files in {self.subfolder!r} at revision {self.ref}; "
                f"its folders are {', '.join(folders) or 'none'}"
            )

    def names(self) -> list[str]:
        """Return the names of its files, sorted."""
        return sorted(self._hashes)

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the bytes of a small file, through the hub cache."""
        from huggingface_hub import hf_hub_download

        with _explained(self.repo, self.ref, f"{self.label}/{name}"):
            return read_file(Path(hf_hub_download(self.repo, self._path(name), revision=self.revision)), most)

    def check(self, name: str) -> None:
        """Do nothing: what the hub lists can be fetched."""

    def weights(self, name: str) -> WeightFile:
        """Read the header of a safetensors file from the hub cache, or by at most two range requests.

        The identity is the hub's hash of the content: sha256 for large files, git's for small ones.
        """
        from huggingface_hub import hf_hub_url, try_to_load_from_cache

        label, identity = f"{self.label}/{name}", self._hashes.get(name, "")
        with _explained(self.repo, self.ref, label):
            cached = try_to_load_from_cache(self.repo, self._path(name), revision=self.revision)
            if isinstance(cached, str) and identity:
                return WeightFile(name, Path(cached).stat().st_size, identity, read_header(Path(cached), label), None)
            url = hf_hub_url(self.repo, self._path(name), revision=self.revision)
            header, first = _fetch_header(url, label)
        return WeightFile(name, first.file_nbytes, identity or first.etag, header, None)

    def download(self, names: Iterable[str]) -> LocalFolder:
        """Fetch files at this commit; see `download`."""
        return download(self.repo, self.revision, self.subfolder, names, ref=self.ref)

    def _path(self, name: str) -> str:
        return str(PurePosixPath(self.subfolder) / name)


def download(
    repo_id: str, revision: str = "", subfolder: str = "", names: Iterable[str] = (), *, ref: str = ""
) -> LocalFolder:
    """Fetch files into the hub cache, several at a time, and return the folder that holds them.

    Files that are there already are not fetched again.

    Args:
        repo_id: The hub id.
        revision: Best a commit, as ``HubFolder.revision``: a branch may move after its headers were read.
        subfolder: Relative to the root of the repository, or empty.
        names: The files, relative to the subfolder. Nothing else is fetched.
        ref: The branch or tag that led to the commit. The cache notes it, and offline runs find the commit by it.

    Raises:
        CheckpointError: A file is not there, or the hub or the network failed.
    """
    from huggingface_hub import snapshot_download

    folder = _check_subfolder(repo_id, subfolder)
    paths = [str(folder / name) for name in names]
    with _explained(repo_id, revision or "main"):
        patterns = [glob.escape(path) for path in paths]
        snapshot = Path(snapshot_download(repo_id, revision=revision or None, allow_patterns=patterns))
    # When the hub cannot be reached, huggingface_hub may return a snapshot that was begun without its missing files.
    if missing := [path for path in paths if not (snapshot / path).is_file()]:
        raise CheckpointError(
            f"{repo_id}: {len(missing)} of {len(paths)} files are not at commit {snapshot.name} or did not arrive: "
            f"{', '.join(missing[:5])}; check the network and try again"
        )
    if ref and ref != snapshot.name:
        _note_ref(snapshot, ref)
    return _local_folder(repo_id, snapshot, folder)


def cached_folder(repo_id: str, revision: str = "", subfolder: str = "") -> LocalFolder:
    """Return what the hub cache holds of a repository, without a request.

    Raises:
        CheckpointError: The cache does not hold this revision, or not this folder of it.
    """
    from huggingface_hub import snapshot_download

    folder = _check_subfolder(repo_id, subfolder)
    with _explained(repo_id, revision or "main"):
        # No patterns at all would mean a whole repository, which a cache filled by `download` never holds.
        snapshot = snapshot_download(repo_id, revision=revision or None, local_files_only=True, allow_patterns=[])
    return _local_folder(repo_id, Path(snapshot), folder)


def _local_folder(repo_id: str, snapshot: Path, folder: PurePosixPath) -> LocalFolder:
    label = _label(repo_id, folder)
    if not (snapshot / folder).is_dir():
        raise CheckpointError(
            f"{label}: not in the hub cache at commit {snapshot.name}; download it once with HF_HUB_OFFLINE unset"
        )
    return LocalFolder(snapshot / folder, label=label, repo=repo_id, revision=snapshot.name)


def _note_ref(snapshot: Path, ref: str) -> None:
    path = snapshot.parent.parent / "refs" / ref
    with suppress(OSError):  # a cache that is mounted read-only serves as well
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(snapshot.name, encoding="utf-8")


def _check_subfolder(repo_id: str, subfolder: str) -> PurePosixPath:
    folder = PurePosixPath(subfolder)
    if folder.is_absolute() or ".." in folder.parts:
        raise CheckpointError(f"{repo_id}: {subfolder!r} is not a folder of a repository; give a path from its root")
    return folder


def _lies_in(path: str, folder: PurePosixPath) -> bool:
    return PurePosixPath(path).parent == folder


def _label(repo_id: str, folder: PurePosixPath) -> str:
    return str(PurePosixPath(repo_id) / folder)


def _list_files(repo_id: str, revision: str) -> tuple[str, dict[str, str]]:
    """Return the commit, and each file's path with the hash of its content (empty where a mirror gives none)."""
    from huggingface_hub import HfApi, constants

    with _explained(repo_id, revision or "main"):
        # Without a timeout of its own this call waits for ever.
        timeout = constants.HF_HUB_ETAG_TIMEOUT
        model = HfApi().model_info(repo_id, revision=revision or None, files_metadata=True, timeout=timeout)
    if not model.sha:
        raise CheckpointError(
            without_secrets(f"{repo_id}: {constants.ENDPOINT} names no commit for it; check HF_ENDPOINT")
        )
    files = model.siblings or []
    return model.sha, {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id or "" for file in files}


class _Range(NamedTuple):
    content: bytes
    file_nbytes: int
    etag: str


def _fetch_header(url: str, label: str) -> tuple[Header, _Range]:
    first = _fetch_range(url, 0, FIRST_NBYTES, label)
    end = 8 + header_length(first.content, first.file_nbytes, label)
    text = first.content[:end]
    if len(text) < end:
        text += _fetch_range(url, len(text), end, label).content
    return parse_header(text[8:], first.file_nbytes, label), first


def _fetch_range(url: str, begin: int, end: int, label: str) -> _Range:
    """Return bytes ``begin`` to ``end`` of a file, fewer where it ends before; a server that sends all is cut off."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (  # type: ignore[attr-defined] # public, but not in __all__
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    # Compressed, the bytes would have other offsets.
    headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    # An exception inside the block must not be retried: http_stream_backoff would yield twice.
    with http_stream_backoff("GET", url, headers=headers, timeout=timeout, retry_on_exceptions=()) as response:
        if response.status_code != 416:  # an empty file has no range; its size comes all the same
            hf_raise_for_status(response)
        file_nbytes = _file_nbytes(response.status_code, response.headers, label)
        skipped = 0 if response.status_code == 206 else begin
        wanted = min(end, file_nbytes) - begin
        content = _take(response.iter_bytes(), skipped + wanted)[skipped:]
        etag = _etag([*response.history, response])
    if len(content) != wanted:
        raise CheckpointError(f"{label}: {len(content)} of {wanted} bytes came; check the network and try again")
    return _Range(content, file_nbytes, etag)


def _file_nbytes(status: int, headers: Mapping[str, str], label: str) -> int:
    size = re.fullmatch(r"bytes .*/(\d+)", headers.get("Content-Range", ""))
    if status != 200 and size:
        return int(size[1])
    if status == 200 and headers.get("Content-Length", "").isdecimal():
        return int(headers["Content-Length"])
    raise CheckpointError(f"{label}: the hub does not tell its size; download the repository and split the folder")


def _take(chunks: Iterator[bytes], most: int) -> bytes:
    content = bytearray()
    while len(content) < most and (chunk := next(chunks, None)) is not None:
        content += chunk
    return bytes(content[:most])


def _etag(responses: list[Any]) -> str:
    """Return the hash that the hub gives; a redirect to the storage carries it, the storage has tags of its own."""
    tags = [response.headers.get(key, "") for key in ("X-Linked-Etag", "ETag") for response in responses]
    return next((tag.removeprefix("W/").strip('"') for tag in tags if tag), "")


@contextmanager
def _explained(repo: str, revision: str, file: str = "") -> Iterator[None]:
    """Turn what huggingface_hub raises into a ``CheckpointError`` of one line. Only calls of it belong inside."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(_explain(error, repo, revision, file or repo)) from error


def _explain(error: BaseException, repo: str, revision: str, file: str) -> str:
    from huggingface_hub import constants

    # What is missing in the cache is missing for a reason, which comes as the cause.
    while "LocalEntryNotFoundError" in _kinds(error) and error.__cause__:
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", 0)
    reason = next(_REASONS[kind] for kind in _kinds(error) if kind in _REASONS)
    if reason is _REASONS["HfHubHTTPError"]:
        reason = _STATUS_REASONS.get(status, reason)
    detail = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return without_secrets(
        reason.format(
            repo=repo,
            revision=revision,
            file=file,
            endpoint=constants.ENDPOINT,
            cache=constants.HF_HUB_CACHE,
            status=status,
            kind=type(error).__name__,
            detail=detail,
        )
    )


def without_secrets(text: str) -> str:
    """Return a message without what is nobody's business: tokens, and the passwords and signatures of addresses.

    >>> without_secrets("GET https://user:pass@host/x?sig=abc failed")
    'GET https://host/x failed'
    """
    text = re.sub(r"(?<=//)[^/@\s]+@", "", text)
    text = re.sub(r"(?<=\w)\?[^\s'\"]+=[^\s'\"]*", "", text)
    return re.sub(r"hf_\w{16,}", "hf_…", text)


def _kinds(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]
