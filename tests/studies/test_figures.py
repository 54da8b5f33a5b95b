"""The papers' figures as files: all are there, are read strictly, and can be planned."""

import itertools

import pytest

from sfumato import config
from sfumato.errors import InputError
from sfumato.recipes import recipe_of
from sfumato.studies.figures import (
    best_cells,
    cost,
    cost_at_most,
    names,
    plan_figure,
    read_figure,
    settings_of,
    study_of,
    why_not_covered,
)
from sfumato.studies.grid import cells_of
from sfumato.studies.plan import SweepOptions, plan_sweep
from sfumato.studies.result import Cell, Sweep
from tests.cli.test_cli import call, json_of
from tests.studies.test_plan import summed_up

DE = [*("1a", "1b"), *range(2, 12)]
ALL = {
    *(f"de2022/figure-{name}" for name in DE),
    *(f"de2022/table-{number}" for number in range(1, 11)),
    *(f"sander2022/figure-{number}" for number in range(1, 8)),
    *(f"sander2022/table-{number}" for number in range(1, 7)),
}
DEAR = {*(f"de2022/figure-{name}" for name in ("1a", 2, 4, 5, 7)), *(f"de2022/table-{number}" for number in (3, 6, 10))}


def test_every_figure_and_table_has_a_file():
    assert set(names()) == ALL


def test_every_file_is_a_figure_that_a_sweep_or_a_command_answers():
    papers = {"de2022": "De et al. 2022", "sander2022": "Sander et al. 2022"}
    for name, figure in ((name, read_figure(name)) for name in ALL):
        assert figure.source.partition(",")[0] == papers[name.partition("/")[0]]
        assert (figure.full is None) == (figure.instead is not None)
        for study in (each for each in (figure.full, figure.small) if each is not None):
            assert study.axes or study.labels or not study.grid or study.tuned
            assert not study.labels or (set(study.grid) <= set(study.tuned) and len(study.labels) == len(study.cells))


@pytest.mark.parametrize("asked", [ALL - DEAR, pytest.param(DEAR, marks=pytest.mark.slow)], ids=["quick", "dear"])
@pytest.mark.parametrize("scale", ["full", "small"])
def test_figures_can_be_planned_without_their_images(scale, asked):
    for name in sorted(asked):
        study = getattr(read_figure(name), scale)
        if study is not None:
            found = plan_figure(study)
            assert cost(found.plans).runs == len(found.runs) > 0
            # Minutes on two cores.
            assert scale == "full" or cost_at_most(study, found).view_gradients < 4_000_000, name


SAME = {
    "de2022/figure-5": {
        number: f"de2022/imagenet-nf-resnet200-jft-last-eps-{epsilon}"
        for number, epsilon in enumerate(["0.5", "1", "2", "4", "8"])
    },
    "de2022/figure-4": {
        number: f"de2022/imagenet-nf-resnet{depth}-jft-{part}-figure-4"
        for number, (depth, part) in zip((0, 1, 6, 7), itertools.product((50, 200), ("last", "all")), strict=True)
    },
    "de2022/table-6": dict(enumerate(f"de2022/places365-nf-resnet50-jft-{part}-eps-8" for part in ("last", "all"))),
    "de2022/table-5": {
        number: f"de2022/{name}-wrn-28-10-imagenet32-{part}-eps-{epsilon}"
        for number, (name, part, epsilon) in enumerate(
            itertools.product(("cifar10", "cifar100"), ("last", "all"), (1, 2, 4, 8))
        )
    },
    "sander2022/table-1": {0: "sander2022/imagenet-baseline", 1: "sander2022/imagenet-tuned-18k"},
    "sander2022/figure-1": {4: "sander2022/imagenet-baseline", 9: "sander2022/imagenet-tuned-72k"},
    "sander2022/table-6": {2: "sander2022/imagenet-table-6-half", 3: "sander2022/imagenet-table-6-whole"},
}
OF_WEIGHTS = {"init_from", "init_recipe", "init_sha256"}


@pytest.mark.parametrize("name", SAME)
def test_a_figure_s_cell_that_a_recipe_states_is_that_recipe(name):
    """But for where weights lie, and what a figure sets for all: its seeds, and no target beside stated noise."""
    study = read_figure(name).full
    cells = cells_of(study.grid, [config.dotted(cell) for cell in study.cells])
    for number, recipe in SAME[name].items():
        found = recipe_of(study.recipe, {**settings_of(study), **cells[number]}).model_dump()
        stated = recipe_of(recipe, {}).model_dump()
        for each in (found, stated):
            each["augmentation"]["padding"] = each["augmentation"]["padding"] or 4  # the default
        for section in ("data", "model", "augmentation", "privacy", "optimizer", "ema", "training"):
            differ = {key for key in stated[section] if found[section][key] != stated[section][key]}
            unset = {key.partition(".")[2] for key in study.unset if key.startswith(section)}
            assert differ <= unset | (OF_WEIGHTS if section == "model" else set()), (number, section, differ)


def test_figure_9_takes_one_run_for_each_depth_and_number_of_views():
    figure = read_figure("de2022/figure-9")
    assert cost(plan_figure(figure.full).plans).runs == 5 * 3
    assert {run.seed for run in plan_figure(figure.small, paired=True).runs} == set(range(5))


