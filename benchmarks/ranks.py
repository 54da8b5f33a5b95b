"""What many ranks cost and hold: whole updates through the command, on random images.

    python -m benchmarks.ranks weak [--rounds 3] [--four]
    python -m benchmarks.ranks beside --other CHECKOUT [--rounds 10]
    python -m benchmarks.ranks agree
    python -m benchmarks.ranks state

`weak`: WRN-16-4, 32 examples a core, all drawn at each update: one process on one core, and two ranks under torchrun on
a core each, in turns; with --four, four ranks on the two cores.
Prints the median seconds of an update, the efficiency (of one over of two), how much of a core others had meanwhile,
and what `sfumato.scaling.cost` computes from the one process's time. Nothing else should run.

`beside`: one process of this code, and one of another checkout at the same time, on a core each, which they change.

`agree`: how far the parameters of seeded runs on 1, 2 and 4 ranks lie apart, relative: 20 updates in float64 and one in
float32, with state whole and sharded, at other microbatch sizes.

`state`: bytes that a rank holds of the parameters' vector, the optimizer and two averages, on the meta device, beside
the count 4 P + 4 P (m + 2) / w, P parameters, m moments, w ranks.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.machine import machine
from sfumato.accounting.mechanism import Mechanism
from sfumato.config import parse
from sfumato.data.catalogue import Facts
from sfumato.models import registry
from sfumato.planning.resolve import resolve
from sfumato.run_folder.checkpoint import Checkpoints
from sfumato.scaling.cost import Price, noise_seconds_per_million
from sfumato.training.state import State
from sfumato.training.world import Ranks, World

HERE = Path(__file__).parents[1]
EACH = 32
STEPS = 14
NETWORK, SHAPE = {"depth": 16, "width": 4}, {"image_size": 32, "channels": 3, "num_classes": 2}
SETTINGS = {
    "model.name": "wide_resnet",
    "model.options": NETWORK,
    "augmentation.kind": "none",
    "augmentation.augmult": 0,
    "privacy.noise_multiplier": 1.0,
    "training.num_steps": STEPS,
    "training.evaluate_every": STEPS,
    "training.checkpoint_every": 1000,
    "training.microbatch_size": 8,
    "training.engine": "graph",
    "training.norm_histogram_every": 1,  # a line of metrics_private.jsonl for each update
    "run.seed": 3,
}
PINNED = 'exec taskset -c $((${LOCAL_RANK:-0} % 2)) "$0" -m sfumato "$@"'
BANDWIDTH = 1.0  # GB a second: two ranks here add up 2.75 million numbers in 10 ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("weak", "beside", "agree", "state"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--four", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.what == "weak":
            rows = weak(Path(place), options.rounds, options.four)
        elif options.what == "beside":
            rows = beside(Path(place), options.rounds, options.other.resolve())
        else:
            rows = agree(Path(place)) if options.what == "agree" else state()
    for row in [*rows, {"machine": machine()}]:
        print(json.dumps(row), flush=True)


def images(folder: Path, count: int) -> Path:
    """Random ones to train on, and eight to be judged by."""
    random = np.random.default_rng(0)
    for part, number in (("train", count), ("valid", 8)):
        for place in range(number):
            own = folder / part / str(place % 2) / f"{place}.png"
            own.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(own)
    return folder


def words(folder: Path, output: Path, settings: dict[str, Any]) -> list[str]:
    chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={_toml(value)}")]
    return ["train", "image-folder", "--data-root", str(folder), "--output", str(output), *chosen]


def _toml(value: Any) -> str:
    return f"{{{', '.join(f'{k} = {v}' for k, v in value.items())}}}" if isinstance(value, dict) else json.dumps(value)


def environment(checkout: Path = HERE) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}", "OMP_NUM_THREADS": "1"}


def trained(command: list[str], ranks: int) -> None:
    """Runs the command: alone on core 0, or on a core for each of so many ranks."""
    one = ["bash", "-c", PINNED, sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--no-python"]
    several = [*torchrun, *one, *command, "--resume"]
    subprocess.run([*one, *command] if ranks == 1 else several, env=environment(), check=True, capture_output=True)


def seconds_of_update(output: Path) -> float:
    """The median over updates, evaluations and checkpoints left out."""
    lines = [json.loads(line) for line in (output / "owner" / "metrics_private.jsonl").read_text().splitlines()]
    others = [sum(line["phases"].get(name, 0.0) for name in ("evaluation", "checkpoint")) for line in lines]
    at = [line["seconds"] - other for line, other in zip(lines, others, strict=True)]
    return statistics.median(after - before for before, after in zip(at[2:-2], at[3:-1], strict=True))


def busy() -> tuple[float, float]:
    """Seconds of all processors' time so far: of everybody, and of this process's ended children and itself."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    everybody = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return everybody, sum(use.ru_utime + use.ru_stime for use in own)


