"""The recipes de2022/* against tables.toml, an independent transcription of De et al. 2022, Tables 12 to 21."""

import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sfumato import config, recipes
from sfumato.accounting.formats import epsilon_text
from sfumato.accounting.rdp import epsilon_rdp
from sfumato.cli.recipes import verified
from sfumato.config import ResolvedRecipe
from sfumato.data.catalogue import NAMED, public_facts
from sfumato.models.resnets import WideResNet
from sfumato.planning.resolve import resolve
from sfumato.recipes import read_heading
from tests.accounting.tables import ROWS
from tests.cli.test_cli import json_of, refused, settings

PRINTED = tomllib.loads((Path(__file__).parent / "tables.toml").read_text(encoding="utf-8"))
COUNTS = {12: 6, 13: 6, 14: 1, 15: 4, 16: 4, 17: 4, 18: 4, 19: 7, 20: 5, 21: 4}
NETWORKS: dict[str, tuple[str, dict[str, int]]] = {
    "WRN-16-4": ("wide_resnet", {"depth": 16, "width": 4}),
    "WRN-40-4": ("wide_resnet", {"depth": 40, "width": 4}),
    "WRN-28-10": ("wide_resnet", {"depth": 28, "width": 10}),
    "NF-ResNet-50": ("nf_resnet50", {}),
    "NF-ResNet-200": ("nf_resnet200", {}),
}
# JFT-300M is not public; what stands in for it must not be what is private.
STAND_INS = {"ImageNet": "Places-365, standing in for JFT-300M", "Places-365": "ImageNet, standing in for JFT-300M"}


class Column(NamedTuple):
    """One column: the values of its table that hold for all, and its own."""

    table: dict[str, Any]
    place: int

    @property
    def name(self) -> str:
        return f"de2022/{self.table['recipes'][self.place]}"

    def __getitem__(self, key: Any) -> Any:
        return float(value) if (value := self.table[key][self.place]) == "inf" else value

    @property
    def dataset(self) -> dict[str, Any]:
        return PRINTED["dataset"][self.table["dataset"]]

    @property
    def private(self) -> bool:
        return self["epsilon"] != float("inf")

    @property
    def layers(self) -> str:
        return self["fine_tuning"] if "fine_tuning" in self.table else self.table.get("layers", "all")

    def __str__(self) -> str:
        return self.name.removeprefix("de2022/")


COLUMNS = [Column(table, place) for table in PRINTED["table"] for place in range(len(table["recipes"]))]
PRIVATE = [column for column in COLUMNS if column.private]


def of_each(columns):
    """One case: the test holds for all of these columns."""

    def decorate(test):
        def of_all():
            for column in columns:
                test(column)

        return of_all

    return decorate


def text_of(name: str) -> str:
    return recipes.find(name).read_text(encoding="utf-8")


def read(name: str) -> config.Recipe:
    return config.parse(config.read(recipes.find(name)))


def resolved(column: Column) -> ResolvedRecipe:
    recipe = read(column.name)
    facts = public_facts(recipe.data)
    assert facts is not None
    return resolve(recipe, facts, cut_to_target=False).recipe


def test_every_one_of_the_45_columns_has_a_recipe_of_its_own():
    assert {table["number"]: len(table["recipes"]) for table in PRINTED["table"]} == COUNTS
    assert len(COLUMNS) == 45 and len({column.name for column in COLUMNS}) == 45
    assert {column.name for column in COLUMNS} <= set(recipes.names())
    for column in COLUMNS:  # each names its place
        number, several = column.table["number"], len(column.table["recipes"]) > 1
        place = f", column {column.place + 1}" if several else ""
        assert re.match(rf"# De et al\. 2022, Table {number}{place}( \(Figure 1b\))?: ", text_of(column.name))
    # No list of the transcription is longer or shorter than its table.
    for table in PRINTED["table"]:
        assert {len(values) for values in table.values() if isinstance(values, list)} == {len(table["recipes"])}


def test_the_transcription_agrees_with_the_accountant_s_own():
    keys = ("epsilon", "batch_size", "noise_multiplier", "num_updates", "delta")
    mine = [
        (column.table["number"], column.dataset["num_examples"], *map(column.__getitem__, keys)) for column in PRIVATE
    ]
    assert mine == [(row.table, row.num_examples, row.nominal_epsilon, *row[3:]) for row in ROWS]


