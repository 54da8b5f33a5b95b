"""What may be given for a recipe, and what `sfumato recipes list` says of each: its source, what it reached, what is
missing here.
"""

import re

import pytest

from sfumato import config, recipes
from sfumato.data.catalogue import NAMED, missing
from sfumato.errors import InputError
from sfumato.recipes import OWN, read_heading
from tests.cli.test_cli import call, json_of


def listed(capsys, *words):
    return {row["name"]: row for row in json_of(capsys, "recipes", "list", *words)["recipes"]}


def test_recipes_of_one_table_stand_together_and_tables_in_the_order_of_their_numbers(capsys):
    lines = call(capsys, "recipes", "list")[1].splitlines()
    groups = [line.removesuffix(":") for line in lines if not line.startswith(" ")]
    assert len(groups) == len(set(groups)) and groups[-1] == OWN
    tables = [int(found[1]) for group in groups if (found := re.fullmatch(r"De et al\. 2022, Table (\d+)", group))]
    assert tables == [9, *range(12, 22)]
    names = [line.split()[0] for line in lines if line.startswith(" ")]
    assert sorted(names) == list(recipes.names())


def test_a_row_tells_the_paper_s_accuracy_and_ours(capsys):
    rows = listed(capsys)
    row = rows["de2022/cifar10-wrn-40-4-eps-8"]
    assert (row["paper_accuracy"], row["paper"]) == (0.814, "81.4 % (median of 5, std 0.2, Table 3)")
    assert (row["ours"], row["nominal_epsilon"], row["group"]) == (None, 8.0, "De et al. 2022, Table 13")
    row = rows["fashion-mnist-eps-1"]
    assert (row["paper_accuracy"], row["group"]) == (None, OWN) and row["ours"].startswith("86.1 %")


def test_what_is_not_here_is_named_until_it_is(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("SFUMATO_DATA", raising=False)
    name = "de2022/imagenet-nf-resnet50-jft-last-eps-8"
    makes = "de2022/pretrain-places365-for-jft-nf-resnet50"
    needs = ["the images of imagenet", f"weights of {makes} (which needs the images of places365)", "a GPU"]
    rows = listed(capsys)
    assert rows[name]["needs"] == needs and rows["demo/digits"]["needs"] == []
    assert rows["image-folder"]["needs"] == ["your images"]
    for folder in ("imagenet/train", "imagenet/val", "places365_standard/train"):
        (tmp_path / folder).mkdir(parents=True)
    assert listed(capsys, "--data-root", tmp_path)[name]["needs"] == needs[1:]
    (tmp_path / "places365_standard/val").mkdir()
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    assert listed(capsys)[name]["needs"] == [f"weights of {makes}", "a GPU"]


def test_a_set_of_files_is_missing_until_the_last_is_there(tmp_path):
    for name in (name for name, named in NAMED.items() if named.files):
        for relative in NAMED[name].files:
            path = tmp_path / name / relative
            assert missing(name, tmp_path / name) == str(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        assert missing(name, tmp_path / name) is None
        assert "SFUMATO_DATA" in str(missing(name, None))


def test_a_line_that_is_indented_goes_on_with_the_one_before():
    heading = read_heading(
        "# Sander et al. 2022, Tables 1 (ours) and 4: a network.\n"
        "# Paper: 39.2 %\n#   accuracy (one\n#   run), its best.\n"
        "# Ours: 40.0 % (one run).\n[data]\n# Paper: 99.9 % accuracy\n"
    )
    assert heading["source"] == "Sander et al. 2022, Tables 1 (ours) and 4: a network."
    assert heading["group"] == "Sander et al. 2022, Table 1"
    assert (heading["paper"], heading["paper_accuracy"]) == ("39.2 % (one run)", 0.392)
    assert heading["ours"] == "40.0 % (one run)"


def test_a_heading_is_whole_and_its_command_is_of_its_own_file():
    for name in recipes.names():
        text = recipes.find(name).read_text(encoding="utf-8")
        assert read_heading(text)["source"].endswith("."), name
        commands = re.findall(r"^# +sfumato train ([\w./-]+)", text, re.MULTILINE)
        assert commands[-1:] in ([], [name])  # others may make its weights before


def test_points_gained_are_no_accuracy():
    assert read_heading("# Sander et al. 2022, Table 6: x.\n# Paper: +1.3 points against half.\n")["paper"] is None


SETTINGS = {"privacy.target_epsilon": 1.5, "optimizer.learning_rate": 0.5}


def test_all_ways_of_giving_a_recipe_mean_the_same(tmp_path):
    shipped = recipes.recipe_of("demo/digits", {})
    path = tmp_path / "mine.toml"
    path.write_text(recipes.find("demo/digits").read_text())
    values = config.read(path)
    for given in (path, str(path), values, shipped):
        assert recipes.recipe_of(given, {}) == shipped
        changed = recipes.recipe_of(given, SETTINGS)
        assert changed.privacy.target_epsilon == 1.5 and changed.optimizer.learning_rate == 0.5
        assert changed.model == shipped.model
    assert values == config.read(path)  # the caller's own is left alone


@pytest.mark.parametrize(
    ("given", "settings", "says"),
    [
        ("demo/digit", {}, "Did you mean demo/digits"),
        ("demo/digits", {"optimizer.learning_rat": 1.0}, "learning_rate"),
        ("demo/digits", {"optimizer.learning_rate.more": 1.0}, "is a value, not a section"),
        ("demo/digits", {"privacy.target_epsilon": -1.0}, "target_epsilon"),
        ("missing.toml", {}, "missing.toml"),
    ],
)
def test_what_is_none_is_refused_by_name(given, settings, says):
    with pytest.raises(InputError, match=says):
        recipes.recipe_of(given, settings)
