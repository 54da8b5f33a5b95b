"""What a program set for itself changes no run."""

import contextlib
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sfumato
from sfumato import config, recipes
from sfumato.training.logs import Progress


@contextlib.contextmanager
def put_back(setting, get, *value):
    before = get()
    setting(*value)
    try:
        yield
    finally:
        setting(before)


HARMLESS = {
    "numpy raises": lambda: np.errstate(all="raise"),
    "no gradients": torch.no_grad,
    "deterministic": lambda: put_back(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
    ),
    "seeds": lambda: put_back(torch.set_rng_state, torch.get_rng_state, torch.Generator().manual_seed(7).get_state()),
}


def train(folder):
    values = config.read(recipes.find("demo/digits"))
    values["training"] |= {"num_steps": 2, "batch_size": 64}
    values["run"] = {"seed": 0}
    return sfumato.train(values, folder, progress=Progress())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "run"
    return train(folder).as_json(), folder


SAME = ("epsilon_if_private", "delta", "noise_multiplier", "num_steps", "accuracy")


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_program_set_for_itself_changes_no_run(plain, tmp_path, name):
    expected, before = plain
    with HARMLESS[name]():
        found = train(tmp_path / "run").as_json()
    assert {key: found[key] for key in SAME} == {key: expected[key] for key in SAME}
    weights, others = (load_file(folder / "model.safetensors") for folder in (before, tmp_path / "run"))
    assert all(weights[name].equal(others[name]) for name in weights)


FAULTS = """
import resource, torch
from sfumato.training.process import keep_freed_memory

keep_freed_memory()

def page_faults(mebibytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(mebibytes * 2**18).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for microbatch in range(8):  # the first ones find the room
    faults = [page_faults(size) for size in (8, 31, 40, 64, 96)]
print(max(faults))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_memory_that_was_freed_is_used_again_however_large_the_block():
    faults = int(subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True).stdout)
    assert faults < 200  # pages of 4 KiB: 8 MiB asked for anew would be 2,048