@of_each(COLUMNS)
def test_a_recipe_holds_every_printed_value(column):
    recipe, name = resolved(column), NETWORKS[column.table["network"]]
    assert (recipe.model.name, {key: recipe.model.options[key] for key in name[1]}) == name
    if recipe.model.name == "wide_resnet":
        groups = inspect.signature(WideResNet).parameters["groups"].default
        assert recipe.model.options.get("groups", groups) == PRINTED["common"]["groups"]
    assert recipe.model.options.get("skip_init") == column.table.get("skip_init")  # of weights, where there are some
    assert recipe.model.trainable == {"all": "all", "last": "classifier"}[column.layers]
    assert recipe.model.features == "raw"  # the network's own, which the paper does not scale
    facts = public_facts(recipe.data)
    assert facts is not None
    assert (recipe.data.name, facts.num_examples) == (column.dataset["name"], column.dataset["num_examples"])
    assert NAMED[recipe.data.name].num_test == column.dataset["num_test"]
    assert recipe.data.held_out == "test" or (recipe.data.held_out is None and recipe.data.split == "train+valid")
    assert facts.image_size == column.dataset["image_size"]["pretrained_on" in column.table]
    assert recipe.augmentation.augmult == column["augmult"]
    assert recipe.training.batch_size == column["batch_size"]
    assert recipe.training.num_steps == column["num_updates"]
    assert recipe.optimizer.learning_rate == column["learning_rate"]
    assert recipe.ema.decays == [column.dataset["ema_decay"]]
    optimizer, common = recipe.optimizer, PRINTED["common"]
    assert (optimizer.name, optimizer.warmup_steps) == ("sgd", 0)
    assert all(getattr(optimizer, key) == common[key] for key in ("momentum", "weight_decay", "schedule"))
    smoothing = recipe.training.label_smoothing
    assert 1 - smoothing + smoothing / facts.num_classes == pytest.approx(column.table.get("true_label", 1), abs=1e-12)
    views, small = PRINTED["views"], column.dataset["image_size"] == [32, 32]  # Appendix C.2
    assert recipe.augmentation.kind == ("crop_flip" if column["augmult"] else "none")
    assert small or recipe.data.image_size == column.dataset["image_size"]["pretrained_on" in column.table]
    assert not small or recipe.augmentation.padding == views["padding"]
    # Where nothing is cropped, images are not made larger first.
    assert recipe.data.resize_ratio == (views["resize_ratio"] if column["augmult"] and not small else 1)
    if column.private:
        assert recipe.privacy is not None
        for key in ("delta", "clipping_norm", "noise_multiplier"):
            assert getattr(recipe.privacy, key) == column[key]
        assert (recipe.privacy.target_epsilon, recipe.privacy.sampling) == (column["epsilon"], "poisson")
    else:  # infinite epsilon and clipping norm, delta 1, no noise
        assert recipe.privacy is None and optimizer.max_grad_norm is None
        assert (column["delta"], column["clipping_norm"], column["noise_multiplier"]) == (1, float("inf"), 0)


@of_each(COLUMNS)
def test_a_comment_states_the_printed_accuracy(column):
    heading, text = read_heading(text_of(column.name)), text_of(column.name)
    if column["accuracy"] == "-":
        assert heading["paper"] is heading["paper_accuracy"] is None
        return
    assert heading["paper"].startswith(f"{column['accuracy']} %")
    assert heading["paper_accuracy"] == pytest.approx(float(column["accuracy"]) / 100)
    if "std" in column.table:
        assert f"median of 5, std {column['std']}," in heading["paper"]
    else:
        assert "one seed" in heading["paper"]  # Sections 3.3, 4.2 and 4.3
    for key in ("top5",) if column.table.get("top5", ["-"] * 9)[column.place] != "-" else ():
        assert f"top-5 {column[key]} %" in text


