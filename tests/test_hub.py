import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from safetensors.numpy import save_file

from manifests.errors import CheckpointError
from reshard import plan
from reshard.sources.checkpoint import open_checkpoint
from reshard.sources.folder import LocalFolder
from reshard.sources.hub import FIRST_NBYTES, HubFolder, cached_folder, download, is_repo_id, locate
from tests.hub_server import HubServer, Reply

REPO = "org/model"
TWO_FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
REFUSING = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository: an indexed checkpoint in its root, two more in folders, and what may lie beside them."""
    folder = tmp_path_factory.mktemp("source")
    weight_map = {}
    for position, name in enumerate(TWO_FILES):
        tensors = {f"layers.{position}.{part}": np.full((256, 512), position, np.float32) for part in ("up", "down")}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "notes[1].txt").write_text("brackets")
    (folder / "notes1.txt").write_text("no brackets")
    (folder / "transformer").mkdir()
    (folder / "transformer/config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    save_file(
        {"x_embedder.weight": np.ones((512, 512), np.float32), "scale": np.array(2, np.float32), "none": np.zeros(0)},
        folder / "transformer/diffusion_pytorch_model.safetensors",
    )
    (folder / "wide").mkdir()
    many = {f"experts.{i}.{'long.' * 10}weight": np.zeros(64, np.int8) for i in range(3000)}
    save_file(many, folder / "wide/model.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    server = HubServer()
    server.add(REPO, source)
    other = tmp_path_factory.mktemp("other")
    (other / "config.json").write_text('{"model_type": "other"}')
    server.add(REPO, other, "refs/pr/1")
    yield server
    server.close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server as the hub of this process, with an empty cache and no token."""
    server.reset()
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    point_to(server.url, monkeypatch)
    for name in ("HF_HUB_CACHE", "HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH"):
        monkeypatch.setattr(constants, name, str(cache if name == "HF_HUB_CACHE" else cache.parent / name))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    close_session()
    yield server
    server.stalled.set()
    close_session()


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def commit_of(hub: HubServer, ref: str = "main") -> str:
    return hub.models[REPO].refs[ref]


def refusal(call: Callable[[], object]) -> str:
    """Return the message of the refusal, which is one line."""
    with pytest.raises(CheckpointError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("org/name", True),
        ("gpt2", True),
        ("Qwen/Qwen3-0.6B", True),
        ("", False),
        (".", False),
        ("./name", False),
        ("/org/name", False),
        ("org/name/", False),
        ("a/b/c", False),
        ("org/na me", False),
        ("org/name.git", False),
        ("org/a--b", False),
    ],
)
def test_repo_ids(text: str, valid: bool) -> None:
    assert is_repo_id(text) is valid


def test_import_is_cheap() -> None:
    code = "import sys, reshard.sources.hub; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("subfolder", ["", "transformer", "wide"])
def test_checkpoint_equals_that_of_the_local_files(hub: HubServer, source: Path, subfolder: str) -> None:
    remote = open_checkpoint(HubFolder(REPO, subfolder=subfolder))
    local = open_checkpoint(LocalFolder(source / subfolder))
    assert remote.tensors == local.tensors
    assert [file.header for file in remote.files] == [file.header for file in local.files]
    assert [(file.name, file.nbytes) for file in remote.files] == [(file.name, file.nbytes) for file in local.files]
    assert [file.path for file in remote.files] == [None] * len(local.files)
    assert (remote.index_name, remote.config) == (local.index_name, local.config)
    assert (remote.carried, remote.ignored) == (local.carried, local.ignored)
    assert remote.folder.label == "/".join(filter(None, [REPO, subfolder]))
    assert (remote.folder.repo, remote.folder.revision) == (REPO, commit_of(hub))


def test_headers_come_without_weights(hub: HubServer) -> None:
    open_checkpoint(HubFolder(REPO))
    requests = hub.weight_requests()
    assert [request.range for request in requests] == [f"bytes=0-{FIRST_NBYTES - 1}"] * len(TWO_FILES)
    assert sum(request.nbytes for request in requests) == len(TWO_FILES) * FIRST_NBYTES
    assert all(commit_of(hub) in request.path for request in hub.log if "/resolve/" in request.path)


def test_long_header_takes_a_second_range_to_its_end(hub: HubServer, source: Path) -> None:
    path = source / "wide/model.safetensors"
    end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert FIRST_NBYTES < end < path.stat().st_size
    file = HubFolder(REPO, subfolder="wide").weights("model.safetensors")
    assert len(file.header.tensors) == 3000
    ranges = [f"bytes=0-{FIRST_NBYTES - 1}", f"bytes={FIRST_NBYTES}-{end - 1}"]
    assert [request.range for request in hub.weight_requests()] == ranges
    assert sum(request.nbytes for request in hub.weight_requests()) == end


