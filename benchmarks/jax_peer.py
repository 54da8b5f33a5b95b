"""Cost of private gradients by jax_privacy, against JAX's ordinary step of the same network, compiled both.

    PYTHON -m benchmarks.jax_peer [--rounds 7]      # a Python that has jax_privacy (2.0.0 was measured)

The small CNN of 28 pixels (256 examples) and WRN-16-4 without weight standardisation (32 examples of 32 pixels), layer
for layer as `benchmarks.clipping` has them in PyTorch, one view. Both take turns in one process; a ratio is the median
over rounds. Prints JSON. Nothing else should run meanwhile.
"""

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax_privacy import clipping

Params = dict[str, Any]


def conv(params: Params, name: str, x: Any, fan_out: int, kernel: int, stride: int = 1, make: bool = False) -> Any:
    if make:
        key = jax.random.PRNGKey(len(params))
        scale = math.sqrt(2 / (kernel * kernel * x.shape[-1]))
        params[name] = {
            "w": scale * jax.random.normal(key, (kernel, kernel, x.shape[-1], fan_out)),
            "b": jnp.zeros(fan_out),
        }
    pad = [(kernel // 2, kernel // 2)] * 2
    numbers = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(x, params[name]["w"], (stride, stride), pad, dimension_numbers=numbers)
    return out + params[name]["b"]


def relu_norm(params: Params, name: str, x: Any, groups: int, make: bool = False) -> Any:
    if make:
        params[name] = {"w": jnp.ones(x.shape[-1]), "b": jnp.zeros(x.shape[-1])}
    rows, height, width, channels = x.shape
    grouped = jax.nn.relu(x).reshape(rows, height, width, groups, channels // groups)
    mean, spread = grouped.mean((1, 2, 4), keepdims=True), grouped.var((1, 2, 4), keepdims=True)
    normed = ((grouped - mean) / jnp.sqrt(spread + 1e-5)).reshape(x.shape)
    return normed * params[name]["w"] + params[name]["b"]


def linear(params: Params, name: str, x: Any, fan_out: int, make: bool = False) -> Any:
    if make:
        key = jax.random.PRNGKey(len(params))
        weight = jax.random.normal(key, (x.shape[-1], fan_out)) / math.sqrt(x.shape[-1])
        params[name] = {"w": weight, "b": jnp.zeros(fan_out)}
    return x @ params[name]["w"] + params[name]["b"]


def small_cnn(params: Params, x: Any, make: bool = False) -> Any:
    for stage, channels in enumerate((16, 32)):
        x = conv(params, f"conv{stage}", x, channels, 3, make=make)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = relu_norm(params, f"norm{stage}", x, 16, make)
    return linear(params, "out", x.reshape(len(x), -1), 10, make)


def wrn_16_4(params: Params, x: Any, make: bool = False) -> Any:
    x = conv(params, "stem", x, 16, 3, make=make)
    for group, channels in enumerate((64, 128, 256)):
        for index in range(2):
            name, stride = f"{group}-{index}", 2 if group and not index else 1
            y = relu_norm(params, f"{name}-n1", x, 16, make)
            y = conv(params, f"{name}-c1", y, channels, 3, stride, make)
            y = conv(params, f"{name}-c2", relu_norm(params, f"{name}-n2", y, 16, make), channels, 3, make=make)
            if not index:
                x = conv(params, f"{name}-s", relu_norm(params, f"{name}-n3", x, 16, make), channels, 1, stride, make)
            x = x + y
    return linear(params, "out", relu_norm(params, "last", x, 16, make).mean((1, 2)), 10, make)


def measure(name: str, network: Callable[..., Any], shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    images = jax.random.normal(jax.random.PRNGKey(0), shape)
    labels = jax.random.randint(jax.random.PRNGKey(1), shape[:1], 0, 10)
    params: Params = {}
    network(params, images[:1], make=True)

    def loss(params: Params, images: Any, labels: Any) -> Any:
        logged = jax.nn.log_softmax(network(params, images))
        return -jnp.take_along_axis(logged, labels[:, None], 1).mean()

    private = clipping.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    steps = {"ordinary": jax.jit(jax.grad(loss)), "jax_privacy": jax.jit(private)}
    runs = {key: functools.partial(step, params, images, labels) for key, step in steps.items()}
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    for key in runs:
        jax.block_until_ready(runs[key]())
    for _ in range(rounds):
        for key, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[key].append(time.perf_counter() - start)
    ratios = [own / plain for own, plain in zip(seconds["jax_privacy"], seconds["ordinary"], strict=True)]
    medians = {key: round(statistics.median(values), 4) for key, values in seconds.items()}
    return {"model": name, "examples": shape[0], "seconds": medians, "ratio": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    results = [
        measure("small-cnn", small_cnn, (256, 28, 28, 1), rounds),
        measure("wrn-16-4-no-ws", wrn_16_4, (32, 32, 32, 3), rounds),
    ]
    versions = {"jax": jax.__version__}
    print(json.dumps({"versions": versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
