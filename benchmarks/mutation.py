"""Do the tests notice a wrong line? Mutants of what epsilon rests on, drawn at random, each before tests that call it.

    python -m benchmarks.mutation [--mutants 160] [--workers 1] [--limit 300] [--results FILE] [--callers FOLDER]
                                  [--only ID, file or group ...]

A mutant is one small change (benchmarks/mutants.py) to a *copy* of the package in a temporary folder, which stands
first on PYTHONPATH; the checkout is never changed. First all tests run once, and what they call is written to --callers
(benchmarks/callers.py; delete it when tests have changed). Before a mutant, those that call its function run, those
that call little else first, and stop at the first failure. One JSON line for each mutant is added to the results file
as soon as it is known, so the same command goes on after a kill: mutants that have a line there are not run again. To
run some anew, take their lines out. Which ones are drawn depends on `SEED` and on the mutated lines alone, whatever
changes elsewhere.

Last, the tests that killed must pass on the unchanged copy. Verdicts: "killed", by the test that is named; "time",
stopped after --limit seconds, three times what its tests may take on the unchanged code; "survived": a law is missing,
or the change changes nothing that is promised. LOG.md says which.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, islice
from pathlib import Path
from types import CodeType
from typing import Any

from benchmarks.machine import machine
from benchmarks.mutants import Mutant, mutants

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sfumato"
RESULTS = Path(__file__).parent / "results" / "mutation.jsonl"
SEED = "3"

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


class Suites:
    """Of every test, how long it took, and what it called (`benchmarks.callers`); found by one run of all."""

    def __init__(self, folder: Path) -> None:
        if not folder.exists():
            folder.mkdir(parents=True)
            command = "pytest -q -n 2 --dist loadfile -p benchmarks.callers".split()
            environment = {**os.environ, "SFUMATO_CALLERS": str(folder)}
            subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, check=True)
        lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
        self._seconds = {line["test"]: line["seconds"] for line in lines}
        self._num_calls = {line["test"]: len(line["calls"]) for line in lines}
        self._places = {line["test"]: (line["test"].partition("::")[0], at) for at, line in enumerate(lines)}
        self._callers: dict[str, set[str]] = {}
        for line in lines:
            for call in (*line["calls"], *{call.partition("::")[0] for call in line["calls"]}):
                self._callers.setdefault(call, set()).add(line["test"])

    def of(self, mutant: Mutant, most: float) -> list[str]:
        """Those that call the mutated function, or else its file's, for `most` seconds; those that call least first."""
        calls = [f"{mutant.file}::{name}" for name in _functions(compile(mutant.source, "", "exec"), mutant.line)]
        callers = next(filter(None, (self._callers.get(call) for call in [*reversed(calls), mutant.file])))
        turns, ordered = Counter[str](), []  # one set of parameters of each test function first, then the next
        for test in sorted(callers, key=lambda test: (self._num_calls[test], test)):
            function = test.partition("[")[0]
            ordered.append((turns[function], len(ordered), test))
            turns[function] += 1
        ordered = [test for *_, test in sorted(ordered)]
        total = accumulate(self._seconds[test] for test in ordered)
        taken = [test for test, seconds in zip(ordered, total, strict=True) if seconds <= most] or ordered[:1]
        rank: dict[str, int] = {}  # of files: pytest sets a module's fixtures up once where its tests stand together
        for test in taken:
            rank.setdefault(test.partition("::")[0], len(rank))
        return sorted(taken, key=lambda test: (rank[test.partition("::")[0]], self._places[test]))


def _functions(code: CodeType, line: int) -> Iterator[str]:
    """The names of functions around a line, the outer first."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            last = max(number or 0 for _, _, number in inner.co_lines())
            if inner.co_firstlineno <= line <= last:
                yield inner.co_qualname
                yield from _functions(inner, line)


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
    """What the tests say of a copy of the package, mutated perhaps; all of them, where it is not."""
    with tempfile.TemporaryDirectory(prefix="sfumato-mutant-") as folder:
        shutil.copytree(PACKAGE, Path(folder, "sfumato"), ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            Path(folder, "sfumato", mutant.file).write_bytes(mutant.source)
        own = [test.replace("src/", f"{folder}/", 1) if test.startswith("src/") else test for test in tests]
        Path(folder, "tests").write_text("\n".join(own), encoding="utf-8")  # examples in docstrings are the copy's
        options = "-q --tb=no -rfE -p no:cacheprovider -c pyproject.toml --rootdir ." + " -x" * (mutant is not None)
        command = [sys.executable, "-m", "pytest", *options.split(), f"@{folder}/tests"]
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
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    name = named.group(1) if named else f"pytest ended with status {process.returncode}"
    by = next((test for test in tests if test.endswith(name)), name)
    return {"verdict": "killed", "by": by, "seconds": seconds}


def run(wanted: list[Mutant], suites: Suites, results: Path, workers: int, limit: float) -> None:
    known = read(results)
    lock = threading.Lock()

    def note(line: dict[str, Any]) -> None:
        with lock, results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)

    def judge(mutant: Mutant) -> None:
        about = dataclasses.asdict(mutant)
        del about["source"]
        tests = suites.of(mutant, limit / 3)
        note({**about, "tests": len(tests), **verdict(tests, mutant, limit), "commit": commit})

    commit = machine()["commit"]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(judge, [mutant for mutant in wanted if mutant.id not in known]))
    known = read(results)
    killers = sorted({known[mutant.id]["by"] for mutant in wanted} - {None})
    unchanged = verdict(killers, None, 10 * limit)
    if unchanged["verdict"] != "survived":
        raise SystemExit(f"Without any mutant, {unchanged['by']} fails: what it killed counts for nothing.")


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
    parser.add_argument("--callers", type=Path, default=Path(tempfile.gettempdir(), "sfumato-callers"))
    parser.add_argument("--only", nargs="*", default=[], metavar="ID, file or group")
    arguments = parser.parse_args()
    wanted = chosen(arguments.mutants)
    if arguments.only:
        only = set(arguments.only)
        wanted = [mutant for mutant in wanted if only & {mutant.id, mutant.file, group_of(mutant)}]
    run(wanted, Suites(arguments.callers), arguments.results, arguments.workers, arguments.limit)
    summary(wanted, arguments.results)
