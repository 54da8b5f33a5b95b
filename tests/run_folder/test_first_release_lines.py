"""A release of all examples that was drawn afresh counts again."""

import math

import pytest

from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from sfumato.run_folder import entries


def test_releases_that_were_drawn_afresh_count_together():
    line = entries.run_line("00", Mechanism(10_000, 1_000, 3.0, 0, first_release_noise=4.0), 1.0, "")
    lines = [line, entries.first_session_line({}), entries.step_line(0, 0, None)]
    lines += [entries.next_session_line(lines[1], 0, 0, {}), entries.step_line(1, 0, None)]
    lines += [entries.step_line(1, step, None) for step in (1, 2, 3)]
    chained = [{**line, "prev": "", "hash": ""} for line in lines]
    spent = entries.spent_mechanism(chained)
    assert spent.num_steps == 3 and spent.first_release_noise == pytest.approx(4 / math.sqrt(2))
    assert entries.spent_mechanism(chained[:2]).first_release_noise is None
    chained[0]["first_release_noise"] = None
    with pytest.raises(InputError, match="release that its run has not"):
        entries.spent_mechanism(chained)
