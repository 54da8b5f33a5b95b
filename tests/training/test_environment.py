"""Where a run computes: any other code is another environment, whose noise must be other too."""

import shutil
from pathlib import Path

import torch

import sfumato
from sfumato.training.environment import describe, digest_of_code


def test_every_change_of_the_code_is_another_environment(tmp_path):
    package = tmp_path / "sfumato"
    shutil.copytree(Path(sfumato.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    module, digests = package / "clipping" / "totals.py", {digest_of_code(package)}
    assert digests == {digest_of_code(Path(sfumato.__file__).parent)}  # wherever it lies, compiled or not
    for change in (
        lambda: module.write_text(module.read_text() + "\n"),
        lambda: module.rename(module.with_name("sums_of_all.py")),
        lambda: (package / "new.py").touch(),
        lambda: (package / "new.py").write_text("0"),
    ):
        change()
        digest_of_code.cache_clear()
        digests.add(digest_of_code(package))
    assert len(digests) == 5
    settings = {"engine": "graph", "methods": {}, "microbatch_size": 1, "precision": "float32", "compile": False}
    assert digest_of_code(Path(sfumato.__file__).parent) in describe(torch.device("cpu"), **settings)["sfumato"]