def beside(place: Path, rounds: int, other: Path) -> list[dict[str, Any]]:
    folder, rows = images(place / "images", EACH), []
    for number in range(rounds):
        row: dict[str, Any] = {}
        started = []
        for core, (name, checkout) in enumerate((("this", HERE), ("other", other))):
            output = place / f"{name}-{number}"
            command = words(folder, output, SETTINGS | {"training.batch_size": EACH})
            pinned = ["taskset", "-c", str((core + number) % 2), sys.executable, "-m", "sfumato", *command]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append((name, output, subprocess.Popen(pinned, env=environment(checkout), **quiet)))
        for name, output, process in started:
            if process.wait():
                raise RuntimeError(f"{name} ended with {process.returncode}")
            row[name] = round(seconds_of_update(output), 4)
        rows.append(row | {"ratio": round(row["this"] / row["other"], 3)})
    return [*rows, {"median ratio": statistics.median(row["ratio"] for row in rows)}]


def weak(place: Path, rounds: int, four: bool) -> list[dict[str, Any]]:
    folders = {count: images(place / f"images-{count}", EACH * count) for count in (1, 2, 4)}
    kinds = {"one": 1, "two": 2} | ({"four": 4} if four else {})
    rows = []
    for number in range(rounds):
        row: dict[str, Any] = {"round": number}
        for name, ranks in list(kinds.items())[:: 1 if number % 2 else -1]:
            output, before, started = place / f"{name}-{number}", busy(), os.times().elapsed
            settings = SETTINGS | {"training.batch_size": EACH * ranks}
            trained(words(folders[ranks], output, settings), ranks)
            everybody, own = (after - earlier for after, earlier in zip(busy(), before, strict=True))
            row[name] = round(seconds_of_update(output), 4)
            row[f"others_{name}"] = round((everybody - own) / (os.times().elapsed - started), 3)
        rows.append(row | {"efficiency": round(row["one"] / row["two"], 3)})
    medians = {name: statistics.median(row[name] for row in rows) for name in kinds}
    efficiency = statistics.median(row["efficiency"] for row in rows)
    noise = noise_seconds_per_million()
    parameters = sum(
        value.numel() for value in registry.build("wide_resnet", **SHAPE, options=NETWORK, seed=0).parameters()
    )
    known = {"num_parameters": parameters, "noise_seconds_per_million": noise, "bandwidth": BANDWIDTH}
    throughput = EACH / (medians["one"] - parameters * noise / 1e6)
    computed = {}
    for name, ranks in kinds.items():
        price = Price(throughput=throughput * min(1, 2 / ranks), devices=ranks, **known)
        parts = price.update_seconds(Mechanism(EACH * ranks, EACH * ranks, 1.0, 1))
        computed[name] = round(sum(part or 0.0 for part in parts.values()), 4)
    return [*rows, {"median": medians, "efficiency": efficiency, "computed": computed}]


