"""Finding checkpoints on a fake Hub in this process."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pace.checkpoints.reader import CheckpointReader
from pace.llm.loading import hub as hub_module
from pace.llm.loading.find import find_checkpoint
from pace.llm.loading.repository import needed_files
from pace.tokenizer.loading import load_tokenizer
from tests.llm.loading.conftest import COMMON, STATE
from tests.llm.loading.hub.fake_hub import COMMIT


@pytest.mark.parametrize(
    ("repo", "weights"),
    [("org/single", {"model.safetensors"}), ("toplevel", {"model.safetensors"}),
     ("org/sharded", {"model.safetensors.index.json", "model-00001-of-00002.safetensors",
       "model-00002-of-00002.safetensors"}),
     ("org/bin", {"pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin",
       "pytorch_model-00002-of-00002.bin"})],
)  # fmt: skip
def test_only_what_is_needed_is_downloaded_once(repo, weights, hub, tmp_path):
    directory = find_checkpoint(repo, cache_dir=tmp_path)
    assert set(hub.downloads) == set(COMMON) | weights and len(hub.downloads) == len(set(hub.downloads))
    assert set(CheckpointReader(directory).tensors) == set(STATE)
    assert load_tokenizer(directory).encode("hello")
    assert find_checkpoint(repo, cache_dir=tmp_path) == directory
    assert len(hub.downloads) == len(set(hub.downloads)), "downloaded again"
    asked = hub.requests
    assert find_checkpoint(repo, cache_dir=tmp_path, local_files_only=True) == directory
    assert hub.requests == asked


def test_no_bars_but_on_a_terminal(hub, tmp_path, capfd):
    find_checkpoint("org/single", cache_dir=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_alone_needs_no_weights(hub, tmp_path):
    find_checkpoint("org/single", cache_dir=tmp_path, weights=False)
    assert set(hub.downloads) == set(COMMON)


def test_without_network_the_cache_is_used(hub, tmp_path, monkeypatch, caplog):
    from huggingface_hub import constants

    directory = find_checkpoint("org/single", cache_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert find_checkpoint("org/single", cache_dir=tmp_path) == directory
        assert not caplog.records, "offline is what the user asked for"
        with pytest.raises(FileNotFoundError, match="'org/bin' is neither.*cache.*HF_HUB_OFFLINE"):
            find_checkpoint("org/bin", cache_dir=tmp_path)
    hub.close()
    with caplog.at_level(logging.WARNING, "pace"):
        assert find_checkpoint("org/single", cache_dir=tmp_path) == directory
    assert "cached copy" in caplog.text
    with pytest.raises(FileNotFoundError, match="'org/bin' is neither.*cache.*cannot be reached"):
        find_checkpoint("org/bin", cache_dir=tmp_path)


def test_a_hub_that_is_not_there_is_asked_once(hub, tmp_path, monkeypatch, capfd):
    hub.close()
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s to ask again"))
    with pytest.raises(FileNotFoundError, match="cannot be reached"):
        find_checkpoint("org/single", cache_dir=tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("repo", ["org/single", "org/sharded", "org/bin"])
def test_a_cached_snapshot_that_lacks_its_weights(repo, hub, tmp_path):
    directory = find_checkpoint(repo, cache_dir=tmp_path, weights=False)
    assert find_checkpoint(repo, cache_dir=tmp_path, local_files_only=True, weights=False) == directory
    with pytest.raises(FileNotFoundError, match="cache has only a part.*local_files_only.*(weights|missing|model)"):
        find_checkpoint(repo, cache_dir=tmp_path, local_files_only=True)
    hub.close()
    with pytest.raises(FileNotFoundError, match="cache has only a part.*cannot be reached"):
        find_checkpoint(repo, cache_dir=tmp_path)


def test_not_cached_and_not_to_be_asked_for(hub, tmp_path):
    with pytest.raises(FileNotFoundError, match="local_files_only=True"):
        find_checkpoint("org/single", cache_dir=tmp_path, local_files_only=True)
    assert hub.requests == 0


def test_a_repository_that_does_not_exist(hub, tmp_path, monkeypatch):
    (tmp_path / "org").mkdir()
    (tmp_path / "org/absence").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match="'org/absent' is neither a directory here.*'absence'.*nor a repository"
    ):
        find_checkpoint("org/absent", cache_dir=tmp_path)


def test_a_revision_that_does_not_exist(hub, tmp_path):
    with pytest.raises(FileNotFoundError, match="'org/single' exists.*'v9'"):
        find_checkpoint("org/single", cache_dir=tmp_path, revision="v9")


def test_gated_and_private_repositories(hub, tmp_path):
    hub.gated.add("org/single")
    with pytest.raises(PermissionError, match="'org/single' is gated.*https://huggingface.co/org/single.*token"):
        find_checkpoint("org/single", cache_dir=tmp_path)
    hub.token_of["org/bin"] = "secret"
    with pytest.raises(FileNotFoundError, match="private.*token"):
        find_checkpoint("org/bin", cache_dir=tmp_path, token=False)
    assert find_checkpoint("org/bin", cache_dir=tmp_path, token="secret").is_dir()


def test_repositories_that_cannot_be_used(hub, tmp_path):
    for repo, error, message in (
        ("org/others", FileNotFoundError, "model.onnx"),
        ("org/empty", FileNotFoundError, "'org/empty' has no config.json"),
        ("org/escapes", ValueError, "../../secret"),
    ):
        with pytest.raises(error, match=message):
            find_checkpoint(repo, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("address", "advice"),
    [("https://huggingface.co/org/single", "; give the id alone, 'org/single'"), ("hf://org/single",
     "; give the id alone, 'org/single'"),
     ("https://hf.co/org/single/resolve/main/m.gguf?download=true", "; give the id alone, 'org/single'"), ("http://",
      "")],
)  # fmt: skip
def test_the_address_of_a_page_is_no_id(address, advice, hub):
    with pytest.raises(FileNotFoundError) as raised:
        find_checkpoint(address)
    assert str(raised.value).endswith(f"{address!r}: an address is not a Hub id{advice}") and not hub.requests


def test_names_with_wildcards_are_taken_literally():
    names = ["config.json", "model.safetensors.index.json", "[a].safetensors", "a.safetensors"]
    assert "[a].safetensors" in needed_files(names, lambda index: [Path("[a].safetensors")])


# -- downloads that break ----------------------------------------------------------------------------------------------

LARGE = bytes(range(256)) * 4096
"""1 MiB, sent in pieces."""


@pytest.fixture
def large(hub, tmp_path, monkeypatch):
    """Adds a repository with a large weight file, and returns a function that finds it."""
    hub.repos["org/large"] = {**COMMON, "model.safetensors": LARGE}
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return lambda **options: find_checkpoint("org/large", cache_dir=tmp_path, **options)


def is_whole(directory: Path) -> bool:
    return (directory / "model.safetensors").read_bytes() == LARGE


def test_a_download_that_is_cut_goes_on(hub, large):
    hub.cuts["model.safetensors"] = [300_000, 400_000]
    assert is_whole(large())
    assert hub.sent["model.safetensors"] == len(LARGE), "each byte comes once"
    assert hub.ranges == ["bytes=300000-", "bytes=700000-"]


def test_a_connection_that_is_reset_goes_on(hub, large):
    hub.cuts["model.safetensors"] = [300_000, 400_000]
    hub.resets.add("model.safetensors")
    assert is_whole(large()), "what was on its way may be lost with a reset, but no more"


@pytest.mark.parametrize("arrives", [0, 500_000, len(LARGE) - 1])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_download_that_is_cut_for_good(arrives, resumes, hub, large, tmp_path):
    hub.cut_for_good["model.safetensors"] = arrives
    with pytest.raises(
        FileNotFoundError, match=f"model.safetensors of 'org/large' ended after {arrives:,} of 1,048,576"
    ):
        large()
    for path in tmp_path.rglob("*"):
        assert path.suffix != ".safetensors" and (
            path.suffix == ".incomplete" or path.parent.name != "blobs" or path.stat().st_size < 100_000
        )
    with pytest.raises(FileNotFoundError, match="has only a part"):
        large(local_files_only=True)
    hub.cut_for_good.clear()
    hub.sent.clear()
    hub.ignores_ranges = not resumes
    assert is_whole(large())
    assert hub.sent["model.safetensors"] == len(LARGE) - (arrives if resumes else 0)
    assert not list(tmp_path.rglob("*.incomplete")) and is_whole(large(local_files_only=True))


@pytest.mark.parametrize("content", [LARGE[:-1], LARGE[:100], b"", LARGE + b"x"], ids=len)
def test_a_file_of_a_wrong_length_is_not_used(content, hub, large, tmp_path):
    hub.sent_instead["model.safetensors"] = content
    with pytest.raises(FileNotFoundError, match="model.safetensors.*1,048,576"):
        large()
    assert not list(tmp_path.rglob("*.safetensors"))
    hub.sent_instead.clear()
    assert is_whole(large())


def test_a_listing_of_another_length_than_the_file(hub, large, monkeypatch, tmp_path):
    listed = hub_module.Repository._list

    def wrong(self):
        sizes, commit = listed(self)
        return sizes | {"model.safetensors": 7}, commit

    with monkeypatch.context() as patch:
        patch.setattr(hub_module.Repository, "_list", wrong)
        with pytest.raises(FileNotFoundError, match="arrived with 1,048,576 bytes, but the Hub lists 7"):
            large()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert is_whole(large())


@pytest.mark.parametrize(
    "name", ["../../../../victim.safetensors", "a/../../../../../victim.gguf", "/victim.safetensors"]
)
def test_names_that_reach_out_of_the_cache(name, hub, large, tmp_path):
    """Files outside the cache are neither written nor removed for having another size."""
    victim = tmp_path / "victim.safetensors"
    victim.write_bytes(b"mine")
    hub.repos["org/large"] |= {name: b"another"}
    with pytest.raises(FileNotFoundError, match="names that point outside of it"):
        large()
    assert victim.read_bytes() == b"mine" and not hub.downloads


def test_a_file_that_a_user_linked_into_the_cache_stays(hub, large, tmp_path):
    """A linked file whose size differs from the Hub's is not used. Only files of the cache itself are removed."""
    link = large() / "model.safetensors"
    own = tmp_path / "own.safetensors"
    own.write_bytes(b"mine")
    link.unlink(), link.symlink_to(own)
    assert is_whole(large()) and own.read_bytes() == b"mine"


