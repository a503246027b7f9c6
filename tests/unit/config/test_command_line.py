"""The command line: what it prints, what it imports, and how errors end."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.cli import main
from flows.commands.config import key_table
from skyrl_core.config import config_from_yaml, load_config
from skyrl_core.errors import ConfigurationError, RolloutError


def run_with(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    monkeypatch.setitem(sys.modules, "flows.commands.ui", SimpleNamespace(run=run))


@pytest.mark.parametrize("command", ["train", "evaluate", "config"])
def test_a_mistyped_key_is_answered_before_anything_heavy_is_imported(command: str) -> None:
    program = f"""
import json, sys
from flows.cli import main
code = main([{command!r}, "trainer.epohcs=2"])
heavy = ("torch", "ray", "prefect", "transformers", "vllm", "datasets", "wandb")
print(json.dumps([code, [name for name in heavy if name in sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    code, imported = json.loads(done.stdout)
    assert code == 2
    assert imported == []
    assert done.stderr == "error: unknown key trainer.epohcs; did you mean trainer.epochs? (word trainer.epohcs=2)\n"


def test_config_prints_the_resolved_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  epochs: 3\n", encoding="utf-8")
    assert main(["config", "trainer.seed=7", "--config", str(file), "generator.max_turns=1"]) == 0
    printed = config_from_yaml(capsys.readouterr().out)
    assert printed == load_config(file, ["trainer.seed=7"])
    assert (printed.trainer.epochs, printed.trainer.seed) == (3, 7)


def test_the_table_of_keys_has_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--help-keys", "trainer.placement.device"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("trainer.placement: device")
    for part in ("auto | cuda | cpu", "what a rank runs on", "(not in SkyRL)"):
        assert part in text


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_table_of_all_keys_keeps_to_the_terminal(width: int) -> None:
    from skyrl_core.config import list_keys

    lines = list(key_table("", width))
    named = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {key.path.rpartition(".")[2] for key in list_keys()} <= named
    # Single words (defaults, names) are never cut, so a few lines may be longer; descriptions never are.
    assert sum(len(line) > width for line in lines) < len(lines) / 20


def test_an_unknown_prefix_is_answered_with_the_nearest_section() -> None:
    with pytest.raises(
        ConfigurationError, match=r"no key begins with trainer\.algoritm; did you mean trainer\.algorithm\?"
    ):
        list(key_table("trainer.algoritm", 100))


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigurationError("bad key"), 2, "error: bad key\n"),
        (RolloutError("no engine"), 1, "error: no engine\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ValueError("odd"), 1, "error: unexpected ValueError: odd; run again with --debug to see where\n"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    def run(args: object) -> int:
        raise error

    run_with(monkeypatch, run)
    assert main(["ui"]) == code
    assert capsys.readouterr().err == message


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: object) -> int:
        raise RolloutError("no engine")

    run_with(monkeypatch, run)
    assert main(["ui", "--debug"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.endswith("error: no engine\n")


def test_a_command_gets_its_words_and_its_code_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SimpleNamespace] = []

    def run(args: SimpleNamespace) -> int:
        seen.append(args)
        return 7

    monkeypatch.setitem(sys.modules, "flows.commands.evaluate", SimpleNamespace(run=run))
    assert main(["evaluate", "a.b=1", "--checkpoint", "dir", "c=2", "--config", "f.yaml"]) == 7
    assert vars(seen[0]) == {
        "config": "f.yaml",
        "overrides": ["a.b=1", "c=2"],
        "checkpoint": "dir",
        "model": None,
        "debug": False,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--confg", "x"], "--confg"),
        (["ui", "--port", "70000"], "'70000' is not a port"),
        (["prepare"], "what"),
        (["prepare", "chess"], "invalid choice: 'chess'"),
    ],
)
def test_words_that_no_command_takes_end_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    program = "import sys; from flows.cli import main; sys.exit(main(['config', '--help-keys']))"
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == b""
    assert writer.wait(timeout=60) == 141
