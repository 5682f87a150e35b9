"""Two engines of one node serve the same versions, and each version is read once."""

import asyncio

import pytest
from safetensors.torch import load_file

from miles.config import load_config
from miles.rundir import RunDir
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore
from tests.rollout.test_weights import HOW, folder, moved, own, serves  # noqa: F401
from tests.rollout.test_weights_random import Rank


class Rows:
    """A log in memory."""

    def __init__(self):
        self.rows = []

    def row(self, table, **values):
        self.rows.append(values)


@pytest.mark.parametrize("how", [HOW, None], ids=["in place", "loaded"])
def test_one_of_two_ranks_reads_a_version_and_the_log_says_which(folder, tmp_path, how):  # noqa: F811
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"model.path={folder}", "model.recipe=none", "weights.keyframe_every=3")))
    run.new_epoch("rollout")
    state, truth, log = load_file(folder / "model.safetensors"), {}, Rows()

    async def main():
        publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "", checksum_of=how)
        ranks = [Rank(run, number, folder, truth, log) for number in range(2)]
        for rank in ranks:
            await rank.start()
        for version in range(1, 5):  # 1 and 4 are keyframes
            truth[version] = moved(truth.get(version - 1, state), version)
            publisher.publish(version, own(truth[version]))
            assert await asyncio.gather(*(rank.weights.follow() for rank in ranks)) == [True, True]
            assert all(serves(rank.engine, truth[version]) for rank in ranks)
            assert sorted(r["shared"] for r in log.rows if r["version"] == version) == [False, True]
        for rank in ranks:
            await rank.stop()

    asyncio.run(main())