def test_one_request_lists_and_pins(hub: HubServer) -> None:
    folder = HubFolder(REPO, subfolder="transformer")
    assert folder.names() == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert [request.path for request in hub.log] == [f"/api/models/{REPO}"]


def test_identity_is_the_hash_of_the_content(hub: HubServer, source: Path) -> None:
    expected = sha256((source / TWO_FILES[0]).read_bytes()).hexdigest()
    assert HubFolder(REPO).weights(TWO_FILES[0]).identity == expected
    hub.tells_hashes = False  # then the redirect tells it, and not the storage
    assert HubFolder(REPO).weights(TWO_FILES[0]).identity == expected


def test_server_that_ignores_ranges_is_cut_off(hub: HubServer, tmp_path: Path) -> None:
    save_file({"large": np.zeros(64 << 20, np.int8)}, tmp_path / "model.safetensors")
    hub.add("org/large", tmp_path)
    hub.serves_ranges = False
    folder = HubFolder("org/large")
    hub.delivered = 0
    file = folder.weights("model.safetensors")
    assert file.header.tensors["large"].nbytes == 64 << 20
    assert file.nbytes == (tmp_path / "model.safetensors").stat().st_size
    assert hub.delivered < 32 << 20  # what the buffers of the system take
    assert len(HubFolder(REPO, subfolder="wide").weights("model.safetensors").header.tensors) == 3000


def test_revision_selects_the_commit(hub: HubServer) -> None:
    folder = HubFolder(REPO, "refs/pr/1")
    assert (folder.names(), folder.revision) == (["config.json"], commit_of(hub, "refs/pr/1"))
    assert folder.read("config.json") == b'{"model_type": "other"}'
    assert HubFolder(REPO, commit_of(hub)).read("config.json") == b'{"model_type": "llama"}'
    assert cached_folder(REPO, folder.revision).read("config.json") == b'{"model_type": "other"}'


def test_small_files_are_read_once(hub: HubServer) -> None:
    assert HubFolder(REPO).read("config.json") == b'{"model_type": "llama"}'
    hub.log.clear()
    HubFolder(REPO).read("config.json")
    assert [request.path for request in hub.log] == [f"/api/models/{REPO}"]


def test_download_fetches_only_what_is_named(hub: HubServer, source: Path, cache: Path) -> None:
    folder = download(REPO, commit_of(hub), "", [TWO_FILES[0], "notes[1].txt"])
    assert folder.names() == [TWO_FILES[0], "notes[1].txt"]
    assert folder.path.is_relative_to(cache)
    assert (folder.label, folder.repo, folder.revision) == (REPO, REPO, commit_of(hub))
    assert (folder.path / TWO_FILES[0]).read_bytes() == (source / TWO_FILES[0]).read_bytes()
    assert sum(request.nbytes for request in hub.weight_requests()) == (source / TWO_FILES[0]).stat().st_size


def test_download_of_a_subfolder(hub: HubServer, source: Path) -> None:
    folder = HubFolder(REPO, subfolder="transformer/").download(["config.json", "diffusion_pytorch_model.safetensors"])
    assert folder.label == f"{REPO}/transformer"
    assert open_checkpoint(folder).tensors == open_checkpoint(LocalFolder(source / "transformer")).tensors


def test_downloaded_weights_are_read_from_the_cache(hub: HubServer) -> None:
    before = HubFolder(REPO).weights(TWO_FILES[0])
    download(REPO, commit_of(hub), "", [TWO_FILES[0]])
    folder = HubFolder(REPO)
    hub.log.clear()
    assert folder.weights(TWO_FILES[0]) == before
    assert hub.log == []
    download(REPO, commit_of(hub), "", [TWO_FILES[0]])
    assert hub.weight_requests() == []


