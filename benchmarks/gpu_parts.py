"""The parts of `benchmarks.gpu`. They know the product by its public names alone."""

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.io import savemat

from benchmarks.gpu_steps import FORMATS, Case, Findings, beside, case, crops_and_flips, ordinary_off, prepared
from sfumato import Ema, Mechanism, PrivateLoop, audit_membership

PRECISIONS = ("bf16", "tf32", "float32")
METHODS = ("loop", "grouped", "unfold", "conv_ghost")  # of a convolution, as `GradFn.methods` names them
# Convolutions of WRN-16-4: channels in and out, taps, size of the image, stride.
SITES = ("conv-64-64-3-32-1", "conv-128-128-3-16-1", "conv-256-256-3-8-1", "conv-64-128-3-32-2", "conv-128-256-1-16-2")
# Microbatches that fill a card: network, examples, views.
MICROBATCHES = (("wrn-16-4", 128, 16), ("wrn-16-4", 512, 1), ("wrn-16-4", 256, 4), ("wrn-16-4", 512, 16))
FORCED = ("wrn-10-4-smooth", 4, 4)  # by each method
AGREES = (("wrn-16-4", 4, 4), ("wrn-16-4-smooth", 4, 4), ("wrn-16-4-norm-first", 3, 1), ("vit-tiny-64", 3, 0), FORCED)
LARGER = (("wrn-40-4", 128, 16), ("nf-resnet-50", 64, 4), ("vit-b-16", 64, 0))


def ceilings(out: Findings) -> None:
    """What the card does at most: bytes copied, and products of matrices."""
    with out.about(copy="device to device") as found:
        source, target = torch.randn(2, out.size(2**30, 2**22), device=out.device)
        found(tb_per_second=2 * source.nbytes / found.cost(lambda: target.copy_(source)) / 1e12)
    size = out.size(8192, 256)
    for precision in PRECISIONS:
        with out.about(product=precision) as found:
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            pair = torch.randn(2, size, size, device=out.device, dtype=dtype)
            found(tflop_per_second=2 * size**3 / found.cost(partial(torch.mm, *pair)) / 1e12)


def agrees(out: Findings) -> None:
    """Whether engine "graph" is taken, and how far private sums and norms lie from those of a loop over single images
    in float64 on the CPU: with the methods that are chosen, then with each. Where values cross a kink in low precision,
    ordinary gradients are as far off; "smooth" networks have none.
    """
    taken = []
    for name, examples, views in AGREES:
        with out.about(network=name, views=views) as found:
            model, inputs, labels = case(out, name, examples, views)
            double = copy.deepcopy(model).cpu().double(), inputs.cpu().double(), labels.cpu()
            true = prepared(found, double, engine="reference")(*double[1:])
            for precision in PRECISIONS:
                compare = partial(compared, (model, inputs, labels), true, precision=precision)
                with found.about(precision=precision, method="chosen") as one:
                    one(ordinary_off=ordinary_off((model, inputs, labels), double, precision))
                    chosen = compare(one)
                    taken += [(one, compare, chosen)] if name == FORCED[0] else []
    for memory_format, (found, compare, chosen), method in product(list(FORMATS)[: out.size(2, 1)], taken, METHODS):
        with found.about(memory_format=memory_format, method=method) as one:
            compare(one, methods=forced(chosen, memory_format, method))


def compared(held: Case, true: Any, out: Findings, **settings: Any) -> dict[str, str]:
    """The methods of a private sum, once it was compared with the true one."""
    grad_fn = prepared(out, held, **settings)
    if not set(settings.get("methods", {}).values()) <= set(grad_fn.methods.values()):
        return grad_fn.methods  # no convolution takes the method that was asked for
    sums = [grad_fn(*held[1:]), grad_fn(*held[1:]), true]
    one, again, exact = (torch.cat([part.flatten() for part in each.grad_sum.values()]).cpu().double() for each in sums)
    norms_off = float((sums[0].grad_norms.cpu() / true.grad_norms - 1).abs().max())
    out(sum_off=float((one - exact).norm() / exact.norm()), norms_off=norms_off, again_equal=torch.equal(one, again))
    return grad_fn.methods


def forced(chosen: dict[str, str], memory_format: str, method: str) -> dict[str, str]:
    """One method for all convolutions, where it fits."""
    convolutions = [key for key in chosen if "conv" in key.rpartition(":")[2] and key.endswith(".weight")]
    return dict.fromkeys(convolutions, method) | {"memory_format": memory_format}


