"""A rank that lost the others says so and ends, whatever it was doing."""

from tests.training import faults

WORDS = ["train", "demo/digits", "--set", "training.num_steps=1", "--set", "training.rank_timeout=1", "--resume"]


def test_a_rank_that_reaches_no_other_ends_in_time(tmp_path):
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "WORLD_SIZE": 2, "RANK": 1, "TORCHELASTIC_RUN_ID": "test"}
    log, words = tmp_path / "log", [*WORDS, "--output", str(tmp_path / "run")]
    assert faults.join([faults.start(words, log=log, environment=[*here.items()])]) == [1]
    assert "error: rank 1 of 2 lost the others" in log.read_text()
