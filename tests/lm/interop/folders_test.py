"""The small files of a Hugging Face folder: what is read of them, and what is refused."""

import json
import re

import pytest

from fp8jax.lm.interop.folders import (
    HUGGING_FACE,
    copy_small_files,
    end_ids,
    keep_small_files,
    shape_of_model,
)


def test_a_workdir_named_as_a_folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"model": "llama_tiny"}))
    with pytest.raises(ValueError, match="hf:.* is a workdir, .*: name it without hf:$"):
        shape_of_model(f"hf:{tmp_path}", {})


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ({}, []),
        ({"eos_token_id": None}, []),
        ({"eos_token_id": 0}, [0]),
        ({"eos_token_id": [2, 9]}, [2, 9]),
    ],
)
def test_ids_that_end_a_text(content, ids, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert end_ids(tmp_path, 10) == ids
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert end_ids(tmp_path, 10) == ids
    (tmp_path / "generation_config.json").unlink()
    assert end_ids(tmp_path, 10) == [7]


@pytest.mark.parametrize("given", [1.5, [[1]], 10, -1, True, [2, "a", None], {"a": 1}, 10**14])
def test_other_ids_are_refused_with_file_and_key(given, tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": given}))
    expected = f"{path}: eos_token_id must be ids of tokens, from 0 to 9, got {given!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        end_ids(tmp_path, 10)


@pytest.mark.parametrize("own", [True, False])
def test_ids_of_tokens_are_kept_with_their_tokenizer(own, tmp_path):
    """Those of another tokenizer would end texts at any word."""
    folder, other = tmp_path / "hf", tmp_path / "other.json"
    folder.mkdir()
    shape = {"hidden_size": 64, "bos_token_id": 1, "eos_token_id": [101, 32], "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [101, 32]}))
    (folder / "tokenizer.json").write_text("{}")
    other.write_text("{}" if own else "{ }")
    keep_small_files({"model": f"hf:{folder}", "tokenizer": f"bpe:{other}"}, tmp_path / "run")
    kept = tmp_path / "run" / HUGGING_FACE
    config = json.loads((kept / "config.json").read_text())
    nulls = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    assert config == (shape if own else shape | nulls)
    assert end_ids(kept, 258) == ([101, 32] if own else [])


def test_further_templates_go_where_the_tokenizer_goes(tmp_path):
    folder, inside = tmp_path / "hf", "additional_chat_templates/tool_use.jinja"
    (folder / inside).parent.mkdir(parents=True)
    (folder / inside).write_text("{{ tools }}")
    (folder / "tokenizer.json").write_text("{}")
    keep_small_files(
        {"model": "own", "tokenizer": f"bpe:{folder}/tokenizer.json"}, tmp_path / "run"
    )
    kept = tmp_path / "run" / HUGGING_FACE
    copy_small_files(kept, tmp_path / "exported", with_tokenizer=True)
    copy_small_files(kept, tmp_path / "without", with_tokenizer=False)
    for target in (kept, tmp_path / "exported"):
        assert (target / inside).read_text() == "{{ tools }}"
    assert not (tmp_path / "without" / inside).exists()
