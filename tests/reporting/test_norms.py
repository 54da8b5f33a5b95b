"""Gradient norms are shown to the owner of a run, and lie where only the owner reads."""

import json

import pytest

from sfumato.errors import InputError
from sfumato.reporting.norms import draw_norms, read_norms
from tests.reporting import folders
from tests.reporting.test_page import RUNS

REST = {"loss": 1.0, "clipped_fraction": 0.5, "grad_norm": 1.0, "clipped_square": 0.5, "seconds": 1.5, "phases": {}}
EDGES = [0.01, 0.1, 1.0, 10.0, 100.0]


def watched(tmp_path, steps):
    """A run that noted the norms of some steps, among lines without."""
    folder = folders.write_run(tmp_path / "run", *RUNS["private"])
    norms = {"edges": EDGES, "counts": [1, 2, 3, 4, 0, 2], "not_finite": 1, "median": 0.75, "signal_to_noise": 0.5}
    with (folder / "owner" / "metrics_private.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "norms": norms, **REST}) + "\n")
    return folder


def test_what_is_read_is_marked_as_not_private_and_clipped_are_the_norms_above_one(tmp_path):
    facts = read_norms(watched(tmp_path, [1, 5]))
    assert facts["private"] is False and "not private" in facts["warning"]
    assert [row["step"] for row in facts["histograms"]] == [1, 5]
    assert facts["histograms"][0]["clipped_fraction"] == pytest.approx(6 / 12)


def test_an_empty_batch_has_no_clipped_fraction(tmp_path):
    folder = watched(tmp_path, [1])
    path = folder / "owner" / "metrics_private.jsonl"
    path.write_text(path.read_text().replace("[1, 2, 3, 4, 0, 2]", "[0, 0, 0, 0, 0, 0]"))
    facts = read_norms(folder)
    assert facts["histograms"][0]["clipped_fraction"] is None
    draw_norms(facts, tmp_path / "norms.svg")


def test_the_plot_is_its_owner_s_alone(tmp_path):
    folder = watched(tmp_path, range(1, 20))
    path = folder / "norms.png"
    path.write_text("an older one, for all to read")
    draw_norms(read_norms(folder), path)
    assert oct(path.stat().st_mode)[-3:] == "600" and path.stat().st_size > 2000


def test_the_plot_is_refused_among_files_made_for_sharing(tmp_path):
    facts = read_norms(watched(tmp_path, [1]))
    shared = tmp_path / "shared"
    (shared / "plots").mkdir(parents=True)
    (shared / "privacy.json").write_text("{}")
    for path in (shared / "norms.svg", shared / "plots" / "norms.svg"):
        with pytest.raises(InputError, match="made for sharing"):
            draw_norms(facts, path)
    assert not list(shared.glob("**/*.svg"))


def test_wrong_files_and_runs_without_norms_are_refused(tmp_path):
    folder = watched(tmp_path, [])
    with pytest.raises(InputError, match="norm_histogram_every"):
        read_norms(folder)
    with pytest.raises(InputError, match="no run"):
        read_norms(tmp_path / "nothing")
    facts = read_norms(watched(tmp_path / "other", [1]))
    for path, reason in ((tmp_path / "norms.html", r"\.svg, \.png"), (tmp_path / "no" / "norms.svg", "no folder")):
        with pytest.raises(InputError, match=reason):
            draw_norms(facts, path)
