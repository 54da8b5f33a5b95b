"""The membership audit of De et al. (2022), Appendix A.2: many models with one example z, as many without,
and an attacker who sees the loss on z alone; and its folder, which keeps what is trained already.
"""

import dataclasses
import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.accounting import accountants, formats
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing import toy_task
from sfumato.auditing.arguments import LEAST_TARGET, Keep, calibrated, require_levels, whole
from sfumato.auditing.bounds import audit_scores, new_split_seed, require_enough
from sfumato.auditing.parallel_models import CPU, Models
from sfumato.auditing.record import MembershipResult, Winner
from sfumato.auditing.toy_task import Losses, Setting, ToyTask, Try, choose, settings_of
from sfumato.clipping.clip import convolutions
from sfumato.data.sampling import poisson_batch
from sfumato.errors import InputError
from sfumato.json_record import pick
from sfumato.models.small import LeNet
from sfumato.randomness import derived, digest, key_from_seed, new_key
from sfumato.run_folder.files import lock, read_json, write_atomically
from sfumato.run_folder.launch import is_under_torchrun
from sfumato.torch_internals import set_own_threads
from sfumato.training.learner import pick_device
from sfumato.training.process import keep_freed_memory

_CHUNK = {"cpu": 8, "cuda": 256}
"""Models a side that are trained, and kept, together."""
_MOST_CHUNKS = 1000
_MOST, _MOST_VIEWS = 10**9, 1024
_SEED = 0
"""Public: of the initial weights, and of batches that are the same for all models."""
_SPLIT = "split_seed"


def audit_membership(
    *,
    epsilon: float,
    num_models: int,
    num_examples: int = 100,
    delta: float | None = None,
    data_root: Path | str | None = None,
    fixed_batches: bool = False,
    augmult: int = 0,
    num_steps: int | None = None,
    confidence: float = 0.999,
    output: Path | str | None = None,
    device: str = "auto",
    report: Callable[[str], None] = lambda text: None,
    keep: Keep = lambda scores, members: None,
) -> MembershipResult:
    """Trains LeNets on MNIST with one example z and without it, and tells them apart by the loss on z.

    Guarantee: if the product's step is the mechanism that its certificate states, `violated` is true
    with probability at most 1 - ``confidence`` for each of the two bounds that decide it.

    Args:
        epsilon: Noise is calibrated to it as for a run, z counted.
        num_models: On each side.
        num_examples: \\|D\\|, without z.
        delta: Default: 1 / \\|D\\|.
        data_root: Where MNIST lies; default: SFUMATO_DATA.
        fixed_batches: The paper's stricter reading: the same batches for all models, so that only noise
            is random. The claim is then that of the updates with z without any sampling.
        augmult: K, views of each image; 0: none.
        num_steps: T of every model; default: phase I tries both of Table 7.
        confidence: Of each bound.
        output: A folder that keeps what is trained, so that the same call goes on; only its owner reads it. Several
            processes that are given one folder share the work, on devices of one kind.
        device: Where sums are computed: "auto", "cpu", "cuda" or "cuda:N"; noise is drawn on the CPU.
        report: Is told how far it has come.
        keep: Is given minus the loss on z, and membership, of every model.

    Raises:
        InputError: If an argument is out of range, MNIST is missing, the models are too few for any bound above 0,
            or the folder is that of another audit.
    """
    if output is None and is_under_torchrun():
        raise InputError("processes share an audit in a folder: give --output, or leave out torchrun.")
    num_examples = whole("num_examples", num_examples, *toy_task.NUM_EXAMPLES)
    delta = 1 / num_examples if delta is None else delta
    require_levels(delta, confidence, epsilon, LEAST_TARGET)
    num_models, augmult = whole("num_models", num_models, 1, _MOST), whole("augmult", augmult, 0, _MOST_VIEWS)
    require_enough(num_models, num_models, confidence, delta)
    task = toy_task.mnist(num_examples, None if data_root is None else Path(data_root))
    if num_steps is not None:
        task = dataclasses.replace(task, num_steps=(whole("num_steps", num_steps, 1, _MOST),))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        network = LeNet(10)
    where = pick_device(device)
    audit = Audit(task, network, epsilon, delta, num_models, fixed_batches, augmult, report, where)
    return audit.run(confidence, None if output is None else Path(output), keep)


