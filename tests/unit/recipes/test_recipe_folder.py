"""A recipe's folder appears whole or not at all."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl_core.errors import ConfigurationError
from skyrl_core.recipes.folder import make_folder, read_manifest


def fill(partial: Path) -> Mapping[str, Any]:
    (partial / "model").mkdir()
    (partial / "model" / "weights").write_bytes(b"abc")
    return {"recipe": "test"}


def fail(partial: Path) -> Mapping[str, Any]:
    fill(partial)
    raise KeyboardInterrupt


def refuse(partial: Path) -> Mapping[str, Any]:
    raise AssertionError("must not be built")


def test_a_folder_is_made_once_with_sizes_and_checksums(tmp_path: Path) -> None:
    target = tmp_path / "data" / "x"
    manifest, made = make_folder(target, fill)
    assert made is True
    # SHA-256 of "abc", from FIPS 180-2.
    checksum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest == {"recipe": "test", "files": {"model/weights": {"size": 3, "sha256": checksum}}}
    assert make_folder(target, refuse) == (manifest, False)
    assert sorted(path.name for path in target.parent.iterdir()) == ["x"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_folder(tmp_path / "x", fail)
    assert list(tmp_path.iterdir()) == []
    assert make_folder(tmp_path / "x", fill)[1] is True


def test_a_killed_build_leaves_nothing_under_the_name_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from skyrl_core.recipes.folder import make_folder\n"
        "def die(partial):\n"
        "    (partial / 'weights').write_bytes(b'ab')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "make_folder(Path(sys.argv[1]), die)"
    )
    target = tmp_path / "x"
    assert subprocess.run([sys.executable, "-c", code, str(target)], check=False).returncode == -9
    assert not target.exists()
    assert len(list(tmp_path.iterdir())) == 1
    assert make_folder(target, fill)[1] is True
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from skyrl_core.recipes.folder import make_folder\n"
        "def build(partial):\n"
        "    (partial / 'weights').write_bytes(b'ab')\n"
        "    return {}\n"
        "print(make_folder(Path(sys.argv[1]), build)[1])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate()[0].strip() for process in started]
    assert sorted(printed) == ["False", "False", "True"]


def test_force_replaces_a_recipes_folder_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "x"
    make_folder(target, fill)
    (target / "model" / "weights").write_bytes(b"changed")
    assert make_folder(target, fill, force=True)[1] is True
    assert (target / "model" / "weights").read_bytes() == b"abc"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigurationError, match="mine exists and was not made by a recipe"):
        make_folder(mine, refuse, force=True)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_failing_replacement_leaves_the_old_folder(tmp_path: Path) -> None:
    make_folder(tmp_path / "x", fill)
    with pytest.raises(KeyboardInterrupt):
        make_folder(tmp_path / "x", fail, force=True)
    assert make_folder(tmp_path / "x", refuse)[1] is False


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert make_folder(tmp_path / "x", fill)[1] is True


def test_lost_or_changed_files_are_named(tmp_path: Path) -> None:
    target = tmp_path / "x"
    make_folder(target, fill)
    (target / "model" / "weights").write_bytes(b"ab")
    with pytest.raises(ConfigurationError, match=r"model/weights is missing or was changed: .*--force"):
        read_manifest(target)
    (target / "model" / "weights").unlink()
    with pytest.raises(ConfigurationError, match="is missing or was changed"):
        make_folder(target, refuse)
    (target / "recipe.json").write_text(json.dumps({"files": [1]}))
    with pytest.raises(ConfigurationError, match=r"recipe\.json cannot be read"):
        read_manifest(target)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigurationError, match="is a file where a folder is to be made"):
        make_folder(tmp_path / "x", refuse)
