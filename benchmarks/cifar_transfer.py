"""A network pre-trained on CIFAR-100, fine-tuned privately on CIFAR-10 (De et al. 2022, Table 19's path).

    python -m benchmarks.cifar_transfer DEST [--epsilon 1] [--ways classifier norms all scratch]

pre-trains WRN-16-4 without privacy: first on images of 16 x 16 pixels, which cost a quarter, then on
32 x 32; in all about an hour of one core. Then it fine-tunes on CIFAR-10. What is finished in DEST is
not done again. Prints one line of JSON for each run.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.halves import train

_NETWORK = '[model]\nname = "wide_resnet"\noptions = { depth = 16, width = 4 }\n'
# Mean and spread of CIFAR-100: public, and what the weights were made for.
_NORMALISATION = "mean = [0.5071, 0.4865, 0.4409]\nstd = [0.2673, 0.2564, 0.2762]\n"
_PRETRAINING = """
[augmentation]
kind = "crop_flip"
augmult = 1
padding = {padding}
[optimizer]
learning_rate = {learning_rate}
momentum = 0.9
nesterov = true
weight_decay = 5e-4
schedule = "cosine"
warmup_steps = {warmup}
[training]
batch_size = 128
num_steps = {steps}
precision = "bf16"
evaluate_every = {steps}
"""
_WAYS = {
    "classifier": ('trainable = "classifier"\n', ""),
    "norms": (
        'trainable = "norms"\n',
        '[augmentation]\nkind = "none"\naugmult = 0\n[optimizer]\nlearning_rate = 2.0\n'
        "[training]\nbatch_size = 4096\nnum_steps = {steps}\n",
    ),
    "all": (
        'trainable = "all"\n',
        '[augmentation]\nkind = "none"\naugmult = 0\n[optimizer]\nlearning_rate = 2.0\n'
        "[training]\nbatch_size = 4096\nnum_steps = {steps}\n",
    ),
    "scratch": (
        "",
        '[augmentation]\nkind = "none"\naugmult = 0\n[optimizer]\nlearning_rate = 2.0\n'
        "[training]\nbatch_size = 4096\nnum_steps = {steps}\n",
    ),
}


def pretrain(dest: Path, steps: tuple[int, int]) -> Path:
    """The run folder of the public network, trained where it is not there yet."""
    small, large = dest / "pretrained-16", dest / "pretrained-32"
    data = '[data]\nname = "cifar100"\n' + _NORMALISATION
    stages = (
        (small, "image_size = 16\n", "", {"padding": 2, "learning_rate": 0.1, "warmup": 200, "steps": steps[0]}),
        (
            large,
            "",
            f'init_from = "{small}"\npretrained_on = "CIFAR-100 at 16 pixels"\ntrainable = "all"\n',
            {"padding": 4, "learning_rate": 0.05, "warmup": 50, "steps": steps[1]},
        ),
    )
    for folder, size, weights, numbers in stages:
        if not (folder / "result.json").exists():
            recipe = dest / f"{folder.name}.toml"
            recipe.write_text(data + size + _NETWORK + weights + _PRETRAINING.format(**numbers))
            facts = train(str(recipe), "--non-private", output=folder)
            found = {"stage": folder.name, "accuracy": facts["accuracy"], "seconds": facts["wall_seconds"]}
            print(json.dumps(found), flush=True)
    return large


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--pretraining-steps", nargs=2, type=int, default=(2400, 900), metavar=("AT_16", "AT_32"))
    parser.add_argument("--steps", type=int, default=60, help="private updates, but for the classifier alone")
    args = parser.parse_args()
    args.dest.mkdir(parents=True, exist_ok=True)
    public = pretrain(args.dest, tuple(args.pretraining_steps))
    for way in args.ways:
        folder = args.dest / f"{way}-epsilon-{args.epsilon:g}"
        if (folder / "result.json").exists():
            print(f"{folder} is there", file=sys.stderr)
            continue
        trainable, rest = _WAYS[way]
        weights = "" if way == "scratch" else f'init_from = "{public}"\npretrained_on = "CIFAR-100"\n'
        recipe = args.dest / f"{way}.toml"
        recipe.write_text(
            '[data]\nname = "cifar10"\n'
            + _NORMALISATION
            + _NETWORK
            + weights
            + trainable
            + f"[privacy]\ntarget_epsilon = {args.epsilon}\ndelta = 1e-5\n"
            + rest.format(steps=args.steps)
        )
        facts = train(str(recipe), output=folder)
        found = {key: facts[key] for key in ("epsilon", "accuracy", "accuracy_last")}
        print(json.dumps({"way": way, **found, "seconds": facts["wall_seconds"]}), flush=True)


if __name__ == "__main__":
    main()
