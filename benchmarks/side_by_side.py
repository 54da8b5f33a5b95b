"""How much faster do the models of a membership audit train side by side than one at a time?

    python -m benchmarks.side_by_side [--num-models 256] [--num-steps 5] [--repeats 3]

LeNet on 100 MNIST digits and z, B = 64 by Poisson sampling, noise as in an audit. One at a time means
the product's step in a loop, with as many threads as PyTorch takes. Both train the same models, in turn; the median of
each is told, and that they end at the same parameters.

The arithmetic limit is the time in which this machine would do the multiplications of ordinary gradients of the
same examples (forward and backward, as PyTorch counts them), at the rate of one large float32 product.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import machine
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing.parallel_models import Models
from sfumato.auditing.toy_task import Setting, ToyTask, mnist
from sfumato.data.sampling import poisson_batch
from sfumato.models.small import LeNet
from sfumato.randomness import derived, key_from_seed
from sfumato.torch_internals import set_own_threads
from sfumato.training.process import keep_freed_memory
from sfumato.training.step import draw

RATE = 0.5
AT_ONCE = 2
"""Models that an audit computes together: 128 examples."""


def one_at_a_time(
    task: ToyTask, network: torch.nn.Sequential, models: Models, keys: list[bytes], took: list[bool]
) -> list[dict[str, torch.Tensor]]:
    mechanism, views, found = models.mechanism, models.views, []
    images = task.with_target("blank")
    last = torch.arange(len(images)) == len(images) - 1
    parts = {each: dataclasses.replace(images, readable=images.readable & (each | ~last)) for each in (False, True)}
    begin = {name: value.detach().clone() for name, value in network.named_parameters()}
    parameters = dict(network.named_parameters())
    for key, takes_part in zip(keys, took, strict=True):
        with torch.no_grad():
            for name, value in begin.items():
                parameters[name].copy_(value)
        for number in range(1, mechanism.num_steps + 1):
            indices = poisson_batch(mechanism, derived(key, "sampling", number))
            view, model = derived(key, "augmentation", number), derived(key, "model", number)
            randomness = draw(indices, views, view, model)
            grad_sum, _ = models.step.collect(parts[takes_part], parameters, randomness)
            with torch.no_grad():
                flat = torch.cat([value.flatten() for value in grad_sum.values()])
                private = models.step.release(flat, derived(key, "noise", number))
                torch.nn.utils.vector_to_parameters(
                    torch.nn.utils.parameters_to_vector(parameters.values()) - RATE * private, parameters.values()
                )
        found.append({name: value.detach().clone() for name, value in parameters.items()})
    with torch.no_grad():
        for name, value in begin.items():
            parameters[name].copy_(value)
    return found


def side_by_side(
    models: Models, keys: list[bytes], took: list[bool], threads: ThreadPoolExecutor
) -> list[dict[str, torch.Tensor]]:
    def one(first: int) -> list[dict[str, torch.Tensor]]:
        part = slice(first, first + AT_ONCE)
        stacked = models.train(keys[part], took[part])
        return [{name: value[i] for name, value in stacked.items()} for i in range(len(keys[part]))]

    return [each for part in threads.map(one, range(0, len(keys), AT_ONCE)) for each in part]


def flops_of_an_example(network: torch.nn.Sequential, example: torch.Tensor) -> float:
    """Of an ordinary gradient."""
    counter = FlopCounterMode(display=False)
    with counter:
        network(example[None]).sum().backward()
    network.zero_grad(set_to_none=True)
    return float(counter.get_total_flops())


def flops_per_second(size: int = 2048, repeats: int = 10) -> float:
    """Of a large float32 product, with all threads: the best of some."""
    first, second = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        first @ second
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-models", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    keep_freed_memory()  # as an audit does
    task, mechanism = mnist(100, None), Mechanism(101, 64, 2.0, arguments.num_steps)
    torch.manual_seed(0)
    network = LeNet(10)
    models = Models(task, Setting("blank", RATE, 1.0, arguments.num_steps), network, mechanism)
    keys = [key_from_seed(seed) for seed in range(arguments.num_models)]
    took = [seed % 2 == 0 for seed in range(arguments.num_models)]
    count = torch.get_num_threads()
    seconds: dict[str, list[float]] = {"one at a time": [], "side by side": []}
    for _ in range(arguments.repeats):
        began = time.perf_counter()
        alone = one_at_a_time(task, network, models, keys, took)
        seconds["one at a time"].append(time.perf_counter() - began)
        began = time.perf_counter()
        with ThreadPoolExecutor(count, initializer=set_own_threads, initargs=(1,)) as threads:
            together = side_by_side(models, keys, took, threads)
        seconds["side by side"].append(time.perf_counter() - began)
        torch.set_num_threads(count)
    apart = max(float((a[name] - b[name]).abs().max()) for a, b in zip(alone, together, strict=True) for name in a)
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    num_gradients = arguments.num_models * arguments.num_steps * mechanism.batch_size
    limit = num_gradients * flops_of_an_example(network, task.images.batch(torch.tensor([0]))[0]) / flops_per_second()
    found = {
        "models": arguments.num_models,
        "updates of each": arguments.num_steps,
        "threads": count,
        "seconds": {name: round(each, 2) for name, each in middle.items()},
        "all seconds": {name: [round(value, 2) for value in each] for name, each in seconds.items()},
        "times as fast": round(middle["one at a time"] / middle["side by side"], 2),
        "gradients a second": round(num_gradients / middle["side by side"]),
        "arithmetic limit, seconds": round(limit, 3),
        "times the arithmetic limit": round(middle["side by side"] / limit, 1),
        "largest difference of a parameter": apart,
        "machine": machine(),
    }
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
