"""A finished run's own recipe, ledger and weights give its certificate, whoever its unit of privacy is."""

import pytest

import sfumato
from sfumato.run_folder import ledger
from sfumato.run_folder.verification import verify_run

PERSON = {"privacy.unit": "person", "privacy.max_images_per_person": 3}


@pytest.mark.parametrize("settings", [PERSON, {"privacy.max_images_per_person": 3}, {"run.seed": 1}])
def test_an_untouched_run_is_believed_without_its_images(tmp_path, settings):
    few = {"training.num_steps": 3, "training.batch_size": 256}
    result = sfumato.train("demo/digits", tmp_path / "run", settings={**few, **settings})
    found, read = verify_run(tmp_path / "run")
    assert found.epsilon == result.epsilon and read == result
    planned = ledger.read(tmp_path / "run" / "ledger.jsonl").run.mechanism
    if found.private:
        assert sfumato.epsilon(planned, result.delta).epsilon == result.epsilon