@dataclasses.dataclass(eq=False)
class Audit:
    """One audit of any task and network; `audit_membership` says what the fields are."""

    task: ToyTask
    network: torch.nn.Sequential
    epsilon: float
    delta: float
    num_models: int
    fixed_batches: bool = False
    augmult: int = 0
    report: Callable[[str], None] = lambda text: None
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._trained: list[int] = []  # numbers of models that this process trained

    def run(
        self, confidence: float, folder: Path | None = None, keep: Keep = lambda scores, members: None
    ) -> MembershipResult:
        """Both phases, and the judgement."""
        started = time.perf_counter()
        keep_freed_memory()
        cache = AuditCache(folder, self._settings(confidence))
        for setting in settings_of(self.task.num_steps):  # refused before anything is trained
            self.claim(setting)
        num_threads = torch.get_num_threads()
        # As many threads as PyTorch uses, each of which computes alone; one feeds a GPU.
        workers, own = (num_threads, 1) if self.device.type == "cpu" else (1, num_threads)
        threads = ThreadPoolExecutor(workers, initializer=set_own_threads, initargs=(own,))
        try:
            with convolutions("float32"):
                setting, num_choosing, distance = choose(
                    self.task.num_steps, self.num_models, lambda tries: self._tried(tries, cache, threads)
                )
                self.report(
                    f"chosen: z {setting.target}, learning rate {setting.learning_rate:g}, C "
                    f"{setting.clipping_norm:g}, {setting.num_steps} updates, noise multiplier "
                    f"{self.mechanism(setting).noise_multiplier:g}"
                )
                before = time.perf_counter()
                members, non_members = self._many(setting, cache, threads)
        finally:
            self._stopped.set()
            threads.shutdown(cancel_futures=True)
            torch.set_num_threads(num_threads)
        seconds, num_trained = time.perf_counter() - before, sum(self._trained)
        mechanism, claim = self.mechanism(setting), self.claim(setting)
        # Who has seen z loses less on it. A model that diverged has no loss: it is as if it had lost all.
        scores = -np.nan_to_num(np.array([*members, *non_members]), nan=math.inf)
        took_part = np.repeat([1, 0], [len(members), len(non_members)])
        keep(scores, took_part)
        found = audit_scores(
            scores,
            took_part,
            delta=self.delta,
            confidence=confidence,
            nominal_epsilon=accountants.epsilon(claim, self.delta).epsilon,
            mechanism=claim,
            split_seed=cache.split_seed,
        )
        return MembershipResult(
            **{**dict(found), "audit": "membership"},
            target_epsilon=self.epsilon,
            num_examples=len(self.task.images),
            **pick(self, "fixed_batches", "augmult", "num_models"),
            **pick(mechanism, "batch_size", "noise_multiplier"),
            num_claimed_steps=claim.num_steps,
            winner=Winner(**vars(setting), distance=distance),
            num_choosing_models=num_choosing,
            seconds=time.perf_counter() - started,
            models_per_second=num_trained / seconds if num_trained else None,
        )

    def mechanism(self, setting: Setting) -> Mechanism:
        """What every model runs: z is one of its examples."""
        count = len(self.task.images) + 1
        return calibrated(count, self.task.batch_size, setting.num_steps, self.epsilon, self.delta)

    def claim(self, setting: Setting) -> Mechanism:
        """What the attack is judged by. With batches that are fixed there is no sampling: the updates
        with z are Gaussian mechanisms, and the others do not touch z.

        Raises:
            InputError: If no fixed batch has z.
        """
        mechanism = self.mechanism(setting)
        batches = self.batches(setting)
        if batches is None:
            return mechanism
        with_target = sum(bool((batch == mechanism.num_examples - 1).any()) for batch in batches)
        if not with_target:
            raise InputError("no batch has z, so there is nothing to attack. Leave --fixed-batches out.")
        return mechanism.replace(batch_size=mechanism.num_examples, num_steps=with_target)

    def batches(self, setting: Setting) -> list[np.ndarray] | None:
        """The batches that are the same for all models, from a public seed; None where each draws its own."""
        if not self.fixed_batches:
            return None
        mechanism, key = self.mechanism(setting), key_from_seed(_SEED)
        numbers = range(1, setting.num_steps + 1)
        return [poisson_batch(mechanism, derived(key, "sampling", number)) for number in numbers]

    def _models(self, setting: Setting) -> Models:
        how = self.augmult, self.batches(setting), self._stopped, self.device
        return Models(self.task, setting, self.network, self.mechanism(setting), *how)

    def _settings(self, confidence: float) -> dict[str, Any]:
        """All that decides the losses, in JSON."""
        return {
            **pick(self, "epsilon", "delta", "num_models", "fixed_batches", "augmult"),
            "num_examples": len(self.task.images),
            "batch_size": self.task.batch_size,
            "num_steps": list(self.task.num_steps),
            "confidence": confidence,
            "images": digest([part.hex() for part in self.task.images.content()]),
            "network": str(self.network),
            "device": self.device.type,
        }

    def _tried(self, tries: Sequence[Try], cache: "AuditCache", threads: ThreadPoolExecutor) -> list[Losses]:
        """A round of phase I."""
        chunks = [(self._models(setting), f"choice-{_name(setting)}-{number}", more) for setting, number, more in tries]
        return self._losses("phase I", chunks, cache, threads)

    def _many(self, setting: Setting, cache: "AuditCache", threads: ThreadPoolExecutor) -> Losses:
        """Phase II."""
        self._trained.clear()
        models, size = self._models(setting), max(_CHUNK[self.device.type], -(-self.num_models // _MOST_CHUNKS))
        chunks = [
            (models, f"models-{_name(setting)}-{first:07}", min(size, self.num_models - first))
            for first in range(0, self.num_models, size)
        ]
        inside, outside = zip(*self._losses("phase II", chunks, cache, threads), strict=True)
        return sum(inside, []), sum(outside, [])

    def _losses(
        self, phase: str, chunks: list[tuple[Models, str, int]], cache: "AuditCache", threads: ThreadPoolExecutor
    ) -> list[Losses]:
        """Of each chunk, in order: of as many members as non-members. What another process trains is waited for, and
        trained here if that process ends.
        """

        def losses_of(number: int) -> list[float] | None:
            models, name, a_side = chunks[number]

            def train() -> list[float]:
                keys = [new_key() for _ in range(2 * a_side)]
                trained = models.trained_losses(keys, [True] * a_side + [False] * a_side)
                self._trained.append(2 * a_side)
                return trained

            return cache.losses(name, 2 * a_side, train)

        found: list[list[float] | None] = [None] * len(chunks)
        told = started = time.perf_counter()
        while left := [number for number, losses in enumerate(found) if losses is None]:
            for number, losses in zip(left, threads.map(losses_of, left), strict=True):
                found[number] = losses
                if time.perf_counter() - told > 10:
                    told = time.perf_counter()
                    done = len(chunks) - found.count(None)
                    self.report(formats.progress(f"{phase}, parts of the audit", done, len(chunks), told - started))
            if None in found:
                time.sleep(1)
        return [(each[:a_side], each[a_side:]) for each, (_, _, a_side) in zip(found, chunks, strict=True) if each]


def _name(setting: Setting) -> str:
    """In names of files: models of one setting are never taken for those of another."""
    parts = setting.target, f"{setting.learning_rate:g}", f"{setting.clipping_norm:g}", str(setting.num_steps)
    return "-".join(parts).replace(" ", "-")


class AuditCache:
    """Losses by the name of their chunk, on disk if a folder is given.

    Several processes may work in one folder: each chunk is trained by one of them, and one that an interrupt cut short
    is trained anew with other randomness. All judge the same losses by the same split.

    Args:
        folder: Made with mode 0700; None: nothing outlives the process.
        settings: All that decides the losses.

    Raises:
        InputError: If the folder is that of an audit with other settings, or holds something else.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        self.folder, self.split_seed = folder, new_split_seed()
        if folder is None:
            return
        path = folder / "settings.json"
        if folder.exists() and not path.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} holds something else, and no membership audit. Choose another --output.")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # of several processes one says which audit it is
            if path.stat().st_size == 0:
                file.write(json.dumps({**settings, _SPLIT: self.split_seed}))
        held = read_json(path)
        others = [key for key in settings if held.get(key) != settings[key]]
        if others or _SPLIT not in held:
            raise InputError(
                f"{folder} holds an audit with other settings ({', '.join(others)}). Give those again, or choose "
                "another --output."
            )
        self.split_seed = held[_SPLIT]

    def losses(self, name: str, count: int, train: Callable[[], list[float]]) -> list[float] | None:
        """Those of a chunk: as they were kept, or trained now; None while another process trains them.

        Raises:
            InputError: If its file is damaged.
        """
        if self.folder is None:
            return train()
        path, lock_file = self.folder / f"{name}.json", self.folder / f"{name}.lock"
        if not path.exists():
            with lock_file.open("w") as held:
                if not lock(held.fileno(), lock_file):
                    return None
                if not path.exists():  # another process may have ended between
                    # Python's own spelling of numbers that JSON has not: a model may diverge.
                    write_atomically(path, json.dumps(train()).encode(), 0o600)
        found: list[float] = read_json(path)
        if len(found) != count:
            raise InputError(f"{path} is damaged. Delete it: its models are then trained anew.")
        lock_file.unlink(missing_ok=True)
        return found