DOUBLE = """
from torch import nn

class Double(nn.Module):
    def __init__(self, num_classes, **options):
        super().__init__()
        head = nn.Linear(8192, num_classes)
        layers = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), head
        self.layers = nn.Sequential(*layers).double()

    def forward(self, images):
        return self.layers(images.double())
"""


def agree(place: Path) -> list[dict[str, Any]]:
    folder, rows = images(place / "images", 400), []
    (place / "nets.py").write_text(DOUBLE)
    os.environ["PYTHONPATH"] = str(place)
    common = {"training.batch_size": 64, "optimizer.momentum": 0.9, "run.seed": 3, "augmentation.augmult": 2}
    common |= {"privacy.noise_multiplier": 1.0, "augmentation.kind": "flip"}
    works = {
        "float64, 20 updates": {"model.name": "nets:Double", "training.num_steps": 20},
        "float32, 1 update": {"model.name": "small_cnn", "training.num_steps": 1},
    }
    for name, work in works.items():
        found: list[torch.Tensor] = []
        for number, (ranks, sharded, size) in enumerate(((1, 0, 32), (2, 0, 7), (2, 1, 32), (4, 0, 32), (4, 1, 5))):
            output = place / f"{name[:7]}-{number}"
            how = {"training.microbatch_size": size} | ({"training.shard_state": bool(sharded)} if sharded else {})
            command = [*words(folder, output, common | work | how), "--trust", "nets"]
            environment = {**os.environ, "PYTHONPATH": f"{HERE / 'src'}{os.pathsep}{place}", "OMP_NUM_THREADS": "1"}
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
            start = [sys.executable, "-m"] if ranks == 1 else torchrun
            subprocess.run([*start, "sfumato", *command, "--resume"], env=environment, check=True, capture_output=True)
            checkpoint = Checkpoints(output / "owner" / "checkpoints").newest()
            assert checkpoint is not None
            found.append(torch.cat([value.double().flatten() for value in checkpoint.state["model"].values()]))
            apart = float((found[-1] - found[0]).norm() / found[0].norm())
            rows.append({"of": name, "ranks": ranks, "sharded": bool(sharded), "microbatch": size, "apart": apart})
    return rows


class OneOf(Ranks):
    """A rank of many without the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.is_sharded = rank, size, size > 1

    def spread(self, vector: torch.Tensor) -> None:
        """Nobody is there."""


def state() -> list[dict[str, Any]]:
    rows = []
    for name in ("nf_resnet200", "timm:vit_large_patch16_224"):
        for optimizer, moments in (("sgd", 1), ("adamw", 2)):
            for size in (1, 8, 32):
                asked = {
                    "data": {"name": "imagenet"},
                    "model": {"name": "nf_resnet200"},
                    "optimizer": {"name": optimizer, "learning_rate": 1.0},
                    "ema": {"decay": [0.9, 0.99]},
                    "training": {"num_steps": 9},
                }
                if optimizer == "sgd":
                    asked["optimizer"]["momentum"] = 0.9
                recipe = resolve(parse(asked), Facts(1_281_167, 1000, 224, 3)).recipe
                with torch.device("meta"):
                    model = registry.build(name, image_size=224, channels=3, num_classes=1000, options={}, seed=0)
                    world: World = OneOf(0, size)
                    kept = State(model, recipe, world)
                    kept.update(torch.empty_like(kept.mine), 1, 1)
                held = [kept.flat.values, *kept.averages, *kept.optimizer.state[kept.mine].values()]
                count = sum(value.numel() for value in kept.parameters.values())
                counted = 4 * count + 4 * count * (moments + 2) / size
                measured = sum(value.numel() * value.element_size() for value in held)
                row = {"model": name, "parameters": count, "optimizer": optimizer, "ranks": size}
                rows.append(row | {"bytes": measured, "counted": round(counted), "ratio": round(measured / counted, 4)})
    return rows


if __name__ == "__main__":
    main()
