"""privacy.json says how hyper-parameters were chosen, and counts what was released."""

import pytest

from sfumato.config import DataConfig, parse
from sfumato.data import loading as datasets
from sfumato.planning.resolve import resolve
from sfumato.run_folder import entries as lines_of
from sfumato.run_folder.certificate import NOT_COVERED, SEARCH, certificate, public_inputs
from sfumato.run_folder.ledger import Ledger


@pytest.fixture
def claim_of(tmp_path):
    def claim(**privacy):
        dataset = datasets.load(DataConfig(name="digits"), None, lambda text: None)
        recipe = {"data": {"name": "digits"}, "training": {"batch_size": 64, "num_steps": 10}}
        plan = resolve(
            parse({**recipe, "privacy": {"noise_multiplier": 2.0, "delta": 1e-4, "accountant": "rdp", **privacy}}),
            dataset.facts,
        )
        ledger = Ledger(tmp_path, [], 0)
        ledger.lines.append({**lines_of.run_line("0f" * 16, plan.mechanism, 1.0, "digest"), "hash": "ab" * 32})
        return certificate(plan, plan.mechanism, ledger, "complete", public_inputs(plan, dataset))

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


def test_a_certificate_names_its_run_and_the_ledger_that_it_counts(claim_of):
    claim = claim_of()
    assert (claim.run_id, claim.ledger_lines, claim.ledger_head) == ("0f" * 16, 1, "ab" * 32)