def test_the_rest_of_another_file_is_found_out(hub, large):
    hub.cut_for_good["model.safetensors"] = 1000
    with pytest.raises(FileNotFoundError):
        large()
    hub.cut_for_good.clear()
    hub.sent_instead["model.safetensors"] = LARGE[:-1] + b"x"
    with pytest.raises(FileNotFoundError, match="SHA-256"):
        large()
    hub.sent_instead.clear()
    assert is_whole(large())


def test_a_cached_file_that_was_cut_is_downloaded_again(hub, large):
    blob = (large() / "model.safetensors").resolve()
    blob.write_bytes(LARGE[:1000])
    assert is_whole(large()) and hub.downloads.count("model.safetensors") == 2


def test_small_files_that_do_not_come(hub, large, tmp_path):
    hub.sent_instead["tokenizer.json"] = b"{"
    with pytest.raises(FileNotFoundError, match="the download of 'org/large' is incomplete: .*tokenizer.json"):
        large()
    assert "model.safetensors" not in hub.downloads, "weights come last"
    with pytest.raises(FileNotFoundError, match="has only a part"):
        large(local_files_only=True)
    hub.sent_instead.clear()
    assert is_whole(large())


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_that_fails_while_it_is_asked(status, hub, large, caplog):
    directory = large()
    hub.status = status
    with caplog.at_level(logging.WARNING, "pace"):
        assert large() == directory
    assert "cached copy" in caplog.text and str(status) in caplog.text


