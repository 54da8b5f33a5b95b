"""How often Python looks for garbage: rarely while a run starts, as before in its steps and after it."""

import gc

import pytest

from sfumato import collector


@pytest.fixture(autouse=True)
def usual():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def first():
    return gc.get_threshold()[0]


def test_a_start_looks_rarely_its_steps_as_often_as_before_and_all_is_as_it_was_afterwards():
    with collector.collecting_rarely():
        assert first() == 100_000
        with collector.collecting_rarely(), collector.collecting_usually():
            assert gc.get_threshold() == (700, 10, 10)
        assert first() == 100_000
    assert gc.get_threshold() == (700, 10, 10)


def test_what_fails_inside_leaves_all_as_it_was():
    @collector.collecting_rarely()
    def fails():
        raise KeyError(first())

    for _ in range(2):  # a decorated function can be called again
        with pytest.raises(KeyError, match="100000"):
            fails()
        assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [0, 500_000])
def test_who_lets_python_look_more_rarely_or_never_is_left_alone(own):
    gc.set_threshold(own, 10, 10)
    with collector.collecting_rarely():
        assert first() == own
        with collector.collecting_usually():
            assert first() == own
    assert first() == own


def test_the_steps_of_a_run_look_as_often_as_before_it(tmp_path):
    import sfumato
    from sfumato.training.loop import Progress

    seen = []
    sfumato.train(
        "demo/digits",
        tmp_path / "run",
        settings={"training.num_steps": 1, "training.batch_size": 16, "run.seed": 1},
        progress=Progress(lambda line: seen.append(first()), lambda facts: seen.append(-first())),
    )
    assert -700 in seen
    assert {at for at in seen if at < 0} == {-700}
    assert first() == 700