@of_each(PRIVATE)
def test_a_comment_states_what_the_numbers_spend_and_how_far_that_is_from_nominal(column):
    count = column.dataset["num_examples"]
    numbers, delta = (column["noise_multiplier"], column["num_updates"]), column["delta"]
    spent, nominal = epsilon_rdp([(column["batch_size"] / count, *numbers)], delta), column["epsilon"]
    text = " ".join(line.lstrip("# ") for line in text_of(column.name).splitlines())
    assert f"Epsilon {nominal:g} is printed; by RDP these numbers spend {epsilon_text(spent)} at N = {count:,}" in text
    assert ("% over: sigma is printed with one decimal" in text) == (spent > 1.001 * nominal)
    assert ("% under: they fit the N = 45,000 of tuning" in text) == (spent < 0.95 * nominal)
    if spent < 0.95 * nominal:
        tuned = epsilon_rdp([(column["batch_size"] / 45_000, *numbers)], delta)
        assert f"where they spend {epsilon_text(tuned)};" in text and 0.97 * nominal < tuned <= nominal


@of_each([column for column in COLUMNS if "pretrained_on" in column.table])
def test_a_fine_tuning_names_the_images_and_the_recipe_of_its_weights(column):
    model, images = read(column.name).model, column.table["pretrained_on"]
    assert model.init_from is None and model.init_recipe in recipes.names()
    source = read(model.init_recipe)
    assert model.pretrained_on == (STAND_INS[column.table["dataset"]] if images == "JFT-300M" else images)
    assert source.privacy is None and source.data.name != column.dataset["name"]
    assert source.data.name == {
        "ImageNet-32": "imagenet32",
        "CIFAR-100": "cifar100",
        STAND_INS["ImageNet"]: "places365",
        STAND_INS["Places-365"]: "imagenet",
    }.get(model.pretrained_on)
    assert source.model.name == model.name
    shape = ("depth", "width", "order")
    assert [source.model.options.get(key) for key in shape] == [model.options.get(key) for key in shape]
    assert f"sfumato train {model.init_recipe} --non-private" in text_of(column.name)


def test_every_order_of_activation_and_norm_is_stated():
    for name in recipes.names():
        if read(name).model.name == "wide_resnet":
            assert "order" in read(name).model.options, name


def test_where_the_number_of_updates_is_not_stated_it_is_the_most_that_rdp_allows():
    of_imagenet = [
        f"imagenet-nf-resnet{depth}-jft-{layers}-figure-4" for depth in (50, 200) for layers in ("last", "all")
    ]
    views = ("no-views", "1-view", "16-views")
    of_cifar = [f"cifar10-wrn-{depth}-4-figure-9-{each}" for depth in (16, 40) for each in views]
    for name in ["imagenet-nf-resnet50-jft-last-eps-8", *of_imagenet, *of_cifar]:
        recipe, (epsilon, count) = read(f"de2022/{name}"), (64, 45_000) if name in of_cifar else (8, 1_271_167)
        privacy, training, facts = recipe.privacy, recipe.training, public_facts(recipe.data)
        assert facts is not None and privacy is not None
        assert (facts.num_examples, privacy.target_epsilon) == (count, epsilon)
        q, sigma = training.batch_size / count, privacy.noise_multiplier
        spent = [epsilon_rdp([(q, sigma, round(f * training.num_steps))], privacy.delta) for f in (1, 1.001)]
        assert spent[0] <= epsilon < spent[1], name


def test_table_9_takes_table_15_s_numbers_on_another_network():
    for epsilon in (1, 2, 4, 8):
        mine = read(f"de2022/cifar10-wrn-40-4-imagenet32-all-eps-{epsilon}")
        theirs = read(f"de2022/cifar10-wrn-28-10-imagenet32-all-eps-{epsilon}")
        assert (mine.model.options["depth"], mine.model.options["width"]) == (40, 4)
        assert mine.model_copy(update={"model": theirs.model}) == theirs


def test_a_fine_tuning_without_weights_is_refused_in_one_line_that_says_what_makes_them(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, "train", "de2022/cifar10-wrn-28-10-imagenet32-last-eps-8", "--data-root", tmp_path)
    assert not list(tmp_path.iterdir())
    assert "--set model.init_from=" in err and "de2022/pretrain-imagenet32-wrn-28-10 --non-private" in err


