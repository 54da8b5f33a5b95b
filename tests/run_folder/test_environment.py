"""Where and by what a run computes: another computation is another environment, whose noise must be other too."""

import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch

import sfumato
from sfumato.config import DataConfig, parse
from sfumato.data import loading as datasets
from sfumato.planning.resolve import resolve
from sfumato.run_folder import entries as lines_of
from sfumato.run_folder.environment import COMPUTES, describe, digest_of_code
from sfumato.run_folder.ledger import Ledger
from sfumato.training.draws import Draws
from sfumato.training.learner import build_learner

PACKAGE = Path(sfumato.__file__).parent


@pytest.fixture
def package(tmp_path):
    copy = tmp_path / "sfumato"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def digest(package):
    digest_of_code.cache_clear()
    return digest_of_code(package)


@pytest.mark.parametrize(
    "path",
    [
        "clipping/graph/norms_and_sums.py",
        "training/noise.py",
        "training/step.py",
        "data/sampling.py",
        "nn/order.py",
        "randomness.py",
    ],
)
def test_every_change_of_a_computing_line_is_another_environment(package, path):
    module, digests = package / path, {digest(package)}
    assert digests == {digest(PACKAGE)}  # wherever it lies, compiled or not
    settings = {
        "model": "m",
        "engine": "graph",
        "methods": {},
        "microbatch_size": 1,
        "precision": "float32",
        "compile": False,
    }
    assert digest(PACKAGE) in describe(torch.device("cpu"), **settings)["sfumato"]
    module.write_text(module.read_text() + "\n")
    digests.add(digest(package))
    if module.parent.name == "graph":
        for change in (
            lambda: module.rename(module.with_name("sums_of_all.py")),
            lambda: (module.parent / "new.py").touch(),
            lambda: (module.parent / "new.py").write_text("0"),
        ):
            change()
            digests.add(digest(package))
        assert len(digests) == 5
    assert len(digests) > 1


@pytest.mark.parametrize(
    "path",
    [
        "cli/train.py",
        "cli/options.py",
        "reporting/page.py",
        "reporting/page.css",
        "run_folder/certificate.py",
        "config/__init__.py",
        "config/sections.py",
        "config/resolved.py",
    ],
)
def test_what_is_told_to_people_is_no_other_environment(package, path):
    before, text = digest(package), package / path
    text.write_text(text.read_text().replace("e", "E"))
    assert digest(package) == before


def test_all_code_that_runs_in_an_update_is_in_the_digest(tmp_path):
    """Found by watching one: sampling, sum, noise, optimizer, averages; what reads and writes files aside."""
    recipe = {
        "data": {"name": "digits"},
        "augmentation": {"kind": "flip", "augmult": 2},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 16, "num_steps": 2, "microbatch_size": 8},
    }
    dataset = datasets.load(DataConfig(name="digits"), None, lambda text: None)
    plan = resolve(parse(recipe), dataset.facts)
    ledger = Ledger.open(tmp_path / "ledger.jsonl", exclusive=True)
    ledger.appends_under(bytes(32))
    ledger.append(lines_of.run_line("id", plan.mechanism, 1.0, "digest"))
    ledger.append(lines_of.first_session_line({}))
    draws = Draws(bytes(32), {}, ledger, is_public=False, is_accounted=True)
    files = set()

    def watch(frame, event, argument):
        files.add(frame.f_code.co_filename)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        learner = build_learner(plan, dataset, torch.device("cpu"), None)
        learner.initialise(draws.initial_weights())
        files.clear()
        for step in (1, 2):
            randomness = draws.of_step(step, plan.mechanism, learner.views)
            grad_sum, _ = learner.collect(randomness, step)
            learner.update(grad_sum, draws.record(step, grad_sum), step)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = {Path(file).relative_to(PACKAGE).as_posix() for file in files if Path(file).is_relative_to(PACKAGE)}
    computing = {file for file in ours if any(file == room or file.startswith(f"{room}/") for room in COMPUTES)}
    assert ours - computing <= {
        "run_folder/ledger.py",
        "run_folder/files.py",
        "run_folder/process.py",
        "run_folder/entries.py",
        "json_record.py",
        "config/__init__.py",
        "config/sections.py",
        "config/resolved.py",
    }
    assert {
        "data/sampling.py",
        "training/step.py",
        "training/noise.py",
        "training/state.py",
        "clipping/graph/norms_and_sums.py",
        "randomness.py",
    } <= computing
    assert {
        "data/augmentation/views.py",
        "training/draws.py",
        "training/ema.py",
        "clipping/grad_fn.py",
    } <= computing
    assert all((PACKAGE / room).exists() for room in COMPUTES)
