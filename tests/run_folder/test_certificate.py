"""privacy.json says how hyper-parameters were chosen, and counts what was released."""

import pytest

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.config import DataConfig, parse
from sfumato.data import loading as datasets
from sfumato.planning.claims import claims
from sfumato.planning.resolve import resolve
from sfumato.run_folder.certificate import NOT_COVERED, SEARCH, certificate, counted, public_inputs
from sfumato.run_folder.launch import run_line
from sfumato.run_folder.ledger import Lines, ReleaseLine


@pytest.fixture
def claim_of():
    def claim(**privacy):
        dataset = datasets.load(DataConfig(name="digits"), None, lambda text: None)
        recipe = {"data": {"name": "digits"}, "training": {"batch_size": 64, "num_steps": 10}}
        plan = resolve(
            parse({**recipe, "privacy": {"noise_multiplier": 2.0, "delta": 1e-4, "accountant": "rdp", **privacy}}),
            dataset.facts,
        )
        run = run_line(plan).model_copy(update={"run_id": "0f" * 16})
        steps = [1, 2, 3, 3]  # the third was lost
        releases = [
            ReleaseLine(release=number, step=step, launch=1, launch_id="a")
            for number, step in enumerate(steps, start=1)
        ]
        whole, public = claims(plan, plan.mechanism), public_inputs(plan, dataset, None)
        counts = counted(Lines(run, releases), 3, 0.5, "ab" * 32)
        return certificate(plan, whole, "running", public, counts)

    return claim


def test_a_search_on_public_images_costs_nothing_and_one_on_private_images_has_no_number(claim_of):
    """Only of the former is the epsilon of the run that of the search as well."""
    unsaid, public, private = claim_of(), claim_of(search_data="public"), claim_of(search_data="private")
    assert unsaid.epsilon == public.epsilon == private.epsilon > 0
    assert public.epsilon_search_inclusive == public.epsilon
    assert private.epsilon_search_inclusive is None
    assert unsaid.epsilon_search_inclusive is None
    firsts = [claim.not_covered[0] for claim in (unsaid, public, private)]
    assert firsts == [NOT_COVERED[0], SEARCH["public"], SEARCH["private"]] and "is not covered" in firsts[2]


def test_a_certificate_states_the_epsilon_of_the_plan_and_what_was_released_of_it(claim_of):
    claim = claim_of()
    assert (claim.run_id, claim.ledger_lines, claim.ledger_sha256) == ("0f" * 16, 5, "ab" * 32)
    assert (claim.num_steps, claim.num_applied, claim.num_lost) == (10, 3, 1)
    mechanism = Mechanism(1437, 64, 2.0, 10)
    assert claim.epsilon == epsilon(mechanism, 1e-4, "rdp").epsilon
    assert claim_of(selected_from=3.0).epsilon > claim.epsilon
