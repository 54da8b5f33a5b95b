"""Which cells a grid makes, and what may not be swept."""

import itertools
import math

import pytest

from sfumato.errors import InputError
from sfumato.studies.grid import cells_of, parse_grid, read_cells
from tests.cli.test_cli import refused

GRID = {"optimizer.learning_rate": [1.0, 2.0, 4.0], "ema.decay": [0.9, 0.99], "augmentation.kind": ["none", "flip"]}
LISTED = [{"privacy.clipping_norm": 1.0}, {"privacy.clipping_norm": 2.0, "training.batch_size": 64}]


@pytest.mark.parametrize("keys", [tuple(GRID), tuple(reversed(GRID))])
def test_a_grid_has_every_combination_once_and_its_first_key_moves_slowest(keys):
    grid = {key: GRID[key] for key in keys}
    cells = cells_of(grid)
    assert len(cells) == math.prod(len(values) for values in grid.values())
    assert {tuple(cell.items()) for cell in cells} == set(
        tuple(zip(keys, values, strict=True)) for values in itertools.product(*grid.values())
    )
    places = [[grid[key].index(cell[key]) for key in keys] for cell in cells]
    assert places == sorted(places)


def test_a_list_times_a_grid_has_every_pair_and_a_list_alone_is_itself():
    cells = cells_of(GRID, LISTED)
    assert len(cells) == len(LISTED) * len(cells_of(GRID))
    assert cells == [{**settings, **combined} for settings in LISTED for combined in cells_of(GRID)]
    assert cells_of({}, LISTED) == LISTED


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("optimizer.learning_rate=1.0,2.0", "optimizer.learning_rate", [1.0, 2.0]),
        ("augmentation.kind=none,crop_flip", "augmentation.kind", ["none", "crop_flip"]),
        ("ema.decay=[0.9, 0.99],0.5", "ema.decay", [[0.9, 0.99], 0.5]),
        ("model.options.weight_standardization=true,false", "model.options.weight_standardization", [True, False]),
    ],
)
def test_values_are_read_as_toml_or_as_text(text, key, values):
    assert parse_grid([text]) == {key: values}


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["optimizer.learning_rate"], "is not of the form"),
        (["optimizer.learning_rate="], "has no values"),
        (["augmentation.kind=none,,flip"], "empty value"),
        (["ema.decay=0.9", "ema.decay=0.99"], "ema.decay twice"),
    ],
)
def test_what_is_no_grid_is_refused(texts, says):
    with pytest.raises(InputError, match=says):
        parse_grid(texts)


@pytest.mark.parametrize(
    ("grid", "listed", "says"),
    [
        ({}, [], "needs settings to try"),
        ({"optimizer.learning_rat": [1.0]}, [], "optimizer.learning_rate"),
        ({"optimizer.learning_rate": []}, [], "no values"),
        ({"run.seed": [0, 1]}, [], "--seeds N"),
        ({"data.path": ["a", "b"]}, [], "--data-root"),
        ({"privacy.selected_from": [2, 4]}, [], "selected from others"),
        ({"training.checkpoint_every": [1, 2]}, [], "changes no result"),
        ({"ema.decay": [0.9, 0.9]}, [], "the same"),
        ({"ema.decay": [0.9, 0.99]}, [{"ema.decay": 0.5}], "in the grid and in the list"),
        ({"data.split": ["train", "test"]}, [], "data.split cannot be swept: cells would be compared on other images"),
        # Weights of one name in two places are no two cells.
        ({"model.init_from": ["/a/model.pth", "/b/model.pth"]}, [], "have one name"),
    ],
)
def test_a_key_that_cannot_be_swept_is_refused_by_name(grid, listed, says):
    with pytest.raises(InputError, match=says) as refusal:
        cells_of(grid, listed)
    assert "\n" not in str(refusal.value)


def test_a_file_of_cells_takes_keys_with_dots_and_as_tables(tmp_path):
    path = tmp_path / "cells.toml"
    path.write_text('[[cell]]\n"ema.decay" = 0.9\n[[cell]]\n[cell.ema]\ndecay = 0.5\n[cell.model.options]\nwidth = 8\n')
    assert read_cells(path) == [{"ema.decay": 0.9}, {"ema.decay": 0.5, "model.options.width": 8}]
    path.write_text("[ema]\ndecay = 0.9\n")
    with pytest.raises(InputError, match="no list of cells"):
        read_cells(path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--grid section.key=v1,v2"),
        (["--grid", "optimizer.learning_rate=1.0,fast"], "learning_rate=fast cannot be"),
        (["--grid", "ema.decay=0.5", "--set", "privacy.noise_multiplie="], "privacy.noise_multiplier"),
    ],
)
def test_a_wrong_sweep_is_refused_in_one_line_with_status_2(arguments, says, capsys, tmp_path):
    assert says in refused(capsys, "sweep", "demo/digits", *arguments, "--output", tmp_path / "sweep", "--json")
    assert not list(tmp_path.rglob("ledger.jsonl"))  # nothing has run
