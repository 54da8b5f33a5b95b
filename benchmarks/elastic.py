"""Do runs of several ranks survive what happens to machines? Real torchrun, signals and network namespaces.

    python -m benchmarks.elastic [ROW ...] [--out benchmarks/results/elastic.jsonl]

as root on Linux with iproute2, on two cores; all rows take 1.5 hours. A line of JSON is a case: how it ended, what its
ranks said, seconds until another start counted an update, and whether each was counted before its noise was drawn.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.elastic_runs import NODES, Agent, Facts, Run, lose_all, until
from benchmarks.machine import machine
from tests.training.test_ranks import NETS, distance, state

RECIPE = """
data = {name = "digits"}
model = {name = "nets:Double"}
augmentation = {kind = "flip", augmult = 2}
privacy = {noise_multiplier = 2, delta = 1e-5}
optimizer = {learning_rate = 1.0, momentum = 0.9}
ema = {decay = [0.9, 0.5]}
training = {batch_size = 256, microbatch_size = 32, engine = "func", checkpoint_every = 3, rank_timeout = 10}
"""  # other engines pick methods by their speed, and other methods round otherwise
WATCHED = """
import contextlib, hashlib, os, pathlib
from sfumato.training import step
real = step.with_noise

def noted(values, scale, stream, *first):
    with contextlib.suppress(OSError):
        number = pathlib.Path(os.environ["RUN"], "ledger.jsonl").read_bytes().count(b"\\n") - 1
        pathlib.Path(os.environ["NOISE"], f"{number}-{hashlib.sha256(stream._key).hexdigest()[:16]}").touch()
    return real(values, scale, stream, *first)

