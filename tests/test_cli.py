"""The command line: usage, exit codes, and what it says when something is missing."""

import sys

import pytest

import propagauss
from propagauss import cli


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"propagauss {propagauss.__version__}"


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and command.help in " ".join(shown.split()) for name, command in cli.COMMANDS.items())


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["dmeo"], ["demo", "--sede", "1"], ["demo", "--seed", "x"], ["demo", "--seed", "-1"]]
)
def test_wrong_usage(arguments, capsys):
    assert cli.main(arguments) == 2
    assert "usage: propagauss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        (["sklearn"], "scikit-learn"),
        (["matplotlib"], "matplotlib"),
        (["sklearn", "matplotlib"], "scikit-learn and matplotlib"),
    ],
)
def test_missing_packages(absent, named, monkeypatch, capsys, tmp_path):
    for package in absent:
        monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["demo", "--quick", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said == f"propagauss: `demo` needs {named}: pip install propagauss[demo]\n"
    assert not (tmp_path / "out").exists()


def test_what_has_moved_says_where(capsys):
    assert cli.main(["reproduce", "uci", "--quick"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "python -m experiments" in said and "make reproduce NAME=uci" in said


def test_broken_package_is_not_called_missing(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'cython_thing'", name="cython_thing")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="cython_thing"):
        cli.main(["demo", "--quick"])


def test_output_that_cannot_be_written(tmp_path, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    file = tmp_path / "taken"
    file.write_text("not a folder")
    assert cli.main(["demo", "--quick", "--out", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(file) in said


def test_interrupt(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "demo", cli.Command("help", lambda parser: None, interrupt))
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "propagauss: interrupted\n"
