"""The files of a repository that make a checkpoint."""

from __future__ import annotations

import pytest

from pace.llm.loading.find import find_checkpoint
from pace.llm.loading.repository import gguf_files, mmproj_files

PLAIN = ["m-Q2_K.gguf", "m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-f16.gguf", "mmproj-m-f16.gguf", "README.md"]
DOTTED = ["m.Q4_0.gguf", "m.q4_k_m.gguf", "m.fp16.gguf", "m.imatrix.gguf"]
SNAKE = ["ggml_model_q4_0.gguf", "ggml_model_q4_1.gguf"]
VARIANTS = ["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-i1-Q3_K_M.gguf"]
IN_FOLDERS = ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "Q4_K_M/m-00001-of-00003.gguf",
              "Q4_K_M/m-00003-of-00003.gguf", "Q4_K_M/m-00002-of-00003.gguf", "m-Q8_0.gguf",
              "mmproj/m-Q8_0.gguf"]  # fmt: skip
PARTS = [f"Q4_K_M/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
CALIBRATED = ["m-IQ4_XS-imatrix.gguf", "m-imatrix-Q4_K_M.gguf", "m.Q6_K.imatrix.gguf", "imatrix.gguf",
              "m-imatrix.gguf", "imatrix_unsloth.gguf"]  # fmt: skip
ONE = ["model.gguf", "mmproj.gguf", "config.json"]


@pytest.mark.parametrize(
    ("names", "quant", "expected"),
    [(PLAIN, None, ["m-Q4_K_M.gguf"]), (PLAIN, "Q4_K_M", ["m-Q4_K_M.gguf"]), (PLAIN, "q2_k", ["m-Q2_K.gguf"]),
     (PLAIN, "F16", ["m-f16.gguf"]), (PLAIN, "m-q8_0.GGUF", ["m-Q8_0.gguf"]),
     (DOTTED, None, ["m.q4_k_m.gguf"]), (DOTTED, "FP16", ["m.fp16.gguf"]), (SNAKE, "Q4_0", ["ggml_model_q4_0.gguf"]),
     (VARIANTS, None, ["m-Q4_K_M.gguf"]), (VARIANTS, "UD-Q4_K_M", ["m-UD-Q4_K_M.gguf"]),
     (VARIANTS, "q4_k_xl", ["m-UD-Q4_K_XL.gguf"]), (VARIANTS, "Q3_K_M", ["m-i1-Q3_K_M.gguf"]),
     (IN_FOLDERS, None, PARTS), (IN_FOLDERS, "q8_0", ["m-Q8_0.gguf"]),
     (IN_FOLDERS, "bf16", IN_FOLDERS[:2]), (IN_FOLDERS, PARTS[0], PARTS),
     (CALIBRATED, None, ["m-imatrix-Q4_K_M.gguf"]), (CALIBRATED, "iq4_xs", ["m-IQ4_XS-imatrix.gguf"]),
     (CALIBRATED, "Q6_K", ["m.Q6_K.imatrix.gguf"]), (CALIBRATED[2:], None, ["m.Q6_K.imatrix.gguf"]),
     (ONE, None, ["model.gguf"]), (ONE, "model.gguf", ["model.gguf"])],
    ids=str,
)  # fmt: skip
def test_the_file_of_a_quant(names, quant, expected):
    assert gguf_files(names, quant, "org/x") == expected


@pytest.mark.parametrize(
    ("names", "quant", "error", "message"),
    [(PLAIN, "Q6_K", FileNotFoundError, "org/x has no GGUF file of 'Q6_K'; it has m-Q2_K.gguf, .*m-f16.gguf$"),
     (PLAIN, "K", FileNotFoundError, "no GGUF file of 'K'"), (PLAIN, "Q4", FileNotFoundError, "no GGUF file of 'Q4'"),
     (PLAIN, "Q4_K", FileNotFoundError, "no GGUF file of 'Q4_K'"),
     (SNAKE, None, ValueError, "several GGUF files, but none of Q4_K_M; .*org/x:q4_0.*ggml_model_q4_1.gguf"),
     (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], None, ValueError, "several GGUF files of Q4_K_M: .*org/x:a-Q4_K_M.gguf"),
     (PARTS[:2], None, FileNotFoundError, "org/x lacks Q4_K_M/m-00003-of-00003.gguf, from the 3 shards"),
     (["model.safetensors"], "Q4_0", FileNotFoundError, "no GGUF file.*leave out ':Q4_0'"),
     (["mmproj-f16.gguf"], "f16", FileNotFoundError, "no GGUF file")],
    ids=str,
)  # fmt: skip
def test_a_quant_that_means_no_file_or_several(names, quant, error, message):
    with pytest.raises(error, match=message):
        gguf_files(names, quant, "org/x")


