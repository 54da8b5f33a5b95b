"""Runs that real torchruns train, on this machine or in network namespaces, for `benchmarks.elastic`."""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sfumato.run_folder.checkpoint import Checkpoints

Facts = dict[str, Any]
HERE = Path(__file__).parent.parent
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"
NODES = {"a": "10.0.0.1", "b": "10.0.0.2"}


class Run:
    """A run folder, and what is looked for in it.

    Args:
        shop: With the recipe and the modules.
        steps: Of the plan.
        seed: Public; None: a private run, whose noise is watched.

    Attributes:
        host: The node whose agent others ask for the state of the rendezvous; "": it is in a file beside the run.
    """

    host = ""

    def __init__(self, shop: Path, steps: int, seed: int | None = None, **training: Any) -> None:
        self.shop, self.steps, self.seed = shop, steps, seed
        self.place, self.notes = Path(tempfile.mkdtemp(dir=shop)), Path(tempfile.mkdtemp(dir=shop))
        self.folder, self.noise = self.place / "run", self.notes / "noise"
        self.noise.mkdir()
        settings = {"training.num_steps": steps, **{f"training.{key}": value for key, value in training.items()}}
        settings |= {} if seed is None else {"run.seed": seed}
        changes = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        self.asked = ["train", str(shop / "recipe.toml"), "--trust", "nets", *changes]
        path = os.pathsep.join(map(str, (shop, HERE / "src")))
        self.environment = {**os.environ, "PYTHONPATH": path, "RUN": str(self.folder), "NOISE": str(self.noise)}
        self.environment |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def lines(self) -> list[Facts]:
        """Of releases."""
        path = self.folder / "ledger.jsonl"
        whole = path.read_bytes().rpartition(b"\n")[0].splitlines()[1:] if path.exists() else []
        return [json.loads(line) for line in whole]

    def starts(self) -> set[str]:
        """Which released anything."""
        return {line["launch_id"] for line in self.lines()}

    def reaches(self, count: int) -> None:
        assert until(lambda: len(self.lines()) >= count, 200) is not None, f"{self.place} does not begin"

    def goes_on(self, *agents: "Agent", limit: float = 150) -> float | None:
        """Seconds until another start releases; None: none does."""
        before = self.starts()
        seconds = until(lambda: self.starts() - before or all(agent.status() is not None for agent in agents), limit)
        return seconds if self.starts() - before else None

    def saved(self) -> int:
        """Releases of the newest checkpoint."""
        found = Checkpoints(self.folder / "owner" / "checkpoints").newest()
        return 0 if found is None else found.num_releases

    def facts(self) -> Facts:
        """How it ended, and whether at any time there were as many lines as keys of noise in use."""
        first: dict[str, int] = {}
        for name in os.listdir(self.noise):
            number, key = name.split("-")
            first[key] = min(int(number), first.get(key, self.steps))
        lines = len(self.lines())
        counted = all(before < number for before, number in enumerate(sorted(first.values()))) and len(first) <= lines
        found = json.loads((self.folder / "privacy.json").read_text())
        facts = {"lines": lines, "planned": self.steps, "starts": len(self.starts()), "counted": counted}
        facts |= {"lost": found["num_lost"], "certificate": found["status"]}
        if found["status"] == "complete":
            facts["counted"] &= found["num_lost"] + found["num_applied"] == lines == self.steps
        if found["private"] and found["status"] == "complete":
            words = [sys.executable, "-m", "sfumato", *self.asked, "--dry-run", "--json"]
            planned = json.loads(subprocess.run(words, check=True, capture_output=True, env=self.environment).stdout)
            facts["epsilon as planned"] = found["epsilon"] == planned["epsilon"]
        return facts

    def files(self) -> dict[str, str]:
        """A digest of each."""
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    def changed(self, before: dict[str, str]) -> list[str]:
        """Files that are there no more, are new or are others."""
        now = self.files()
        return sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))


class Agent:
    """A torchrun that trains a run: by two ranks here, or as one node of two.

    Args:
        run: What it trains.
        options: Of torchrun.
        node: In whose namespaces of network and mounts it lives.
        command: What is started instead.
    """

    def __init__(self, run: Run, *options: str, node: str = "", command: list[str] | None = None) -> None:
        self.run, self.node, environment, before = run, node, run.environment, []
        self.log = run.notes / f"log-{time.monotonic_ns()}"
        if node:
            before = ["ip", "netns", "exec", f"sf-{node}", "unshare", "-m"]
            environment = environment | {"GLOO_SOCKET_IFNAME": f"sf-{node}"}
            where, kind = str(run.place / "rdzv"), "store_type=file"
            if run.host:
                where, kind = f"{NODES[run.host]}:29400", f"is_host={int(node == run.host)}"
            options += ("--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-conf", f"{kind},{QUICK}")
            options += ("--rdzv-id", "it", "--local-addr", NODES[node])
            options += ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "20")
        elif "--nproc-per-node" not in options:
            options += ("--nproc-per-node", "2")
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "-m"]
        words = command or [*torchrun, "watched" if run.seed is None else "sfumato"]
        words = [*before, *words, *run.asked, "--output", str(run.folder), "--resume"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        _AGENTS.append(self)

    def status(self) -> int | None:
        return self.process.poll()

    def ranks(self) -> dict[int, int]:
        """Process by rank; itself, where torchrun is not asked."""
        found, pid = {}, self.process.pid
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                given = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                found |= {int(word[5:]): int(child) for word in given if word.startswith(b"RANK=")}
        return found

    def send(self, number: int, *ranks: int) -> None:
        """To workers: these ranks, or all."""
        for rank, pid in self.ranks().items():
            if rank in (ranks or (rank,)):
                os.kill(pid, number)

    def lose(self) -> None:
        """As a machine that is gone: agent and workers."""
        for pid in [*self.ranks().values(), *([self.process.pid] if self.status() is None else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ends(self, limit: float = 400) -> int | None:
        """Its exit status; None: it does not end, and is killed."""
        if until(lambda: self.status() is not None, limit) is None:
            self.lose()
            return None
        return self.status()

    def said(self) -> list[str]:
        """The lines with which its ranks ended, each once."""
        found = re.findall(r"^error.*", self.log.read_text(), re.MULTILINE)
        words = [line.replace(str(self.run.place), "").partition(". What was")[0][:160] for line in found]
        return list(dict.fromkeys(words))


_AGENTS: list[Agent] = []


def lose_all() -> None:
    """Whatever still runs."""
    for agent in _AGENTS:
        agent.lose()


def until(condition: Callable[[], Any], limit: float) -> float | None:
    """Seconds until it holds; None: not within the limit."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit:
            return None
        time.sleep(0.02)
    return round(time.monotonic() - began, 2)
