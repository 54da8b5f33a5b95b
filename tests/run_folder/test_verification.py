"""A finished run's own recipe and ledger give its certificate, whoever its unit of privacy is."""

import pytest

import sfumato
from sfumato.run_folder.entries import spent_mechanism
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.verification import verify_without_images

PERSON = {"privacy.unit": "person", "privacy.max_images_per_person": 3}


@pytest.mark.parametrize("settings", [{}, PERSON, {"privacy.max_images_per_person": 3}])
def test_an_untouched_run_is_believed_without_its_images(tmp_path, settings):
    few = {"training.num_steps": 3, "training.batch_size": 256}
    result = sfumato.train("demo/digits", tmp_path / "run", settings={**few, **settings})
    found = verify_without_images(tmp_path / "run")
    assert found.epsilon == result.epsilon
    spent = spent_mechanism(Ledger.open(tmp_path / "run" / "ledger.jsonl").lines)
    assert sfumato.epsilon(spent, result.delta).epsilon == result.epsilon
