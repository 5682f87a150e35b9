"""A pool's view of a run directory."""

import pytest

from miles.config import load_config
from miles.core import ConfigError, Role, StaleEpochError
from miles.rundir import PoolDir, PoolFacts, RunDir
from miles.rundir.pooldir import usual_in_flight

FACTS = PoolFacts(nodes=3, in_flight=8, time_limit="01:00:00")


@pytest.fixture
def run(tmp_path):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)), now=0)


def test_pools_are_numbered_and_their_ranks_have_numbers_of_their_own(run):
    first, second = PoolDir.create(run, FACTS), PoolDir.create(run, FACTS)
    assert ([p.pool for p in (first, second)], [p.first_rank for p in (first, second)], run.pools(), run.next_pool()) == ([1, 2], [1000, 2000], [1, 2], 3)
    assert (run.pool, run.first_rank) == (0, 0)


def test_a_pool_that_does_not_exist_is_refused(run):
    with pytest.raises(ConfigError, match="has no pool 1"):
        PoolDir(run.path, 1)


def test_a_pool_has_its_own_size_and_the_rest_of_the_run_s_config(run):
    pool = PoolDir.create(run, FACTS)
    assert (pool.config.cluster.rollout.ranks, pool.config.rollout.in_flight, pool.config.cluster.time_limit) == (3, 8, "01:00:00")
    assert run.differences(pool.config) == ["cluster.rollout.nodes: 2 -> 3", "cluster.time_limit: '00:30:00' -> '01:00:00'", "rollout.in_flight: 24 -> 8"]
    assert RunDir(run.path).config == run.config


def test_slots_are_shared_evenly(run):
    assert [PoolDir.create(run, FACTS).slots(rank) for rank in range(3)] == [3, 3, 2]
    assert usual_in_flight(run.config, nodes=3) == 36  # 24 over 2 engines of the run: 12 for each


def test_a_pool_has_folders_and_an_epoch_of_its_own_and_shares_the_rest(run):
    pool = PoolDir.create(run, FACTS)
    run.new_epoch("rollout")
    assert pool.attempt_dir(7) == pool.folder == run.path / "pools" / "0001" and pool.acks_dir == pool.folder / "acks"
    assert (pool.buffer_dir, pool.weights_dir, pool.sessions_dir, pool.token) == (run.buffer_dir, run.weights_dir, run.sessions_dir, run.token)
    assert (pool.current_epoch(Role.ROLLOUT), pool.new_epoch(), pool.new_epoch(), run.pool_epoch(1), run.pool_epoch(0)) == (0, 1, 2, 2, 1)
    assert run.current_epoch(Role.ROLLOUT) == 1 and pool.current_epoch(Role.TRAINER) == 0


def test_whoever_raises_a_pool_s_epoch_ends_the_one_before_and_two_never_get_the_same(run):
    pool, other = PoolDir.create(run, FACTS), PoolDir(run.path, 1)
    assert pool.new_epoch() == 1
    pool.check_epoch(Role.ROLLOUT, 1)
    other.current_epoch = lambda role: 0  # looked before the first was made
    assert other.new_epoch() == 2
    with pytest.raises(StaleEpochError, match="epoch 1 tried to publish"):
        pool.check_epoch(Role.ROLLOUT, 1)
