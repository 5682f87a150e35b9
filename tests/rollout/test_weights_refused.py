"""A file of a weight version is damaged, and the run goes on: engines, publisher and the limit of staleness together."""

import asyncio
import math
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from miles.config import load_config
from miles.log import RunLog
from miles.rundir import RunDir
from miles.weights.acks import read_ack
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore
from tests.rollout.test_weights import HOW, folder, moved, own  # noqa: F401
from tests.rollout.test_weights_random import Rank


class Scene:
    """A trainer with two engines. A group is made with what an engine serves, and dropped when that is older than buffer.max_staleness."""

    def __init__(self, run, folder, how, log):  # noqa: F811
        self.run, self.truth = run, {}
        self.state, self.step = load_file(folder / "model.safetensors"), 0
        self.publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "", checksum_of=how)
        self.ranks = [Rank(run, number, folder, self.truth, log) for number in range(2)]

    def publish(self):
        self.state = moved(self.state, self.step % 7)
        self.truth[self.publisher.version + 1] = self.state
        self.publisher.publish(self.step, own(self.state))
        self.step += 1

    async def look(self):
        for rank in self.ranks:
            await rank.weights.follow()

    async def train(self, steps, looks):
        """Steps that were trained in so many looks of ranks and trainer."""
        trained = 0
        for _ in range(looks):
            await self.look()
            self.truth[self.publisher.version + 1] = self.state
            self.publisher.serve_late()
            youngest = min((self.publisher.version - r.weights.version for r in self.ranks if r.weights.version >= 0), default=math.inf)
            if youngest <= self.run.config.buffer.max_staleness and trained < steps:
                self.publish()
                trained += 1
        return trained

    def encodings(self):
        store = WeightStore(self.run)
        return {v: store.manifest(v).encoding for v in store.versions()}

    def harm(self, version):
        (path,) = (p for p in (self.run.weights_dir / f"v{version:06d}").iterdir() if p.name != "MANIFEST.json")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.fixture(params=[HOW, None], ids=["in place", "loaded"])
def scene(request, folder, tmp_path):  # noqa: F811
    """Plays a scenario with a new scene."""
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"model.path={folder}", "model.recipe=none", "weights.keyframe_every=8",
                                                                "buffer.max_staleness=4")))
    run.new_epoch("rollout")

    async def main(scenario):
        s = Scene(run, folder, request.param, log)
        for rank in s.ranks:
            await rank.start()
        try:
            await scenario(s)
        finally:
            for rank in s.ranks:
                await rank.stop()

    log = RunLog(tmp_path / "rank.h5")
    yield lambda scenario: asyncio.run(main(scenario))
    log.close()


def test_after_a_damaged_delta_the_next_version_is_whole(scene):
    async def scenario(s):
        s.publish()
        await s.look()
        s.publish()
        s.harm(2)
        await s.look()
        assert [(a.version, a.refused) for a in (read_ack(s.run, 0), read_ack(s.run, 1))] == [(1, 2), (1, 2)]
        s.publish()
        await s.look()
        assert [r.weights.version for r in s.ranks] == [3, 3] and s.encodings() == {1: "keyframe", 2: "delta", 3: "keyframe"}

    scene(scenario)


def test_training_that_was_ahead_of_a_damaged_delta_by_more_than_staleness_allows_goes_on(scene):
    async def scenario(s):
        s.publish()
        await s.look()
        for _ in range(5):
            s.publish()
        s.harm(2)
        assert await s.train(3, looks=4) == 3
        assert s.encodings()[7] == "keyframe" and s.step == 9

    scene(scenario)


@pytest.mark.parametrize("gone", [False, True])
def test_training_goes_on_when_the_first_keyframe_is_damaged_or_gone(scene, gone):
    async def scenario(s):
        s.publish()
        shutil.rmtree(s.run.weights_dir / "v000001") if gone else s.harm(1)
        assert await s.train(3, looks=5) == 3

    scene(scenario)


def test_training_goes_on_when_all_engines_restart_behind_a_damaged_delta(scene):
    async def scenario(s):
        for _ in range(3):
            s.publish()
            await s.look()
        s.harm(2)
        for rank in s.ranks:
            await rank.stop()
            await rank.start()
        assert await s.train(3, looks=5) == 3
        assert [r.weights.version for r in s.ranks] == [7, 7] and s.encodings()[4] == "keyframe"

    scene(scenario)


def test_training_goes_on_when_a_version_that_a_delta_goes_on_from_is_gone(scene):
    async def scenario(s):
        s.publish()
        await s.look()
        for _ in range(2):
            s.publish()
        shutil.rmtree(s.run.weights_dir / "v000002")
        assert await s.train(3, looks=4) == 3

    scene(scenario)


def test_what_was_refused_is_not_read_again(scene):
    async def scenario(s):
        s.publish()
        s.publish()
        s.harm(2)
        (rank, _), read = s.ranks, []
        store = rank.weights.store
        rank.weights._copy._follower._store = SimpleNamespace(chain=store.chain, read=lambda manifest, *args: read.append(manifest.version) or store.read(manifest, *args))
        for _ in range(3):
            assert not await rank.weights.follow()
        assert read == [1, 2] and read_ack(s.run, 0).refused == 2

    scene(scenario)
