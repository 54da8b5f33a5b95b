"""Do the tests notice a wrong line? Mutants of what epsilon rests on, drawn at random, each before its own tests.

    python -m benchmarks.mutation [--mutants 160] [--workers 1] [--limit 300] [--results FILE]
                                  [--only ID, file or group ...]

A mutant is one small change (benchmarks/mutants.py) to a *copy* of the package in a temporary folder, which stands
first on PYTHONPATH; the checkout is never changed. Its tests, `TESTS`, run fastest first and stop at the first
failure. One JSON line for each mutant is added to the results file as soon as it is known, so the same command goes
on after a kill: mutants that have a line there are not run again. To run some anew, take their lines out. Which ones
are drawn depends on `SEED` and on the mutated lines alone, whatever changes elsewhere.

What the tests say of the unchanged copy is found first ("before": null in the results): where they fail, no mutant
means anything, and the run stops. Verdicts: "killed", by the test that is named; "time", stopped after --limit
seconds, many times what the unchanged copy takes; "survived": a law is missing, or the change changes nothing that
is promised. LOG.md says which.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.mutants import Mutant, mutants

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sfumato"
RESULTS = Path(__file__).parent / "results" / "mutation.jsonl"
SEED = "1"

# In every round each of these gives one mutant; those of three parts, which hold most of the code, come twice.
GROUPS = {
    "accounting": ["accounting"],
    "clipping": ["clipping"],
    "training": ["training", "planning", "evaluation"],
    "run_folder": ["run_folder"],
    "sampling": ["data/sampling.py"],
    "randomness": ["randomness.py"],
    "private selection": ["searching/private.py"],
}
ROUND = [
    "accounting",
    "clipping",
    "training",
    "run_folder",
    "accounting",
    "clipping",
    "training",
    "sampling",
    "randomness",
    "private selection",
]


def _tests(folder: str, names: str) -> list[str]:
    return [f"tests/{folder}/test_{name}.py" for name in names.split()]


_OF_TRAINING = _tests("training", "step noise learner state private_loop nonprivate")

# The tests that should notice, fastest first; the longest path that a file's path begins with counts.
TESTS = {
    "accounting/": ["tests/accounting", "tests/planning"],
    "clipping/": _tests("clipping", "clip rules clipped_grad engine_check parametrization rows"),
    "clipping/model_check.py": _tests("clipping", "model_check engine_check") + _tests("clipping/zoo", "zoo"),
    "clipping/random_layers.py": _tests("clipping/zoo", "draws") + _tests("clipping", "engine_check"),
    "planning/": ["tests/planning", *_tests("run_folder", "certificate"), *_OF_TRAINING],
    "evaluation/": ["tests/evaluation", *_tests("cli", "use")],
    "training/": [*_OF_TRAINING, *_tests("training", "first_release resume"), *_tests("cli", "cli")],
    "run_folder/": ["tests/run_folder", *_tests("training", "private_loop resume")],
    "data/sampling.py": _tests("data", "sampling") + _tests("training", "step learner"),
    "randomness.py": ["tests/test_randomness.py", *_tests("data", "sampling"), *_tests("training", "noise learner")],
    "searching/private.py": _tests("searching", "private"),
}


def tests_of(file: str) -> list[str]:
    return TESTS[max((prefix for prefix in TESTS if file.startswith(prefix)), key=len)]


def chosen(number: int) -> list[Mutant]:
    """`number` mutants, in rounds over GROUPS, within a group in an order that is random and always the same."""
    queues = {}
    for group, parts in GROUPS.items():
        paths = [PACKAGE / part for part in parts]
        files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        found = [mutant for file in files for mutant in mutants(str(file.relative_to(PACKAGE)), file.read_bytes())]
        queues[group] = iter(sorted(found, key=lambda mutant: hashlib.sha256(f"{SEED} {mutant.id}".encode()).digest()))
    taken: list[Mutant] = []
    while len(taken) < number:
        these = [mutant for group in ROUND for mutant in islice(queues[group], 1)]
        if not these:
            break
        taken += these
    return taken[:number]


def verdict(tests: list[str], mutant: Mutant | None, limit: float) -> dict[str, Any]:
    """What the tests say of a copy of the package, mutated perhaps."""
    with tempfile.TemporaryDirectory(prefix="sfumato-mutant-") as folder:
        shutil.copytree(PACKAGE, Path(folder, "sfumato"), ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            Path(folder, "sfumato", mutant.file).write_bytes(mutant.source)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *tests]
        of_tests = {"PYTHONPATH": folder, "OMP_WAIT_POLICY": "PASSIVE", "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **of_tests},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"verdict": "time", "by": None, "seconds": round(limit, 1)}
    seconds = round(time.monotonic() - start, 1)
    if process.returncode == 0:
        return {"verdict": "survived", "by": None, "seconds": seconds}
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    by = named.group(1) if named else f"pytest ended with status {process.returncode}"
    return {"verdict": "killed", "by": by, "seconds": seconds}


def run(wanted: list[Mutant], results: Path, workers: int, limit: float) -> None:
    known = read(results)
    lock = threading.Lock()

    def note(line: dict[str, Any]) -> None:
        with lock, results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)

    def unchanged(tests: str) -> None:
        line = {"id": tests, "before": None, **verdict(tests.split(), None, limit)}
        if line["verdict"] != "survived":
            raise SystemExit(f"Without any mutant, {line['id']} fails: {line['by']}.")
        note(line)

    def judge(mutant: Mutant) -> None:
        about = dataclasses.asdict(mutant)
        del about["source"]
        note({**about, **verdict(tests_of(mutant.file), mutant, limit), "commit": commit})

    commit = machine()["commit"]
    with ThreadPoolExecutor(workers) as pool:
        new = [mutant for mutant in wanted if mutant.id not in known]
        suites = dict.fromkeys(" ".join(tests_of(mutant.file)) for mutant in new)
        list(pool.map(unchanged, [tests for tests in suites if tests not in known]))
        list(pool.map(judge, new))


def read(results: Path) -> dict[str, dict[str, Any]]:
    """The lines of a results file by their ids; a line that a kill cut off counts as not written."""
    known = {}
    text = results.read_text(encoding="utf-8") if results.exists() else ""
    for line in text.splitlines():
        try:
            known[json.loads(line)["id"]] = json.loads(line)
        except ValueError:
            continue
    if text and not text.endswith("\n"):
        with results.open("a", encoding="utf-8") as file:
            file.write("\n")
    return known


def summary(wanted: list[Mutant], results: Path) -> None:
    known = read(results)
    done = [(group_of(mutant), known[mutant.id]) for mutant in wanted if mutant.id in known]
    for group in GROUPS:
        verdicts = Counter(line["verdict"] for of, line in done if of == group)
        counts = ", ".join(f"{verdicts[verdict]:3} {verdict}" for verdict in ("killed", "time", "survived"))
        print(f"{group:24} {sum(verdicts.values()):4} mutants, {counts}")
    for _, line in done:
        if line["verdict"] != "killed":
            print(f"{line['verdict']} {line['id']} {line['file']}:{line['line']}: {line['before']} -> {line['after']}")


def group_of(mutant: Mutant) -> str:
    return next(group for group, parts in GROUPS.items() if mutant.file.startswith(tuple(parts)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=160)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", default=[], metavar="ID, file or group")
    arguments = parser.parse_args()
    wanted = chosen(arguments.mutants)
    if arguments.only:
        only = set(arguments.only)
        wanted = [mutant for mutant in wanted if only & {mutant.id, mutant.file, group_of(mutant)}]
    run(wanted, arguments.results, arguments.workers, arguments.limit)
    summary(wanted, arguments.results)