def test_a_pre_training_and_the_fine_tuning_that_names_it_run_one_after_the_other(capsys, tmp_path):
    name = "de2022/cifar10-wrn-40-4-cifar100-eps-1"
    small = {"data.name": "digits", "model.options.depth": 10, "model.options.width": 1, "training.num_steps": 2}
    words = settings(small | {"training.batch_size": 8})
    first = [read(name).model.init_recipe, "--non-private", *words, "--set", "optimizer.milestones=[1]"]
    json_of(capsys, "train", *first, "--output", tmp_path / "pretrain")
    second = ["train", name, *words, "--set", "augmentation.augmult=2", "--output", tmp_path / "tune"]
    refused(capsys, *second)  # no weights yet
    assert json_of(capsys, *second, "--set", f"model.init_from={tmp_path / 'pretrain'}")["private"]
    certificate = json.loads((tmp_path / "tune/privacy.json").read_text())
    assert "pre-training data: CIFAR-100" in certificate["not_covered"]
    assert config.read(tmp_path / "tune/recipe.toml")["model"]["init_sha256"]


def test_a_plan_says_that_weights_are_missing(capsys):
    recipe = read("de2022/cifar10-wrn-28-10-imagenet32-last-eps-8")
    facts = public_facts(recipe.data)
    assert facts is not None
    warnings = resolve(recipe, facts, cut_to_target=False).warnings
    assert "de2022/pretrain-imagenet32-wrn-28-10" in warnings[0]
    given = recipe.model.model_copy(update={"init_from": "weights.safetensors"})
    assert resolve(recipe.model_copy(update={"model": given}), facts, cut_to_target=False).warnings == warnings[1:]


def test_the_printed_noise_can_be_solved_for_anew_by_pld(capsys):
    shown = json_of(capsys, "recipes", "show", "de2022/cifar10-wrn-16-4-eps-2", "--calibrate", "pld")
    assert shown["printed_noise_multiplier"] == 6.0 and shown["recipe"]["privacy"]["noise_multiplier"] == 6.0
    assert 0.92 < shown["noise_multiplier"] / 6.0 < 0.95  # the same epsilon for less noise


def test_training_takes_the_least_noise_by_the_accountant_that_calibrates_it(capsys):
    words = ["train", "demo/digits", "--set", "privacy.noise_multiplier=50", "--dry-run", "--calibrate"]
    by_pld, by_rdp = (json_of(capsys, *words, accountant) for accountant in ("pld", "rdp"))
    assert all(0.999 * 3 < found["epsilon"] <= 3 for found in (by_pld, by_rdp))
    assert by_pld["noise_multiplier"] < by_rdp["noise_multiplier"] < 50


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipes", "show", "demo/digits", "--calibrate", "pld"], "demo/digits prints no noise multiplier"),
        (["recipes", "show", "de2022/pretrain-cifar100-wrn-40-4", "--calibrate", "pld"], "has no target epsilon"),
        (["train", "image-folder", "--calibrate", "pld", "--epsilon", "3"], "training.batch_size"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_one_line(words, says, capsys):
    assert says in refused(capsys, *words)


# Appendix C.3
PRETRAININGS = {
    "pretrain-imagenet32-wrn-28-10": ("imagenet32", 1_271_167, 0.3, 5e-5, 1024, 240_000),
    "pretrain-imagenet32-wrn-40-4": ("imagenet32", 1_271_167, 0.3, 5e-5, 1024, 240_000),
    "pretrain-cifar100-wrn-40-4": ("cifar100", 50_000, 0.1, 5e-4, 128, 100_000),
    "pretrain-imagenet-for-jft-nf-resnet50": ("imagenet", 1_271_167, 0.4, 1e-6, 1024, 10 * 1_271_167 // 1024 + 1),
}


def test_a_pre_training_holds_the_paper_s_numbers_and_claims_no_privacy():
    for name, numbers in PRETRAININGS.items():
        recipe = read(f"de2022/{name}")
        optimizer, training, facts = recipe.optimizer, recipe.training, public_facts(recipe.data)
        found = (recipe.data.name, facts.num_examples, optimizer.learning_rate, optimizer.weight_decay)
        assert (*found, training.batch_size, training.num_steps) == numbers, name
        assert (optimizer.momentum, training.label_smoothing, recipe.privacy) == (0.9, 0.0, None)
        assert (recipe.augmentation.kind, recipe.augmentation.augmult) == ("crop_flip", 1)
        assert not resolve(recipe, facts).private and verified(f"de2022/{name}")["status"] == "not private"


def test_the_rates_of_cifar_100_fall_at_the_printed_iterations():
    optimizer = read("de2022/pretrain-cifar100-wrn-40-4").optimizer
    assert (optimizer.schedule, optimizer.milestones, optimizer.gamma) == ("step", [50_000, 75_000], 0.1)