@pytest.mark.parametrize(
    ("names", "model", "expected"),
    [
        (PLAIN, "m-Q4_K_M.gguf", ["mmproj-m-f16.gguf"]),
        (ONE, "model.gguf", ["mmproj.gguf"]),
        (["mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf"], "Qwen2.5-VL-7B-Q4_K_M.gguf",
         ["mmproj-Q8_0.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"]),
        (["mmproj-m-Q8_0.gguf", "mmproj-m-f32.gguf"], "m-BF16-00001-of-00002.gguf",
         ["mmproj-m-Q8_0.gguf", "mmproj-m-f32.gguf"]),
        (["mmproj-Q8_0.gguf", "a/mmproj-F32.gguf", "a/b/mmproj.GGUF", "c/mmproj-Q4_0.gguf"], "a/b/m-Q8_0.gguf",
         ["a/b/mmproj.GGUF", "a/mmproj-F32.gguf", "mmproj-Q8_0.gguf"]),
        (IN_FOLDERS, "m-Q8_0.gguf", []),
        (["mmproj-Qwen2-VL-7B-f16.gguf", "mmproj-Qwen2.5-VL-7B-f16.gguf", "Qwen2.5-VL-3B.mmproj-Q8_0.gguf"],
         "Qwen2.5-VL-7B-Q4_K_M.gguf",
         ["mmproj-Qwen2.5-VL-7B-f16.gguf", "Qwen2.5-VL-3B.mmproj-Q8_0.gguf", "mmproj-Qwen2-VL-7B-f16.gguf"]),
        (["mmproj-F16.txt", "m.gguf"], "m.gguf", []),
    ],
)  # fmt: skip
def test_mmproj_files_of_a_model(names, model, expected):
    """The order is that of llama.cpp: the nearest folder, then the nearest number of bits, then the alphabet."""
    assert mmproj_files(reversed(names), model) == expected


# -- on the Hub --------------------------------------------------------------------------------------------------------


def files(names):
    return {name: name.encode() for name in names}


@pytest.fixture
def found(hub, tmp_path):
    """Returns `found(path_or_id, ...)`, which returns the path in the repository and the downloaded files."""
    hub.repos |= {
        "org/plain-GGUF": files([*PLAIN, "config.json"]), "org/folders": files(IN_FOLDERS), "org/one": files(ONE),
        "org/mixed": files([*PLAIN, "config.json", "model.safetensors", "tokenizer.json"]), "org/several": files(SNAKE),
    }  # fmt: skip

    def find(name, **options):
        hub.downloads.clear()
        path = find_checkpoint(name, cache_dir=tmp_path, **options)
        return path.relative_to(
            next(parent for parent in [path, *path.parents] if len(parent.name) == 40)
        ).as_posix(), sorted(hub.downloads)

    return find


@pytest.mark.parametrize("options", [{}, {"revision": "v1"}, {"weights": False}], ids=str)
@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/plain-GGUF", ["m-Q4_K_M.gguf"]), ("org/plain-GGUF:q8_0", ["m-Q8_0.gguf"]), ("org/one", ["model.gguf"]),
     ("org/folders", PARTS), ("org/folders:BF16", IN_FOLDERS[:2]), ("org/mixed:Q2_K", ["m-Q2_K.gguf"])],
)  # fmt: skip
def test_only_the_file_of_the_quant_is_downloaded(name, expected, options, found):
    assert found(name, **options) == (expected[0], expected)
    assert found(name, **options) == (expected[0], [])
    assert found(name, **options, local_files_only=True) == (expected[0], [])


