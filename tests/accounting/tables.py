"""Every private setting of De et al. 2022, Tables 12 to 21 (Appendix C.5), with N from Table 11."""

from typing import NamedTuple

CIFAR, IMAGENET, PLACES = 50_000, 1_271_167, 1_803_460  # train + valid; train; train


class Row(NamedTuple):
    table: int
    nominal_epsilon: float
    num_examples: int
    batch_size: int
    noise_multiplier: float
    num_steps: int
    delta: float

    @property
    def numbers(self) -> tuple[float, float, int, float]:
        """q, sigma, T, delta."""
        return self.batch_size / self.num_examples, self.noise_multiplier, self.num_steps, self.delta

    def __str__(self) -> str:
        return f"table{self.table}-eps{self.nominal_epsilon:g}"


# (epsilon, batch size, sigma, updates)
_FINE_TUNED = [(1.0, 16384, 21.1, 250), (2.0, 16384, 15.8, 500), (4.0, 16384, 12.0, 1000), (8.0, 16384, 9.4, 2000)]
_TABLES: dict[int, tuple[int, float, list[tuple[float, int, float, int]]]] = {
    12: (
        CIFAR,
        1e-5,
        [
            (1.0, 4096, 10.0, 875),
            (2.0, 4096, 6.0, 1125),
            (3.0, 4096, 5.0, 1593),
            (4.0, 4096, 4.0, 1687),
            (6.0, 4096, 3.0, 1843),
            (8.0, 4096, 3.0, 2468),
        ],
    ),
    13: (
        CIFAR,
        1e-5,
        [
            (1.0, 16384, 40.0, 906),
            (2.0, 16384, 24.0, 1156),
            (3.0, 16384, 20.0, 1656),
            (4.0, 16384, 16.0, 1765),
            (6.0, 16384, 12.0, 2007),
            (8.0, 16384, 9.4, 2000),
        ],
    ),
    14: (IMAGENET, 8e-7, [(8.0, 16384, 2.5, 71_589)]),
    15: (CIFAR, 1e-5, _FINE_TUNED),
    16: (CIFAR, 1e-5, _FINE_TUNED),
    17: (CIFAR, 1e-5, _FINE_TUNED),
    18: (CIFAR, 1e-5, _FINE_TUNED),
    19: (
        CIFAR,
        1e-5,
        [
            (0.5, 1024, 5.0, 781),
            (1.0, 4096, 5.0, 164),
            (1.5, 4096, 6.0, 531),
            (2.0, 4096, 6.0, 906),
            (4.0, 4096, 5.0, 2171),
            (6.0, 4096, 6.0, 6421),
            (8.0, 4096, 5.0, 7226),
        ],
    ),
    20: (
        IMAGENET,
        8e-7,
        [
            (0.5, 16384, 12.7, 12_500),
            (1.0, 16384, 9.4, 25_000),
            (2.0, 16384, 7.0, 50_000),
            (4.0, 16384, 5.3, 100_000),
            (8.0, 16384, 4.0, 193_318),
        ],
    ),
    21: (PLACES, 5e-7, [(8.0, 4096, 1.0, 223_939), (8.0, 4096, 2.0, 1_374_116)]),
}

ROWS = [
    Row(table, epsilon, num_examples, batch_size, sigma, steps, delta)
    for table, (num_examples, delta, rows) in _TABLES.items()
    for epsilon, batch_size, sigma, steps in rows
]

# Tables 16 to 18 print the numbers of Table 15 again.
DISTINCT_ROWS = [row for row in ROWS if row.table not in (16, 17, 18)]
