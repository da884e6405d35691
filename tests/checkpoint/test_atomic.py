"""Files are written whole or not at all."""

from __future__ import annotations

import pytest

from blockgate.checkpoint.atomic import replace_whole, write_whole


def test_text_and_bytes_are_written_into_new_folders(tmp_path):
    write_whole(tmp_path / "a" / "b" / "text", "größer\n")
    assert (tmp_path / "a" / "b" / "text").read_bytes() == "größer\n".encode()
    write_whole(tmp_path / "a" / "b" / "text", b"\x00\xff")
    assert (tmp_path / "a" / "b" / "text").read_bytes() == b"\x00\xff"


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")

    def write_half():
        with replace_whole(file) as temporary:
            temporary.write_text("half")
            assert file.read_text() == "old"
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "old"


def test_folders_are_made_for_data_alone(tmp_path):
    """Whoever gives a path of their own is told that its folder is missing."""
    with pytest.raises(FileNotFoundError), replace_whole(tmp_path / "nowhere" / "file") as temporary:
        temporary.write_text("x")