def test_a_repository_of_both_kinds(found, hub, tmp_path):
    assert found("org/mixed") == (".", ["config.json", "model.safetensors", "tokenizer.json"])
    assert found("org/mixed:Q4_K_M") == ("m-Q4_K_M.gguf", ["m-Q4_K_M.gguf"])
    assert found("org/mixed", local_files_only=True) == (".", [])


def test_what_is_cached_is_not_taken_for_all_there_is(found):
    found("org/mixed:Q4_K_M")
    with pytest.raises(FileNotFoundError, match="has only a part.*model.safetensors"):
        found("org/mixed", local_files_only=True)
    found("org/plain-GGUF:Q8_0")
    with pytest.raises(FileNotFoundError, match="has only a part.*m-Q4_K_M.gguf"):
        found("org/plain-GGUF", local_files_only=True)


def test_a_quant_that_the_repository_lacks(found, hub):
    with pytest.raises(ValueError, match="org/several has several GGUF files.*ggml_model_q4_0.gguf"):
        found("org/several")
    with pytest.raises(FileNotFoundError, match="org/one has no GGUF file of 'Q9'; it has model.gguf"):
        found("org/one:Q9")
    with pytest.raises(FileNotFoundError, match="org/single has no GGUF file of 'Q9'"):
        found("org/single:Q9")
    assert not hub.downloads
    with pytest.raises(FileNotFoundError, match="'org/absent' is neither"):
        found("org/absent:Q4_K_M")
    for wrong in ("org/one:", ":Q4_K_M"):
        with pytest.raises(ValueError, match="org/name:Q4_K_M"):
            found(wrong)


def test_a_shard_that_is_cut(found, hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.cut_for_good[PARTS[2]] = 5
    with pytest.raises(FileNotFoundError, match=f"{PARTS[2]} of 'org/folders' ended after 5"):
        found("org/folders")
    with pytest.raises(FileNotFoundError, match="nor in the Hub's cache"):
        found("org/folders", local_files_only=True)
    hub.cut_for_good.clear()
    assert found("org/folders")[0] == PARTS[0]
    assert sorted(hub.downloads) == [PARTS[2]], "the other shards were whole"


def test_a_quant_chooses_in_a_directory(tmp_path, hub, monkeypatch):
    for name in (*PLAIN, "sub/m-Q3_K_M.gguf"):
        (tmp_path / "org/m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "org/m" / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    for where in ("org/m", str(tmp_path / "org/m")):
        assert find_checkpoint(f"{where}:q8_0").read_text() == "m-Q8_0.gguf"
        assert find_checkpoint(f"{where}:Q3_K_M").read_text() == "sub/m-Q3_K_M.gguf"
    with pytest.raises(FileNotFoundError, match="no GGUF file of 'Q9'"):
        find_checkpoint("org/m:Q9")
    with pytest.raises(ValueError, match="several GGUF files.*:QUANT"):
        find_checkpoint("org/m")
    with pytest.raises(ValueError, match="is a single file; leave out ':Q8_0'"):
        find_checkpoint("org/m/m-Q8_0.gguf:Q8_0")
    (tmp_path / "a:Q4_K_M").mkdir()
    assert find_checkpoint("a:Q4_K_M").name == "a:Q4_K_M"
    for other in ("https://huggingface.co/org/m", "C:\\models\\m"):
        with pytest.raises(FileNotFoundError, match="there is no directory"):
            find_checkpoint(other)
    assert hub.requests == 0


def test_pictures_beside_a_gguf_file_are_not_a_second_model(tmp_path):
    (tmp_path / "m.gguf").touch()
    (tmp_path / "mmproj-m-f16.gguf").touch()
    assert find_checkpoint(tmp_path) == tmp_path / "m.gguf"
