"""Files beside JAX's compiled programs: read as written, or made again with a warning."""

import jax
import pytest

from fp8jax.device import cache_files


@pytest.fixture
def folder(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    yield tmp_path / "xla"
    jax.config.update("jax_compilation_cache_dir", before)


def test_what_was_written_is_read(folder):
    assert cache_files.read("name") is None
    for content in (b"one", b"", bytes(range(256))):
        cache_files.write("name", content)
        assert cache_files.read("name") == content
    assert [file.name for file in folder.iterdir()] == ["name"]  # no drafts
    (folder / "theirs").write_bytes(b"")  # as JAX writes its own
    assert (folder / "name").stat().st_mode == (folder / "theirs").stat().st_mode


def test_a_damaged_file_is_as_none(folder, caplog):
    cache_files.write("name", b"content")
    whole = (folder / "name").read_bytes()
    for damaged in (b"", whole[:-1], whole[:36], whole[:-1] + b"T", b"x" + whole[1:]):
        (folder / "name").write_bytes(damaged)
        caplog.clear()
        assert cache_files.read("name") is None
        assert "name is damaged" in caplog.text
    cache_files.write("name", b"again")
    assert cache_files.read("name") == b"again"


def test_a_folder_that_cannot_be_used_is_a_warning(folder, caplog):
    folder.write_text("a file")
    cache_files.write("name", b"content")
    assert "the next process makes it again" in caplog.text
    caplog.clear()
    assert cache_files.read("name") is None
    assert "it is made again" in caplog.text


@pytest.mark.parametrize(
    "without",
    [{"jax_compilation_cache_dir": None}, {"jax_compilation_cache_dir": "gs://bucket/xla"}],
    ids=["none", "object_store"],
)
def test_without_a_folder_of_this_host_there_are_no_files(folder, without):
    jax.config.update(*next(iter(without.items())))
    cache_files.write("name", b"content")
    assert cache_files.read("name") is None and not folder.exists()


def test_without_jaxs_cache_there_are_no_files(folder):
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        cache_files.write("name", b"content")
        assert cache_files.read("name") is None and not folder.exists()
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
