"""One grammar for the seeds of every command."""

import pytest
import typer

from sfumato.cli import options
from sfumato.cli.app import app
from sfumato.errors import InputError
from tests.cli.test_cli import refused

COMMANDS = {
    "train": ["demo/digits"],
    "simulate": ["demo/digits", "--batch-size", 8],
    "search": ["demo/digits", "--trials", 2],
    "sweep": ["demo/digits", "--grid", "ema.decay=0.5"],
    "figures run": ["de2022/figure-2"],
}


def commands_with(option, group, *path):
    for name, command in getattr(group, "commands", {}).items():
        yield from commands_with(option, command, *path, name)
    for parameter in group.params:
        if parameter.name == option:
            yield " ".join(path), parameter.help


def test_every_option_for_seeds_takes_the_same_words_and_explains_them(capsys):
    found = dict(commands_with("seeds", typer.main.get_command(app)))
    assert set(found) == set(COMMANDS)
    for name, told in found.items():
        assert "0-4" in told and "public" in told, name
        assert "each seed once" in refused(capsys, *name.split(), *COMMANDS[name], "--seeds", "1-0")


def test_seeds_are_numbers_and_ranges_and_nothing_else():
    for text, seeds in {"3": [3], "0,1,2": [0, 1, 2], "7,0-1": [7, 0, 1], "0..2": [0, 1, 2]}.items():
        assert options.parse_seeds(text) == seeds
    for text in ("", "-1", "0-", "1-0", "1,1", "0-3,2", "0-999999999999", "a", "0-1-2", "1.5", "0, 1"):
        with pytest.raises(InputError, match="^--seeds takes .*$"):
            options.parse_seeds(text)


def test_a_number_alone_is_how_many_runs_a_cell_has_and_a_range_makes_them_paired():
    assert options.runs_of_a_cell(None, False) == (None, False)
    assert [options.runs_of_a_cell("5", paired) for paired in (False, True)] == [(5, False), (5, True)]
    assert options.runs_of_a_cell("0-4", False) == (5, True)
    with pytest.raises(InputError, match="begin at 0"):
        options.runs_of_a_cell("1-4", False)