def test_two_at_once_download_it_once(hub, large):
    with ThreadPoolExecutor(4) as pool:
        assert all(is_whole(found.result()) for found in [pool.submit(large) for _ in range(4)])
    assert hub.sent["model.safetensors"] == len(LARGE)


def test_no_room_on_the_disk(hub, large, monkeypatch):
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match="takes 1.0 MiB.*has only 1000 bytes free.*cache_dir"):
        large()
    assert "model.safetensors" not in hub.downloads
    monkeypatch.undo()


# -- revisions, tokens, progress bars ----------------------------------------------------------------------------------


def test_revisions_have_their_own_snapshots_in_the_cache(hub, tmp_path):
    directory = find_checkpoint("org/single", revision="v1", cache_dir=tmp_path)
    assert find_checkpoint("org/single", revision=COMMIT, cache_dir=tmp_path) == directory
    asked = hub.requests
    for revision in ("v1", COMMIT):
        found = find_checkpoint("org/single", revision=revision, cache_dir=tmp_path, local_files_only=True)
        assert found == directory and hub.requests == asked
    with pytest.raises(FileNotFoundError, match="at revision 'v2' is neither.*nor in the Hub's cache"):
        find_checkpoint("org/single", revision="v2", cache_dir=tmp_path, local_files_only=True)


def test_a_token_that_the_hub_does_not_take(hub, tmp_path):
    hub.token_of["org/bin"] = "secret"
    with pytest.raises(PermissionError, match="rejects the token for 'org/bin'.*hf auth login"):
        find_checkpoint("org/bin", cache_dir=tmp_path, token="wrong")


def test_a_saved_token_that_is_not_there(hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(PermissionError, match="token=True.*hf auth login"):
        find_checkpoint("org/single", cache_dir=tmp_path, token=True)


def test_bars_on_a_terminal(hub, large, monkeypatch, capfd):
    monkeypatch.setattr(hub_module.env, "shows_bars", lambda: True)
    large()
    assert "model.safetensors" in capfd.readouterr().err
    large(progress=False)
    assert capfd.readouterr().err == ""
