"""Which networks of timm train privately by name, which are refused, and why: one line each.

    python -m benchmarks.networks --output benchmarks/results/networks.jsonl [--only convnext,vit]

From each of timm's families (a module of its) the network with fewest parameters takes one private
update on 24 digits, as colour images of 64 pixels, or of the size that it insists on; with batch
normalisation, after `model.fix = "groupnorm"`. It ends "trained", by an engine; "refused", with the
one line that a user sees; or "died".
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 300  # seconds for one network


def smallest_of_each_family() -> dict[str, str]:
    """The network with fewest parameters of each of timm's modules."""
    import timm
    import torch
    from timm.models import _registry as registry

    found: dict[str, tuple[int, str]] = {}
    for name in timm.list_models():
        family = registry.model_entrypoint(name).__module__.rpartition(".")[2]
        try:
            with torch.device("meta"):
                size = sum(value.numel() for value in timm.create_model(name).parameters())
        except Exception as error:
            print(f"{name} cannot be counted: {error}", file=sys.stderr)
            continue
        if family not in found or size < found[family][0]:
            found[family] = size, name
    return {family: name for family, (_, name) in sorted(found.items())}


def train(name: str, image_size: int, fix: bool) -> tuple[int, str, str]:
    """One private update: exit status, the last line that a user sees, the engine."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.toml")
        changed = ', fix = "groupnorm"' if fix else ""
        recipe.write_text(
            f'data = {{ name = "digits", num_examples = 24, image_size = {image_size}, channels = 3 }}\n'
            f'model = {{ name = "timm:{name}"{changed} }}\n'
            "privacy = { noise_multiplier = 1.0, delta = 1e-3 }\n"
            "training = { num_steps = 1, batch_size = 4 }\n"
            "optimizer = { learning_rate = 0.1 }\n"
        )
        run = Path(folder, "run")
        command = [sys.executable, "-m", "sfumato", "train", str(recipe), "--output", str(run)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return 124, f"not done in {LIMIT} s", ""
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        engine = ""
        if done.returncode == 0:
            found = re.search(r'"engine": ?"(\w+)"', (run / "ledger.jsonl").read_text())
            engine = found[1] if found else ""
        return done.returncode, lines[-1] if lines else "", engine


def outcome(name: str) -> dict[str, object]:
    """How the network ends: at 64 pixels or else at its own size, as it is or else with
    `model.fix = "groupnorm"`.
    """
    import timm

    size, fix = 64, False
    status, line, engine = train(name, size, fix)
    if status == 2 and "mixes examples" not in line:
        size = (timm.get_pretrained_cfg(name, allow_unregistered=True).input_size or (3, 224, 224))[-1]
        status, line, engine = train(name, size, fix)
    if status == 2 and "model.fix=groupnorm" in line:
        fix = True
        status, line, engine = train(name, size, fix)
    kind = {0: "trained", 2: "refused"}.get(status, "died")
    facts = {"outcome": kind, "image_size": size, "fix": fix, "engine": engine}
    return {**facts, "line": "" if status == 0 else line}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    done = set()
    if args.output.exists():  # goes on where it was stopped
        done = {json.loads(line)["family"] for line in args.output.read_text().splitlines()}
    only = set(filter(None, args.only.split(",")))
    for family, name in smallest_of_each_family().items():
        if family in done or (only and family not in only):
            continue
        start = time.perf_counter()
        result = {"family": family, "name": name, **outcome(name), "seconds": round(time.perf_counter() - start, 1)}
        with args.output.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(result, flush=True)


if __name__ == "__main__":
    main()