step.with_noise = noted
from sfumato.cli import main
main()
"""
PLAIN = [sys.executable, "-c", "import watched"]
UNLOCKED = [sys.executable, "-c", "import sfumato.run_folder.ledger as it; it.lock = lambda *_: True; import watched"]
"""A start on another machine, whose file server let the lock of a frozen one lapse."""


def kills(shop: Path) -> Iterator[Facts]:
    """30 runs, of which a rank is killed at a random moment; in ten of them twice."""
    calm = {}
    for sharded in (False, True):
        calm[sharded] = Run(shop, 180, seed=3, shard_state=sharded)
        status = Agent(calm[sharded]).ends()
        yield {"case": f"undisturbed, sharded {sharded}", "status": status, **calm[sharded].facts()}
    for number in range(30):
        chance, sharded, times = random.Random(number), number % 2 == 1, 2 if number % 3 == 0 else 1
        run = Run(shop, 180, None if number >= 20 else 3, shard_state=sharded)
        agent, killed, seconds = Agent(run, "--max-restarts", "5"), [], []
        run.reaches(1)
        for _ in range(times):
            time.sleep(chance.uniform(0, 10 / times))
            killed.append((chance.randrange(2), len(run.lines())))
            agent.send(signal.SIGKILL, killed[-1][0])
            seconds.append(run.goes_on(agent))
        found = {"case": number, "seed": run.seed, "sharded": sharded, "killed at": killed, "status": agent.ends()}
        if run.seed is not None:
            pairs = zip(state(run.folder), state(calm[sharded].folder), strict=True)
            found["bit-equal"] = all(torch.equal(*pair) for pair in pairs)
        yield {**found, "seconds": seconds, **run.facts()}


def sizes(shop: Path) -> Iterator[Facts]:
    """All ranks killed, then others in number."""
    calm = Run(shop, 180, seed=3)
    Agent(calm).ends()
    for number, then in enumerate(((1,), (4,), (1,), (4,), (4, 1, 2))):
        chance, run = random.Random(number), Run(shop, 180, seed=3, shard_state=number % 2 == 1)
        agent, seconds = Agent(run), []
        run.reaches(1)
        for size in then:
            time.sleep(chance.uniform(0, 4))
            agent.lose()
            agent = Agent(run, "--nproc-per-node", str(size))
            seconds.append(run.goes_on(agent))
        found = {"case": f"2 ranks, then {then}", "status": agent.ends(), "seconds": seconds}
        yield {**found, "relative distance": distance(run.folder, calm.folder), **run.facts()}


def nodes(shop: Path) -> Iterator[Facts]:
    """A node of two is lost, comes back, and is lost for good; or is lost while ranks load."""
    for rank in (1, 0):
        run, (one, two) = two_nodes(shop, 700)
        lost, stays = (one, two) if rank in one.ranks() else (two, one)
        lost.lose()
        found = {"case": f"node of rank {rank}", "seconds, alone": [run.goes_on(stays)]}
        time.sleep(5)
        lost = Agent(run, node=lost.node)
        found["seconds, both"] = run.goes_on(stays, lost)
        found["ranks"] = len(stays.ranks()) + len(lost.ranks())
        time.sleep(5)
        if rank not in lost.ranks():
            lost, stays = stays, lost
        lost.lose()
        found["seconds, alone"].append(run.goes_on(stays))
        yield {**found, "status": stays.ends(), "said": stays.said(), **run.facts()}
    for rank in (1, 0):
        run, (one, two) = two_nodes(shop, 100, begun=False)
        until(all_up(one, two), 60)
        time.sleep(4)
        lost, stays = (one, two) if rank in one.ranks() else (two, one)
        found = {"case": f"node of rank {rank} while ranks load", "lines then": len(run.lines())}
        lost.lose()
        yield {**found, "seconds": run.goes_on(stays), "status": stays.ends(100), "said": stays.said(), **run.facts()}


def cut(shop: Path) -> Iterator[Facts]:
    """The network between two nodes fails; both see the folder."""
    for rank in (1, 0):
        run, (one, two) = two_nodes(shop, 700)
        off, stays = (one, two) if rank in one.ranks() else (two, one)
        link(off.node, "down")
        ended = until(off.said, 70)
        found = {"case": f"node of rank {rank} cut off", "seconds, says why": ended, "said": off.said()}
        found["updates in 45 s"] = None if run.goes_on(stays, limit=45) is None else "yes"
        off.process.send_signal(signal.SIGTERM)
        found["seconds, alone, once the agent is ended"] = run.goes_on(stays)
        off.ends(60)
        link(off.node, "up")
        off = Agent(run, node=off.node)
        found["seconds, both"] = run.goes_on(stays, off)
        found["status"] = [stays.ends(), off.ends(60)]
        yield {**found, "said by the other": stays.said(), **run.facts()}
    for host in ("", "a"):
        run, (one, two) = two_nodes(shop, 1000, host=host)
        began = time.monotonic()
        link(two.node, "down")
        found = {"case": f"cut for a minute, agents left alone, rendezvous by {'TCP' if host else 'a file'}"}
        found["seconds, alone"] = run.goes_on(one, two, limit=45)
        time.sleep(began + 60 - time.monotonic())
        link(two.node, "up")
        found["seconds, both"] = run.goes_on(one, two)
        run.reaches(run.steps)
        ended = time.monotonic()
        found |= {"status": [one.ends(), two.ends()], "seconds, agents end": round(time.monotonic() - ended, 2)}
        yield {**found, "said": one.said() + two.said(), **run.facts()}


def folder(shop: Path) -> Iterator[Facts]:
    """Network and run folder fail for one of two nodes."""
    for rank in (1, 0):
        with contextlib.ExitStack() as mounts:
            run, (one, two) = two_nodes(shop, 500, mounts=mounts)
            off, stays = (one, two) if rank in one.ranks() else (two, one)
            link(off.node, "down")
            there = ["nsenter", "-t", str(off.process.pid), "-m"]
            subprocess.run([*there, "umount", "-l", str(run.place)], check=True)
            ended = until(all_dead(list(off.ranks().values())), 70)
            found = {"case": f"node of rank {rank}", "seconds, ends": ended, "said": off.said()}
            found |= {"seconds, alone": run.goes_on(stays), "status": stays.ends(), "said by the other": stays.said()}
            yield {**found, "agent cut off": off.ends(60), **run.facts()}
            link(off.node, "up")


def stopped(shop: Path) -> Iterator[Facts]:
    """A worker is frozen for good."""
    for rank in (0, 1):
        run = Run(shop, 400)
        agent = Agent(run, "--max-restarts", "1")
        run.reaches(20)
        before = list(agent.ranks().values())
        agent.send(signal.SIGSTOP, rank)
        found = {"case": f"rank {rank}", "seconds, ranks end": until(all_dead(before), 200)}
        found["seconds, then"] = run.goes_on(agent)
        yield {**found, "status": agent.ends(), "said": agent.said(), **run.facts()}


def two(shop: Path) -> Iterator[Facts]:
    """Two first ranks at once: torchrun or one process where a run lives; and two torchruns that begin together."""
    run = Run(shop, 1500)
    first = Agent(run)
    run.reaches(20)
    for case, options in (("one process", {"command": PLAIN}), ("torchrun", {})):
        began, second = time.monotonic(), Agent(run, "--master-port", "29600", **options)
        found = {"case": f"{case} where a run lives", "status": second.ends(), "said": second.said()}
        found |= {"seconds": round(time.monotonic() - began, 2), "the first lives": first.status() is None}
        yield found | {"starts": len(run.starts())}
    yield {"case": "the first", "status": first.ends(), "said": first.said(), **run.facts()}
    for number in range(5):
        run = Run(shop, 100)
        both = [Agent(run, "--master-port", str(29600 + place)) for place in range(2)]
        status = [agent.ends() for agent in both]
        said = [agent.said() for agent in both]
        yield {"case": f"both begin, {number}", "status": status, "said": said, **run.facts()}


def frozen(shop: Path) -> Iterator[Facts]:
    """All ranks freeze, the lock lapses, another start goes on, and they wake up: during it, or after."""
    for number in range(10):
        chance, run, wakes_late = random.Random(number), Run(shop, 150), number % 2 == 1
        old = Agent(run, "--max-restarts", "0")
        run.reaches(1)
        time.sleep(chance.uniform(0, 5))
        old.send(signal.SIGSTOP)
        frozen_at, new = len(run.lines()), Agent(run, command=UNLOCKED)
        if wakes_late:
            status = new.ends()
        else:
            run.reaches(frozen_at + 2 + number)
        before, launches = run.files(), run.starts()
        old.send(signal.SIGCONT)
        found = {"case": f"{number}, wakes {'after' if wakes_late else 'during'} the other", "frozen at": frozen_at}
        found |= {"status": old.ends(100), "said": old.said()}
        found |= {"other's status": status if wakes_late else new.ends(), "other said": new.said()}
        found["changed"] = run.changed(before) if wakes_late else None
        order = [line["launch_id"] for line in run.lines()]
        found["lines in order of starts"] = order == sorted(order, key=order.index) and run.starts() == launches
        yield {**found, **run.facts()}


def ledger(shop: Path) -> Iterator[Facts]:
    """The ledger is lost, or is older than the newest checkpoint."""
    for case, options in (("missing", []), ("cut", []), ("cut", ["--max-restarts", "2"])):
        run = Run(shop, 150)
        agent = Agent(run)
        run.reaches(40)
        agent.lose()
        path = run.folder / "ledger.jsonl"
        kept = path.read_bytes().splitlines(keepends=True)
        path.unlink() if case == "missing" else path.write_bytes(b"".join(kept[: run.saved() - 1]))
        before, began, again = run.files(), time.monotonic(), Agent(run, *options)
        status, seconds = again.ends(), round(time.monotonic() - began, 2)
        found = {"case": f"{case} {' '.join(options)}", "status": status, "said": again.said(), "seconds": seconds}
        num_said = again.log.read_text().count("error")
        yield {**found, "lines of error": num_said, "changed": run.changed(before)}


def agent(shop: Path) -> Iterator[Facts]:
    """The agent alone is killed."""
    for number in range(5):
        run = Run(shop, 150)
        lost = Agent(run)
        run.reaches(10 * (number + 1))
        pids = list(lost.ranks().values())
        os.kill(lost.process.pid, signal.SIGKILL)
        found = {"case": number, "seconds, workers end": until(all_dead(pids), 60)}
        again = Agent(run)
        yield {**found, "seconds": run.goes_on(again), "status again": again.ends(), **run.facts()}


def signals(shop: Path) -> Iterator[Facts]:
    """SIGTERM to torchrun, and Ctrl-C; then the same command again."""
    run, chance = Run(shop, 300), random.Random(0)
    for number, name in enumerate(("SIGTERM", "SIGINT") * 4):
        started, before = Agent(run), len(run.lines())
        if number >= 6:  # while it loads
            time.sleep(4)
        else:
            run.reaches(before + 1)
            time.sleep(chance.uniform(0, 3))
        began = time.monotonic()
        os.killpg(started.process.pid, signal.Signals[name])  # workers have sessions of their own
        found = {"case": f"{name}{' while it loads' if number >= 6 else ''}", "status": started.ends(60)}
        found |= {"seconds": round(time.monotonic() - began, 2), "said": started.said()}
        yield {**found, "saved": run.saved(), "new lines": len(run.lines()) - before, **run.facts()}
    yield {"case": "the same command again", "status": Agent(run).ends(), **run.facts()}


def all_dead(pids: list[int]) -> Callable[[], bool]:
    def found() -> bool:
        stats = [path.read_text() for path in (Path(f"/proc/{pid}/stat") for pid in pids) if path.exists()]
        return all(stat.rsplit(")", 1)[1].split()[0] == "Z" for stat in stats)  # whose parent does not ask

    return found


def all_up(*agents: Agent) -> Callable[[], bool]:
    return lambda: all(agent.ranks() for agent in agents)


def link(node: str, state: str) -> None:
    subprocess.run(["ip", "-n", f"sf-{node}", "link", "set", f"sf-{node}", state], check=True)


def two_nodes(
    shop: Path, steps: int, *, begun: bool = True, mounts: contextlib.ExitStack | None = None, host: str = ""
) -> tuple[Run, list[Agent]]:
    """A run on two nodes, after 20 updates; its folder in a file system that each has mounted, if asked for."""
    run = Run(shop, steps)
    run.host = host
    for options in (["-o", "ro"], []) if mounts else ():
        subprocess.run(["mount", "-t", "tmpfs", *options, "none", str(run.place)], check=True)
        mounts.callback(subprocess.run, ["umount", str(run.place)], check=False)
    agents = [Agent(run, node=node) for node in NODES]
    if begun:
        run.reaches(20)
    return run, agents


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Two namespaces with a cable between them."""
    with contextlib.ExitStack() as made:
        for node in NODES:
            subprocess.run(["ip", "netns", "add", f"sf-{node}"], check=True)
            made.callback(subprocess.run, ["ip", "netns", "del", f"sf-{node}"], check=True)
        ends = ["link", "add", "sf-a", "netns", "sf-a", "type", "veth", "peer", "name", "sf-b", "netns", "sf-b"]
        subprocess.run(["ip", *ends], check=True)
        for node, address in NODES.items():
            subprocess.run(["ip", "-n", f"sf-{node}", "addr", "add", f"{address}/24", "dev", f"sf-{node}"], check=True)
            subprocess.run(["ip", "-n", f"sf-{node}", "link", "set", "lo", "up"], check=True)
            link(node, "up")
        yield


ROWS: dict[str, Callable[[Path], Iterator[Facts]]] = {
    row.__name__: row for row in (kills, sizes, nodes, cut, folder, stopped, two, frozen, ledger, agent, signals)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    shop = Path(tempfile.mkdtemp(prefix="elastic-"))
    for name, text in (("nets.py", NETS), ("watched.py", WATCHED), ("recipe.toml", RECIPE)):
        (shop / name).write_text(text)
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(shutil.rmtree, shop)
        afterwards.enter_context(network())
        afterwards.callback(lose_all)
        for name in arguments.rows or ROWS:
            for found in itertools.chain([{"machine": machine()}], ROWS[name](shop)):
                line = json.dumps({"row": name, **found})
                print(line, flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        print(line, file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
