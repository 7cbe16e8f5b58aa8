"""Back-off of restarts, with times given by the test."""

from umbra.services.process.supervisor import RestartPolicy


def test_pauses_double_until_the_limit() -> None:
    policy = RestartPolicy()
    assert [policy.failed(now) for now in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, None]


def test_old_failures_are_forgotten() -> None:
    policy = RestartPolicy(limit=2, window_s=60)
    assert [policy.failed(now) for now in (0, 1)] == [0.5, 1.0]
    assert policy.failed(2) is None
    assert policy.failed(60.5) == 1.0  # the first is out of the window, the second is not
    assert policy.failed(200) == 0.5


def test_giving_up_does_not_count() -> None:
    policy = RestartPolicy(limit=1, window_s=10)
    policy.failed(0)
    assert policy.failed(9) is None
    assert policy.failed(11) == 0.5


def test_a_pause_is_no_longer_than_most_s() -> None:
    policy = RestartPolicy(first_s=2, most_s=60, limit=8)
    assert [policy.failed(0) for _ in range(9)] == [2, 4, 8, 16, 32, 60, 60, 60, None]
