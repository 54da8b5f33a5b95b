"""Every file of `examples` runs as it stands, on what is at hand, and shows what it promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sfumato
from tests.cli.test_cli import photos

EXAMPLES = Path(__file__).parents[1] / "examples"


def output_of(name, *words):
    """What an example prints."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern, text):
    return [float(found) for found in re.search(pattern, text).groups()]


@pytest.mark.slow
def test_a_loop_of_ones_own_learns_and_says_what_it_spent():
    accuracy, epsilon = numbers(r"accuracy ([\d.]+) at epsilon ([\d.]+)", output_of("private_loop.py"))
    assert accuracy > 0.8 and 2 < epsilon < 3


def test_making_a_loop_private_takes_about_ten_lines():
    marked = [line for line in (EXAMPLES / "private_loop.py").read_text().splitlines() if "(private)" in line]
    assert len(marked) <= 11


@pytest.mark.slow
def test_a_folder_is_planned_trained_used_and_exported(tmp_path):
    for part, seed in (("train", 0), ("test", 1)):
        photos(tmp_path / "images" / part, 60, seed=seed, contrast=150, noise=30)
    out = output_of("folder.py", tmp_path / "images", tmp_path / "output")
    assert "120 images: noise multiplier" in out and out.endswith("exported: valid\n")
    assert numbers(r"epsilon ([\d.]+)\n", out)[0] <= 3


@pytest.mark.slow
def test_a_transformer_of_hugging_face_learns_and_is_saved_for_its_programs(tmp_path):
    transformers = pytest.importorskip("transformers")
    first, second = tmp_path / "first", tmp_path / "second"
    accuracy, epsilon = numbers(r"accuracy ([\d.]+) at epsilon ([\d.]+)", output_of("huggingface_vit.py", "", first))
    assert accuracy > 0.6 and 7.9 < epsilon <= 8
    assert transformers.ViTForImageClassification.from_pretrained(first / "model").config.num_labels == 10
    output_of("huggingface_vit.py", first / "model", second)  # as a model of the hub
    assert (second / "privacy.json").exists()


@pytest.mark.slow
def test_a_network_of_timm_is_fine_tuned(tmp_path):
    timm, safetensors = pytest.importorskip("timm"), pytest.importorskip("safetensors.torch")
    safetensors.save_file(timm.create_model("test_vit").state_dict(), tmp_path / "weights.safetensors")
    out = output_of("timm_finetune.py", "test_vit", tmp_path / "output", tmp_path / "weights.safetensors")
    assert 2.9 < numbers(r"epsilon ([\d.]+)", out)[0] <= 3
    certificate = json.loads((tmp_path / "output" / "run" / "privacy.json").read_text())
    assert "ImageNet-1k" in json.dumps(certificate)


@pytest.mark.slow
def test_a_sweep_ends_with_its_plot(tmp_path):
    out = output_of("sweep.py", tmp_path)
    assert len(re.findall(r"\d\.\d{3} \+- \d\.\d{3} at epsilon (?:3.000|2.999)\n", out)) == 4
    assert (tmp_path / "sweep.svg").read_text().count("<path") > 8
    assert 3 < numbers(r"together: epsilon ([\d.]+)", out)[0] < 24


@pytest.mark.slow
def test_a_search_by_cheap_runs_ends_with_the_private_one(tmp_path):
    out = output_of("tan_search.py", tmp_path)
    accuracy, epsilon = numbers(r"\naccuracy ([\d.]+) at epsilon ([\d.]+)", out)
    assert accuracy > 0.8 and 2.9 < epsilon <= 3 and out.endswith("private images is not covered by it\n")


@pytest.mark.slow
def test_attacks_do_not_refute_what_is_claimed(tmp_path):
    out = output_of("audit.py", tmp_path)
    assert out.count(": holds\n") == 2
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["audit"]["violated"] is False


@pytest.mark.slow
def test_the_notebook_runs_and_holds_its_pictures(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((EXAMPLES / "digits.ipynb").read_text())["cells"]
    names, pictures = {}, 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        pictures += sum("image/png" in output.get("data", {}) for output in cell["outputs"])
        assert cell["execution_count"] is not None and "error" not in {each["output_type"] for each in cell["outputs"]}
        exec("".join(cell["source"]), names)
    assert pictures == 4 and names["result"].accuracy > 0.85
    assert sfumato.verify(names["folder"] / "run").valid