def test_token_goes_to_the_hub_and_not_to_the_storage(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private.add(REPO)
    assert "private" in refusal(lambda: HubFolder(REPO))
    hub.log.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    HubFolder(REPO).download([TWO_FILES[0]])
    HubFolder(REPO).weights(TWO_FILES[1])
    HubFolder(REPO).read("config.json")
    tokens = {(request.server, request.token) for request in hub.log}
    assert tokens == {("hub", "Bearer hf_secret"), ("storage", "")}


def test_offline_uses_the_cache(hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(locate(REPO), HubFolder)
    folder = HubFolder(REPO)
    folder.download(folder.names())
    HubFolder(REPO, "refs/pr/1").download(["config.json"])
    hub.log.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for revision in ("", "main", folder.revision):
        found = locate(REPO, revision)
        assert isinstance(found, LocalFolder)
        assert (found.label, found.repo, found.revision) == (REPO, REPO, folder.revision)
        assert open_checkpoint(found).tensors == open_checkpoint(LocalFolder(source)).tensors
    assert locate(REPO, "refs/pr/1").revision == commit_of(hub, "refs/pr/1")
    again = download(REPO, folder.revision, "", list(TWO_FILES))
    assert again.revision == folder.revision
    assert hub.log == []


def test_offline_without_the_files(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = commit_of(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for call in (lambda: locate(REPO), lambda: HubFolder(REPO), lambda: download(REPO, commit, "", TWO_FILES)):
        message = refusal(call)
        assert "not in the hub cache" in message
        assert str(cache) in message
        assert "HF_HUB_OFFLINE" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    HubFolder(REPO).download(["config.json"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "not in the hub cache" in refusal(lambda: locate(REPO, "v2"))
    assert "not in the hub cache" in refusal(lambda: locate(REPO, subfolder="transformer"))
    assert locate(REPO).names() == ["config.json"]
    assert hub.log[-1].path.endswith("config.json")


NO_SUCH = [
    (lambda: HubFolder("org/absent"), "org/absent: no such repository on the hub, or it is private"),
    (lambda: download("org/absent", "", "", ["a"]), "org/absent: no such repository"),
    (lambda: HubFolder(REPO, "v9"), "org/model: no revision 'v9' on the hub; give a branch, a tag or a commit"),
    (lambda: download(REPO, "v9", "", ["config.json"]), "org/model: no revision 'v9'"),
    (lambda: HubFolder(REPO).read("absent.json"), "org/model/absent.json: not on the hub at revision main"),
    (lambda: HubFolder(REPO).weights("a.safetensors"), "org/model/a.safetensors: not on the hub at revision main"),
    (lambda: download(REPO, "", "", ["absent.json", "config.json"]), "org/model: 1 of 2 files are not at commit"),
    (
        lambda: HubFolder(REPO, subfolder="vae"),
        "org/model: no files in 'vae' at revision main; its folders are transformer, wide",
    ),
    (lambda: HubFolder(REPO, subfolder="../x"), "org/model: '../x' is not a folder of a repository"),
    (lambda: cached_folder(REPO, subfolder="/etc"), "org/model: '/etc' is not a folder of a repository"),
    (lambda: HubFolder("a/b/c"), "a/b/c: not a hub id; one looks like org/name"),
]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("call", "message"), NO_SUCH)
def test_what_does_not_exist(call: Callable[[], object], message: str) -> None:
    assert refusal(call).startswith(message)


def test_gated(hub: HubServer) -> None:
    hub.gated.add(REPO)
    folder = HubFolder(REPO)  # the hub lists gated files to everybody
    calls = (
        lambda: folder.read("config.json"),
        lambda: folder.weights(TWO_FILES[0]),
        lambda: folder.download([TWO_FILES[0]]),
    )
    for call in calls:
        assert f"{REPO}: gated; ask for access at {hub.url}/{REPO} and log in with `hf auth login`" == refusal(call)


def test_expired_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    assert "refuses this login (HTTP 401); log in again" in refusal(lambda: HubFolder(REPO))
    assert "refuses this login (HTTP 401)" in refusal(lambda: download(REPO, commit_of(hub), "", ["config.json"]))


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(403), "refuses access (HTTP 403); check the rights of the token"),
        (Reply(404), "no such thing (HTTP 404)"),
        (Reply(429), "too many requests (HTTP 429); wait"),
        (Reply(503, {}, b"down\nfor now"), "answered HTTP 503; try again later"),
        (Reply(403, {"X-Error-Message": "Access to this resource is disabled."}), "disabled on the hub"),
        (Reply(200, {"Content-Type": "text/html"}, b"<html>Log in to this network"), "does not answer as a hub does"),
        (Reply(200, {}, b'{"id": "org/model", "siblings": []}'), "names no commit for it; check HF_ENDPOINT"),
        (Reply(200, {}, b'{"unlike": "a hub"}'), "huggingface_hub failed (KeyError"),
    ],
)
def test_hub_fails(hub: HubServer, reply: Reply, words: str) -> None:
    hub.failure = reply
    message = refusal(lambda: HubFolder(REPO))
    assert message.startswith(f"{REPO}: ")
    assert words in message


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(503), "answered HTTP 503; try again later"),
        (Reply(429), "too many requests (HTTP 429)"),
        (Reply(206, {"Content-Range": "bytes 0-9/*"}, b"0123456789"), "does not tell its size"),
        (Reply(206, {"Content-Range": "bytes 0-9/1000"}, b"0123456789"), "10 of 1000 bytes came; check the network"),
    ],
)
def test_hub_fails_after_the_listing(hub: HubServer, reply: Reply, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # the waits before huggingface_hub tries again
    folder = HubFolder(REPO)
    hub.failure = reply
    message = refusal(lambda: folder.weights(TWO_FILES[0]))
    assert words in message
    if reply.status != 206:
        assert words in refusal(lambda: folder.read("config.json"))
        assert words in refusal(lambda: folder.download([TWO_FILES[0]]))


def test_download_that_stops_half_way_is_no_success(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = HubFolder(REPO)
    folder.read("config.json")  # now huggingface_hub has a snapshot to return
    monkeypatch.setattr("time.sleep", lambda _: None)
    point_to(REFUSING, monkeypatch)
    message = refusal(lambda: folder.download(["config.json", *TWO_FILES]))
    assert f"{REPO}: 2 of 3 files are not at commit {folder.revision} or did not arrive: {TWO_FILES[0]}" in message


def test_no_network(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    folder = HubFolder(REPO)
    point_to(REFUSING, monkeypatch)
    calls = (
        lambda: HubFolder(REPO),
        lambda: folder.read("config.json"),
        lambda: folder.weights(TWO_FILES[0]),
        lambda: folder.download([TWO_FILES[0]]),
    )
    for call in calls:
        message = refusal(call)
        assert f"no connection to {REFUSING}" in message
        assert "HF_HUB_OFFLINE=1" in message


def test_no_answer_in_time(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = HubFolder(REPO)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.stalled.clear()
    for call in (lambda: HubFolder(REPO), lambda: folder.weights(TWO_FILES[0])):
        message = refusal(call)
        assert f"no answer from {hub.url} in time" in message
        assert "HF_HUB_DOWNLOAD_TIMEOUT" in message


def test_broken_address(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("hub.example", monkeypatch)
    assert "no connection to hub.example" in refusal(lambda: HubFolder(REPO))
    assert hub.log == []


def test_cache_that_cannot_be_written(hub: HubServer, cache: Path) -> None:
    cache.write_text("a file")
    message = refusal(lambda: HubFolder(REPO).read("config.json"))
    assert f"cannot be fetched into the hub cache {cache} (" in message
    assert hub.weight_requests() == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty (0 bytes); download it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer of 56 bytes"),
        (b"\x10\0\0\0\0\0\0\0{}", "cut short inside its header: 10 bytes, at least 24 expected"),
        (b"\x08\0\0\0\0\0\0\0{}      more", "too long: 20 bytes, 16 expected from its header"),
    ],
)
def test_broken_weights(hub: HubServer, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    hub.add("org/broken", tmp_path)
    message = refusal(lambda: HubFolder("org/broken").weights("model.safetensors"))
    assert message.startswith("org/broken/model.safetensors: ")
    assert words in message


def test_errors_are_chained(hub: HubServer) -> None:
    with pytest.raises(CheckpointError) as caught:
        HubFolder("org/absent")
    assert type(caught.value.__cause__).__name__ == "RepositoryNotFoundError"
    assert caught.value.exit_code == 3
    assert hub.log[-1].status == 404


def test_mirror_home_and_offline_come_from_the_environment(hub: HubServer, tmp_path: Path) -> None:
    code = (
        "from reshard.sources.hub import locate\n"
        f"folder = locate({REPO!r}, 'main', 'transformer')\n"
        "if hasattr(folder, 'download'):\n"
        "    folder.download(['config.json'])\n"
        "print(type(folder).__name__, folder.revision, *folder.names())\n"
    )
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_secret"}

    def run(**more: str) -> list[str]:
        result = subprocess.run(
            [sys.executable, "-c", code], env=env | more, capture_output=True, text=True, check=True
        )
        return result.stdout.split()

    assert run() == ["HubFolder", commit_of(hub), "config.json", "diffusion_pytorch_model.safetensors"]
    assert {request.token for request in hub.log} == {"Bearer hf_secret"}
    assert list((tmp_path / "hub").glob("models--org--model/snapshots/*/transformer/config.json"))
    hub.log.clear()
    assert run(HF_HUB_OFFLINE="1") == ["LocalFolder", commit_of(hub), "config.json"]
    assert hub.log == []


def test_the_key_tells_the_folders_of_a_repository_apart(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("transformer", "transformer_2")):
        (tmp_path / "twins" / name).mkdir(parents=True)
        (tmp_path / "twins" / name / "config.json").write_text("{}")
        save_file({"up.weight": np.full((4, 4), number, np.float32)}, tmp_path / "twins" / name / "model.safetensors")
    hub.add("org/twins", tmp_path / "twins")

    def key(name: str) -> str:
        return plan("org/twins", tp=2, subfolder=name, plan={"up": "colwise"}).key

    first, second = key("transformer"), key("transformer_2")
    assert first != second
    download("org/twins", subfolder="transformer", names=["config.json", "model.safetensors"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert key("transformer") == first, "what was downloaded is the same checkpoint"