def test_an_unknown_figure_or_size_is_refused_by_name():
    with pytest.raises(InputError, match="Did you mean de2022/figure-3"):
        read_figure("de2022/figur-3")
    with pytest.raises(InputError, match="sfumato plan"):
        study_of("sander2022/figure-2", read_figure("sander2022/figure-2"), "small")
    with pytest.raises(InputError, match="--scale full"):
        study_of("de2022/table-4", read_figure("de2022/table-4"), "small")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('source = "a"\ncaption = "b"\nnot_statd = []', "not_statd is no key of a figure. Did you mean not_stated"),
        ('source = "a"\ncaption = "b"\n[small]\nrecipe = "demo/digits"\nseeds = 1\ntune = []', "Did you mean tuned"),
        ('source = "a"', "caption"),
        ('source = "a"\ncaption = "b"\n[small]\nrecipe = "demo/digits"\nseeds = "2"', "small.seeds"),
    ],
)
def test_a_file_that_is_no_figure_is_refused_in_one_line(tmp_path, text, says):
    path = tmp_path / "figure.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as refusal:
        read_figure(str(path))
    assert "\n" not in str(refusal.value)


def test_the_best_of_tuned_keys_is_the_one_with_the_highest_mean_for_each_setting_of_the_others(tmp_path):
    grid = {"training.batch_size": [32, 64], "optimizer.learning_rate": [1.0, 2.0, 4.0]}
    settings = {"training.num_steps": 3, "privacy.noise_multiplier": 2.0}
    sweep = plan_sweep(SweepOptions("demo/digits", grid, settings=settings, paired=True, report=lambda line: None))
    means = dict(zip([run.name for run in sweep.runs], [0.1, 0.3, 0.2, 0.6, 0.5, 0.4], strict=True))
    found = summed_up(sweep, tmp_path, means)
    best = best_cells(found, ["optimizer.learning_rate"])
    assert [tuple(cell.settings.values()) for cell in best] == [(32, 2.0), (64, 1.0)]


def test_a_choice_that_decides_the_mechanism_is_covered_by_no_epsilon():
    def tuning(*cells):
        facts = ("batch_size", "noise_multiplier", "num_steps", "shares_runs")
        made = [
            Cell.model_construct(settings=settings, **dict(zip(facts, numbers, strict=True)))
            for settings, numbers in cells
        ]
        return Sweep.model_construct(cells=made)

    rate, batch = "optimizer.learning_rate", "training.batch_size"
    same = ({batch: 32, rate: 1.0}, (32, 1.0, 5, False)), ({batch: 32, rate: 2.0}, (32, 1.0, 5, False))
    other = ({batch: 64, rate: 1.0}, (64, 1.0, 5, False))
    assert why_not_covered(tuning(*same, other), [rate]) is None
    assert "chosen by looking" in why_not_covered(tuning(*same, other), [batch])
    noisier = ({batch: 32, rate: 4.0}, (32, 1.1, 5, False))  # sigma solved for
    assert "chosen by looking" in why_not_covered(tuning(*same, noisier), [rate])
    shared = ({batch: 32, rate: 4.0}, (32, 1.0, 5, True))
    assert "how many runs" in why_not_covered(tuning(*same, shared), [rate])


FIGURE = """
source = "here"
caption = "a figure"
[full]
recipe = "demo/digits"
seeds = 2
grid = { "training.batch_size" = [32, 64, 128], "optimizer.learning_rate" = [1.0, 2.0] }
tuned = ["optimizer.learning_rate"]
"""
ABOVE = 'says = "s", rule = "above", these = { "training.batch_size" = 64 }, those = { "training.batch_size" = 32 }'


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('axes = ["optimizer.learning_rat"]', "axes names optimizer.learning_rat, which is not swept. Did you mean"),
        ('tuned = ["ema.decay"]', "tuned names ema.decay, which is not swept"),
        (f"claims = [{{ {ABOVE.replace('64', '65')} }}]", "is about one cell at .*65.*, and the sweep has 0"),
        ('claims = [{ says = "s", rule = "peak", along = "optimizer.learning_rate" }]', "three or more numbers"),
        ('claims = [{ says = "s", rule = "best rises", of = "ema.decay" }]', "a number above 0 of ema.decay"),
    ],
)
def test_what_no_sweep_of_a_figure_can_show_is_refused_when_its_file_is_read(tmp_path, lines, says):
    path = tmp_path / "figure.toml"
    path.write_text(f"{FIGURE}claims = [{{ {ABOVE} }}]\n")
    assert read_figure(str(path)).full is not None
    kept = [line for line in FIGURE.splitlines() if not line.startswith(lines.split(" ")[0])]
    path.write_text("\n".join([*kept, lines]))
    with pytest.raises(InputError, match=says):
        read_figure(str(path))


def test_figures_are_listed_and_a_full_one_is_planned_with_its_cost(capsys):
    listed = {figure["name"]: figure for figure in json_of(capsys, "figures", "list")["figures"]}
    assert listed["de2022/figure-3"]["scales"] == ["full", "small"]
    assert listed["sander2022/figure-2"]["instead"].startswith("sfumato plan")
    planned = json_of(capsys, "figures", "run", "de2022/figure-8")
    assert planned["trained"] is False
    assert planned["cost"] == {"runs": 25, "updates": 25 * 2468, "view_gradients": 25 * 2468 * 4096 * 16}
    study = read_figure("de2022/figure-8").full
    assert planned["not_stated"] and planned["needs"] == study.needs and planned["assumed"] == study.assumed
    assert "sfumato figures run de2022/figure-8 --train" in call(capsys, "figures", "run", "de2022/figure-8")[1]
