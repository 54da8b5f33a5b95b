"""Several processes of one sweep on one machine. They end with the one that started them."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sfumato.config import Recipe


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a sweep was asked for, as a helper is told it. `storage` may hold a password: it goes through a pipe, and
    into no command line.
    """

    recipe: Recipe
    grid: Mapping[str, Sequence[Any]]
    cells: Sequence[Mapping[str, Any]]
    seeds: int
    paired: bool
    first_seed: int
    folder: str
    storage: str
    data_root: str | None
    device: str
    trust: Collection[str]

    def as_json(self) -> dict[str, Any]:
        """For one line of JSON."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        recipe = self.recipe.model_dump(mode="json", exclude_unset=True)
        return {
            **facts,
            "recipe": recipe,
            "cells": list(self.cells),
            "grid": dict(self.grid),
            "trust": list(self.trust),
        }


def work(asked: Asked, workers: int, report: Callable[[str], None]) -> None:
    """Starts so many helpers and waits for them. One that fails leaves its run to others; what no helper could do is
    left over.
    """
    threads = max(1, (os.cpu_count() or 1) // workers)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    helpers = []
    try:
        for _ in range(workers):
            helper = subprocess.Popen(
                [sys.executable, "-m", "sfumato.studies.helper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which then stops them
            )
            helpers.append(helper)
            assert helper.stdin is not None
            helper.stdin.write((json.dumps(asked.as_json(), allow_nan=False) + "\n").encode())
            helper.stdin.flush()
        for helper in helpers:
            helper.wait()
    finally:
        for helper in helpers:
            if helper.stdin is not None:
                helper.stdin.close()  # which tells one that still works to stop
        for helper in helpers:
            helper.wait()
    failed = sum(helper.returncode != 0 for helper in helpers)
    if failed:
        report(f"{failed} of {workers} workers ended early; what they left is done here")
