"""The membership audit of De et al. (2022), Appendix A.2: many models with one example z, as many without,
and an attacker who sees the loss on z alone.
"""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.accounting import accountants
from sfumato.accounting.calibration import solve_noise_multiplier
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing import problem as problems
from sfumato.auditing.arguments import levels, path_of, target, whole
from sfumato.auditing.bounds import audit_scores, require_enough
from sfumato.auditing.choice import Setting, choose, settings_of
from sfumato.auditing.kept import Kept
from sfumato.auditing.problem import Problem
from sfumato.auditing.record import MembershipResult, Winner
from sfumato.auditing.side_by_side import Models, Product
from sfumato.data.sampling import poisson_batch
from sfumato.errors import InputError
from sfumato.models.lenet import LeNet
from sfumato.randomness import derived, digest, key_from_seed
from sfumato.training.allocator import keep_freed_memory

_Losses = tuple[list[float], list[float]]
"""On z: of members, and of non-members."""
_CHUNK = 8
"""Models a side that are trained, and kept, together."""
_MOST_CHUNKS = 1000
_MOST, _MOST_VIEWS = 10**9, 1024
_SEED = 0
"""Public: of the initial weights, and of batches that are the same for all models."""


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
    report: Callable[[str], None] = lambda text: None,
    keep: Callable[[np.ndarray, np.ndarray], None] = lambda scores, members: None,
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
            processes that are given one folder share the work.
        report: Is told how far it has come.
        keep: Is given minus the loss on z, and membership, of every model.

    Raises:
        InputError: If an argument is out of range, MNIST is missing, the models are too few for any bound above 0,
            or the folder is that of another audit.
    """
    num_examples = whole("num_examples", num_examples, *problems.NUM_EXAMPLES)
    delta = 1 / num_examples if delta is None else delta
    delta, confidence, epsilon = levels(delta, confidence, target(epsilon))
    num_models, augmult = whole("num_models", num_models, 1, _MOST), whole("augmult", augmult, 0, _MOST_VIEWS)
    num_steps = None if num_steps is None else whole("num_steps", num_steps, 1, _MOST)
    if not isinstance(fixed_batches, bool | np.bool_):
        raise InputError(f"fixed_batches must be true or false, not {fixed_batches!r}.")
    folder = None if output is None else path_of("output", output)
    require_enough(num_models, num_models, confidence, delta)
    problem = problems.mnist(num_examples, None if data_root is None else path_of("data_root", data_root))
    if num_steps is not None:
        problem = dataclasses.replace(problem, num_steps=(num_steps,))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        network = LeNet(10)
    audit = Audit(problem, network, epsilon, delta, num_models, bool(fixed_batches), augmult, report)
    return audit.run(confidence, folder, keep)


class Audit:
    """One audit of any problem and network; `audit_membership` says what the arguments are."""

    def __init__(
        self,
        problem: Problem,
        network: torch.nn.Sequential,
        epsilon: float,
        delta: float,
        num_models: int,
        fixed_batches: bool = False,
        augmult: int = 0,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.problem, self.network = problem, network
        self.epsilon, self.delta, self.num_models = epsilon, delta, num_models
        self.fixed_batches, self.augmult, self.report = fixed_batches, augmult, report
        self._products: dict[float, Product] = {}
        self._mechanisms: dict[int, Mechanism] = {}  # by number of updates
        self._stopped = threading.Event()
        self._num_trained = 0  # in phase II

    def run(
        self,
        confidence: float,
        folder: Path | None = None,
        keep: Callable[[np.ndarray, np.ndarray], None] = lambda scores, members: None,
    ) -> MembershipResult:
        """Both phases, and the judgement."""
        started = time.perf_counter()
        keep_freed_memory()
        kept = Kept(folder, self._settings(confidence))
        with _one_thread_each() as threads:
            try:
                for setting in settings_of(self.problem.num_steps):  # refused before anything is trained
                    self.claim(setting)
                setting, num_choosing, distance = choose(
                    self.problem.num_steps, self.num_models, lambda tries: self._tried(tries, kept, threads)
                )
                mechanism, claim = self.mechanism(setting), self.claim(setting)
                self.report(
                    f"chosen: z {setting.target}, learning rate {setting.learning_rate:g}, "
                    f"C {setting.clipping_norm:g}, {setting.num_steps} updates, "
                    f"noise multiplier {mechanism.noise_multiplier:g}"
                )
                before = time.perf_counter()
                members, non_members = self._many(setting, kept, threads)
            except BaseException:
                self._stopped.set()
                threads.shutdown(cancel_futures=True)
                raise
        seconds = time.perf_counter() - before
        nominal = accountants.epsilon(claim, self.delta).epsilon
        # Who has seen z loses less on it. A model that diverged has no loss: it is as if it had lost all.
        scores = -np.nan_to_num(np.array([*members, *non_members]), nan=math.inf)
        took_part = np.repeat([1, 0], [len(members), len(non_members)])
        keep(scores, took_part)
        found = audit_scores(
            scores,
            took_part,
            delta=self.delta,
            confidence=confidence,
            nominal_epsilon=nominal,
            mechanism=claim,
            split_seed=kept.split_seed,
        )
        facts: dict[str, Any] = {**dict(found), "audit": "membership"}
        return MembershipResult(
            **facts,
            target_epsilon=self.epsilon,
            num_examples=len(self.problem.images),
            fixed_batches=self.fixed_batches,
            augmult=self.augmult,
            batch_size=mechanism.batch_size,
            noise_multiplier=mechanism.noise_multiplier,
            num_claimed_steps=claim.num_steps,
            winner=Winner(**vars(setting), distance=distance),
            num_models=self.num_models,
            num_choosing_models=num_choosing,
            seconds=time.perf_counter() - started,
            models_per_second=self._num_trained / seconds if self._num_trained else None,
        )

    def mechanism(self, setting: Setting) -> Mechanism:
        """What every model runs: z is one of its examples."""
        if setting.num_steps not in self._mechanisms:
            mechanism = Mechanism(len(self.problem.images) + 1, self.problem.batch_size, 1.0, setting.num_steps)
            sigma = solve_noise_multiplier(
                num_examples=mechanism.num_examples,
                batch_size=mechanism.batch_size,
                num_steps=mechanism.num_steps,
                target_epsilon=self.epsilon,
                delta=self.delta,
            )
            self._mechanisms[setting.num_steps] = mechanism.replace(noise_multiplier=sigma)
        return self._mechanisms[setting.num_steps]

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
        return [
            poisson_batch(mechanism, derived(key, "sampling", number)) for number in range(1, setting.num_steps + 1)
        ]

    def models(self, setting: Setting) -> Models:
        norm = setting.clipping_norm
        if norm not in self._products:
            self._products[norm] = Product(self.network, norm, self.augmult)
            self._products[norm].prepare(self.problem.images)
        return Models(
            self.problem,
            setting.target,
            self._products[norm],
            self.mechanism(setting),
            learning_rate=setting.learning_rate,
            fixed_batches=self.batches(setting),
            stopped=self._stopped,
        )

    def _settings(self, confidence: float) -> dict[str, Any]:
        images, candidates = self.problem.images, self.problem.candidates
        return {
            "num_examples": len(images),
            "batch_size": self.problem.batch_size,
            "num_steps": list(self.problem.num_steps),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "num_models": self.num_models,
            "fixed_batches": self.fixed_batches,
            "augmult": self.augmult,
            "confidence": confidence,
            "data": digest([part.hex() for part in images.content()]),
            "candidates": digest([[name, *_bytes_of(pixels, label)] for name, (pixels, label) in candidates.items()]),
            "network": digest(
                [str(self.network), *([name, *_bytes_of(value)] for name, value in self.network.named_parameters())]
            ),
            "code": _digest_of_code(),
        }

    def _tried(
        self, tries: Sequence[tuple[Setting, int, int]], kept: Kept, threads: ThreadPoolExecutor
    ) -> list[_Losses]:
        """A round of phase I."""
        progress = _Progress("phase I", sum(2 * more * setting.num_steps for setting, _, more in tries), self.report)
        models = [self.models(setting) for setting, _, _ in tries]

        def one(place: int) -> _Losses | None:
            setting, number, more = tries[place]
            return _chunk(models[place], kept, f"choice-{_name(setting)}-{number}", more, progress)

        return self._each(one, range(len(tries)), threads)

    def _many(self, setting: Setting, kept: Kept, threads: ThreadPoolExecutor) -> _Losses:
        """Phase II."""
        models = self.models(setting)
        size = max(_CHUNK, -(-self.num_models // _MOST_CHUNKS))
        progress = _Progress("phase II", 2 * self.num_models * setting.num_steps, self.report)

        def one(first: int) -> _Losses | None:
            return _chunk(
                models, kept, f"models-{_name(setting)}-{first:07}", min(size, self.num_models - first), progress
            )

        members, non_members = [], []
        for inside, outside in self._each(one, range(0, self.num_models, size), threads):
            members += inside
            non_members += outside
        self._num_trained = progress.trained // setting.num_steps
        return members, non_members

    def _each(
        self, one: Callable[[int], _Losses | None], numbers: Sequence[int], threads: ThreadPoolExecutor
    ) -> list[_Losses]:
        """All chunks, in order. What another process trains is waited for, and trained here if that process ends."""
        found = dict(zip(numbers, threads.map(one, numbers), strict=True))
        told = -math.inf
        while left := [number for number, losses in found.items() if losses is None]:
            if time.perf_counter() - told >= 60:
                told = time.perf_counter()
                self.report(f"waiting for another process, which trains {len(left)} parts of the audit in this folder")
            time.sleep(1)
            found |= zip(left, threads.map(one, left), strict=True)
        return [losses for losses in found.values() if losses is not None]


def _digest_of_code() -> str:
    """Of the whole package, and what noise is solved for and added with."""
    package = Path(__file__).parents[1]
    files = [[str(path.relative_to(package)), path.read_text("utf-8")] for path in sorted(package.rglob("*.py"))]
    return digest([files, *(metadata.version(name) for name in ("torch", "numpy", "scipy", "dp-accounting"))])


def _name(setting: Setting) -> str:
    """In names of files: models of one setting are never taken for those of another."""
    parts = setting.target, f"{setting.learning_rate:g}", f"{setting.clipping_norm:g}", str(setting.num_steps)
    return "-".join(parts).replace(" ", "-")


def _bytes_of(value: torch.Tensor, *others: int) -> list[Any]:
    return [list(value.shape), value.detach().numpy().tobytes().hex(), *others]


def _chunk(models: Models, kept: Kept, name: str, a_side: int, progress: "_Progress") -> _Losses | None:
    """Losses of as many members as non-members; None while another process trains them."""
    takes_part = [number < a_side for number in range(2 * a_side)]
    trained = False

    def train(keys: Sequence[bytes]) -> list[float]:
        nonlocal trained
        trained = True
        return models.trained_losses(keys, takes_part, lambda count: progress.add(count, True))

    losses = kept.losses(name, 2 * a_side, train)
    if losses is None:
        return None
    if not trained:
        progress.add(2 * a_side * models.mechanism.num_steps, False)
    return losses[:a_side], losses[a_side:]


class _Progress:
    """Tells of the time to expect, at most every ten seconds.

    Args:
        what: Is done.
        total: Updates.

    Attributes:
        trained: Updates that this process took; the others were kept.
    """

    def __init__(self, what: str, total: int, report: Callable[[str], None]) -> None:
        self._what, self._total, self._report = what, total, report
        self._done = self.trained = 0
        self._started = self._told = time.perf_counter()
        self._alone = threading.Lock()

    def add(self, updates: int, trained: bool) -> None:
        with self._alone:
            self._done += updates
            self.trained += updates * trained
            now = time.perf_counter()
            if now - self._told < 10 or not self.trained:
                return
            self._told = now
            left = (self._total - self._done) * (now - self._started) / self.trained
            self._report(f"{self._what}: {self._done / self._total:.0%} done; about {left:.0f} s left")


@contextlib.contextmanager
def _one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """As many threads as PyTorch uses, each of which computes alone."""
    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            yield threads
    finally:
        torch.set_num_threads(count)
