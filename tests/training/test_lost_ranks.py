"""A rank that lost the others says so and ends, whatever it was doing."""

from tests.auditing.planted.plants import Edit
from tests.training import faults

WORDS = ["train", "demo/digits", "--set", "training.num_steps=1", "--set", "training.rank_timeout=1", "--resume"]


def test_a_rank_that_reaches_no_other_ends_in_time(tmp_path):
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "WORLD_SIZE": 2, "RANK": 1, "TORCHELASTIC_RUN_ID": "test"}
    log, words = tmp_path / "log", [*WORDS, "--output", str(tmp_path / "run")]
    assert faults.join([faults.start(words, log=log, environment=[*here.items()])]) == [1]
    assert "error: rank 1 of 2 lost the others" in log.read_text()


def test_a_rank_lost_while_each_reads_images_is_missed(tmp_path):
    dies = "import os; os.environ['RANK'] == '1' and os._exit(1)"
    edit = Edit("training.loop:train", "files.refuse_name(folder)", f"exec({dies!r})\n        time.sleep(2)")
    log, words = tmp_path / "log", [*WORDS, "--output", str(tmp_path / "run")]
    assert faults.join(faults.start_ranks(2, words, log=log, edits=[edit])) == [1, 1]
    assert "error: rank 0 of 2 lost the others" in log.read_text()


def test_a_refusal_ends_all_ranks_and_is_said_once(tmp_path):
    log, words = tmp_path / "log", [*WORDS, "--output", str(tmp_path)]
    (tmp_path / "other").touch()
    assert faults.join(faults.start_ranks(2, words, log=log)) == [2, 2]
    assert log.read_text().count("error: ") == 1