def update(out: Findings) -> None:
    """Whole updates of De et al. (2022), Table 12, on random pixels: by a hand-written loop, and by `sfumato train`."""
    size = None
    with out.about(loop="own", precision="bf16") as found:
        size = own_updates(found)
    with out.about(loop="product", precision="bf16") as found:
        product_updates(found, size)
    with out.about(loop="own", precision="tf32") as found:
        own_updates(found)


def own_updates(out: Findings) -> int | None:
    """The microbatch's size; seconds by phase are found."""
    count, batch_size, views = out.size(50_000, 40), out.size(4096, 8), out.size(16, 2)
    model, _, labels = case(out, "wrn-16-4", count, 0)
    pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, device=out.device)
    parameters = dict(model.named_parameters())
    sgd, ema = torch.optim.SGD(parameters.values(), lr=2.0), Ema(parameters, [0.9999])

    def load(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return crops_and_flips(pixels[rows], views), labels[rows]

    def move(private_grad: dict[str, torch.Tensor], step: int) -> None:
        for name, parameter in parameters.items():
            parameter.grad = private_grad[name]
        sgd.step()
        ema.update(parameters, step)

    one = load(torch.arange(1, device=out.device))
    grad_fn = prepared(out, (model, *one), batch_size=batch_size, precision=out.facts["precision"])
    mechanism = Mechanism(count, batch_size, noise_multiplier=10.0, num_steps=875)
    state = {"model": model, "optimizer": sgd, "averages": ema}
    with tempfile.TemporaryDirectory() as folder:
        loop = PrivateLoop(f"{folder}/run", mechanism, clipping_norm=1.0, delta=1e-5, state=state)
        updates = iter(loop)
        for step in range(1, out.size(5, 3)):
            update, sampling = out.took(partial(next, updates))  # with a checkpoint, where one is due
            indices = update.indices.to(out.device)
            sums, gradient = out.took(partial(grad_fn.sum_over, load, indices))
            private_grad, ledger_and_noise = out.took(partial(update.release, sums))
            _, moving = out.took(partial(move, private_grad, step))
            phases = {"sampling": sampling, "gradient": gradient, "ledger_and_noise": ledger_and_noise}
            out(step=step, examples=len(indices), phases={**phases, "update": moving})
        loop.close()
    if out.device == "cuda":
        with out.about(profile="microbatch") as found:
            profiled(found, partial(grad_fn, *load(indices[: grad_fn.microbatch_size])))
    return grad_fn.microbatch_size


def profiled(out: Findings, call: Callable[[], Any]) -> None:
    """The operations and the kernels that take longest: how often they run, and the device's seconds."""
    call()
    with torch.profiler.profile(record_shapes=True) as profile:
        call()
        torch.cuda.synchronize()
    kinds: dict[str, list[Any]] = {"operations": [], "kernels": []}
    for each in profile.key_averages(group_by_input_shape=True):
        kind = "operations" if each.device_type == torch.autograd.DeviceType.CPU else "kernels"
        kinds[kind].append(
            [each.key[:100], str(each.input_shapes)[:100], each.count, each.self_device_time_total / 1e6]
        )
    for kind, found in kinds.items():
        out(**{kind: sorted(found, key=lambda row: row[3], reverse=True)[:25]})


def ranks(out: Findings) -> None:
    """Updates by one process, and by one rank of NCCL under torchrun, in turns: what the seam for many ranks costs."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--no-python"]
    size = out.size(512, 8)  # so large that the GPU is the limit, not its host
    for name, launcher in 2 * (("none", []), ("torchrun", torchrun)):
        with out.about(loop="product", precision="bf16", launcher=name, microbatch_size=size) as found:
            product_updates(found, size, launcher)


def product_updates(out: Findings, microbatch_size: int | None, launcher: Iterable[str] = ()) -> None:
    """On made-up files of SVHN, whose checksums are not looked at: its images have the shape of CIFAR-10's."""
    started = "from torchvision.datasets import SVHN; SVHN._check_integrity = lambda self: True"
    started += "; from sfumato import cli; cli.main()"
    settings = "data.name=svhn data.split=train data.num_examples=50000 privacy.target_epsilon= training.num_steps=6"
    settings += " training.precision=bf16 training.evaluate_every=6 training.checkpoint_every=6"
    settings += " training.norm_histogram_every=1"
    settings += f" training.microbatch_size={microbatch_size or 'auto'}"
    if out.small:
        settings += " model.options.depth=10 model.options.width=1 augmentation.augmult=2 training.batch_size=8"
    with tempfile.TemporaryDirectory() as folder:
        draw = np.random.default_rng(0).integers
        for part, count in (("train", 73_257), ("test", 26_032)):
            images = draw(256, size=(32, 32, 3, count), dtype=np.uint8)
            savemat(f"{folder}/{part}_32x32.mat", {"X": images, "y": draw(1, 11, size=(count, 1))})
        command = [*launcher, sys.executable, "-c", started, "train", "de2022/cifar10-wrn-16-4-eps-1", "--json"]
        command += ["--device", out.device, "--data-root", folder, "--output", f"{folder}/run"]
        command += [part for setting in settings.split() for part in ("--set", setting)]
        torch.cuda.empty_cache()  # the other process needs it
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
        out(**{key: json.loads(done.stdout)[key] for key in ("seconds", "images_per_second")})
        lines = Path(folder, "run", "owner", "metrics_private.jsonl").read_text("utf-8").splitlines()
    for before, line in pairwise([{"phases": {}}, *map(json.loads, lines)]):  # they add up over steps
        phases = {name: seconds - before["phases"].get(name, 0.0) for name, seconds in line["phases"].items()}
        out(step=line["step"], phases=phases)


def sites(out: Findings) -> None:
    """Each method of per-example gradients, for one convolution alone."""
    for precision, name in product(("bf16", "tf32"), SITES[: out.size(5, 1)]):
        with out.about(network=name, examples=256, views=16, precision=precision) as found:
            held = case(out, name, out.size(256, 2), out.size(16, 2))
            chosen = prepared(found, held, precision=precision).methods
            beside(found, held, [{"methods": forced(chosen, *each)} for each in product(FORMATS, METHODS[1:3])])


def engines(out: Findings) -> None:
    """Private steps of whole networks."""
    microbatches(out, MICROBATCHES, "bf16", engine="graph")
    microbatches(out, MICROBATCHES[:1], "tf32", engine="graph")
    microbatches(out, LARGER[: out.size(3, 0)], "bf16", engine="graph")


def compiled(out: Findings) -> None:
    """Ordinary and private steps, each as one compiled graph."""
    microbatches(out, MICROBATCHES[:1], "bf16", compile=True)


def func(out: Findings) -> None:
    """By torch.func, as others compute it."""
    for precision in ("float32", "tf32"):
        microbatches(out, (("wrn-16-4", 512, 1), ("wrn-16-4", 32, 16)), precision, engine="func")


def microbatches(out: Findings, networks: Iterable[tuple[str, int, int]], precision: str, **settings: Any) -> None:
    for name, examples, views in networks:
        with out.about(network=name, examples=examples, views=views, precision=precision, **settings) as found:
            beside(found, case(out, name, out.size(examples, 2), min(views, out.size(16, 2))), [settings])


def places(out: Findings) -> None:
    """How many images' norms are the same to the last bit at another place, and one's beside other images."""
    held = _, inputs, labels = case(out, "wrn-16-4", out.size(64, 4), out.size(16, 2))
    others = torch.cat([inputs[:1], torch.randn_like(inputs[1:])])
    for precision in PRECISIONS:
        with out.about(precision=precision, images=len(inputs)) as found:
            grad_fn = prepared(found, held, precision=precision)
            norms, again, beside_others = (grad_fn(rows, labels).grad_norms for rows in (inputs, inputs, others))
            moved = grad_fn(inputs.roll(1, 0), labels.roll(1)).grad_norms.roll(-1)
            found(again_equal=torch.equal(norms, again), beside_others_equal=bool(norms[0] == beside_others[0]))
            found(moved_equal=int((norms == moved).sum()), moved_off=float((moved / norms - 1).abs().max()))


def audit(out: Findings) -> None:
    """Models a second of the membership audit, on made-up digits: on the CPU, and on the card."""
    with tempfile.TemporaryDirectory() as folder:
        raw, draw = Path(folder, "MNIST", "raw"), np.random.default_rng(0).integers
        raw.mkdir(parents=True)
        for part, count in (("train", 60_000), ("t10k", 10_000)):
            for kind, most, shape in (("images-idx3", 256, (count, 28, 28)), ("labels-idx1", 10, (count,))):
                head = np.array([0x800 + len(shape), *shape], ">i4").tobytes()
                (raw / f"{part}-{kind}-ubyte").write_bytes(head + draw(most, size=shape, dtype=np.uint8).tobytes())
        for device, models in {"cpu": out.size(16, 12), out.device: out.size(1024, 12)}.items():
            with out.about(device=device) as found:
                claim: dict[str, Any] = {"epsilon": 8.0, "confidence": 0.9, "num_steps": 50}
                result = audit_membership(num_models=models, device=device, data_root=folder, **claim)
                found(models_per_second=result.models_per_second, seconds=result.seconds)
