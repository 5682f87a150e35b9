"""100 versions with everything that can go wrong on their way: an engine serves exactly one that was published, or is restarted and recovers."""

import asyncio
import random
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

import miles.weights.store
from miles.config import load_config
from miles.core import StaleEpochError
from miles.engine import EngineClient, ModelShape
from miles.log import RunLog
from miles.rollout.weights import EnginePoisoned, EngineWeights
from miles.rundir import RunDir, publish_dir, remove_unfinished
from miles.weights.acks import read_ack
from miles.weights.digest import bits
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore
from miles.weights.turns import EngineTurns
from tests.engine.stub import TOKEN
from tests.rollout.test_weights import HOW, Engine, folder, own, serves  # noqa: F401

VERSIONS = 100


class Killed(BaseException):
    """kill -9: nothing is cleaned up after it."""


class CheckedEngine(Engine):
    """Whenever it goes on it must hold the version it says it is, to the bit. Dies in the middle of a load when it is told to."""

    def __init__(self, shape, truth):
        super().__init__(shape, 1)
        self.truth, self.break_off, self.standing = truth, False, False

    async def _pause(self, request):
        self.standing = True
        return await super()._pause(request)

    async def _continue(self, request):
        assert serves(self, self.truth[self.version])
        self.standing = False
        return await super()._continue(request)

    async def _update_from_disk(self, request):
        assert self.standing
        before = dict(self.weights)
        answer = await super()._update_from_disk(request)
        if self.break_off:
            self.weights |= {n: before[n] for n in list(before)[::2]}
            return web.json_response({"success": False, "message": "half of it"})
        return answer


class Rank:
    """A rollout rank with its engine, started anew as often as it takes."""

    def __init__(self, run, number, folder, truth, log):  # noqa: F811
        self.run, self.number, self.folder, self.truth, self.log = run, number, folder, truth, log
        self.epoch, self.incarnation, self.weights = run.current_epoch("rollout"), 0, None

    async def start(self):
        self.engine = CheckedEngine(ModelShape.from_folder(self.folder), self.truth)
        self.engine.weights, self.engine.tied = {n: t.numpy().copy() for n, t in load_file(self.folder / "model.safetensors").items()}, True
        self.client = EngineClient(await self.engine.start(), TOKEN, self.folder, max_context=256)
        self.weights = EngineWeights(self.run, self.number, self.epoch, self.incarnation, self.client, self.log,
                                     EngineTurns(self.run, self.number, self.epoch), None)

    async def stop(self):
        self.weights.close()
        await self.client.close()
        await self.engine.stop()
        self.incarnation += 1

    def kill_at(self, point, after):
        """The rank dies before or after its `point`-th request to the engine, or (0) with a version half read."""
        post, read, calls = self.client._post, self.weights.store.read, iter(range(1, 100))

        async def last_post(*args, **kw):
            mine = next(calls) == point
            if mine and not after:
                raise Killed
            answer = await post(*args, **kw)
            if mine:
                raise Killed
            return answer

        def last_read(*args):
            read(*args)
            raise Killed

        if point:
            self.client._post = last_post
        else:
            self.weights._copy._follower._store = SimpleNamespace(chain=self.weights.store.chain, read=last_read)

    async def look(self, rng, seen):
        """Follow once, and die of it now and then, and the engine with its rank."""
        before, self.engine.break_off = self.weights.version, rng.random() < 0.15
        if rng.random() < 0.15:
            self.kill_at(rng.randrange(5), rng.random() < 0.5)
        try:
            changed = await self.weights.follow()
        except EnginePoisoned:
            assert read_ack(self.run, self.number).version == -1
            seen["poisoned"] += 1
        except Killed:
            seen["killed readers"] += 1
        else:
            ack = read_ack(self.run, self.number)
            assert ack.version == self.weights.version and (changed or ack.version == before) and not self.engine.standing
            seen["refused"] += bool(ack.error)
            seen["served"] += changed
            seen["skipped some"] += changed and 0 <= before < self.weights.version - 1
            if ack.version >= 0:
                assert serves(self.engine, self.truth[ack.version])
            if "_post" not in vars(self.client) and self.weights._copy._follower._store is self.weights.store:
                return  # otherwise it was to die, and had nothing to do that it could die of
        await self.stop()
        await self.start()


def step_of_training(rng, g, state):
    new = {n: t.clone() for n, t in state.items()}
    for t in new.values():
        bits(t)[torch.rand(t.numel(), generator=g) < rng.choice([0, 0.02, 0.3, 1])] += rng.choice([-1, 1, 1000])
    return new


def damage(rng, folder):  # noqa: F811
    """A bit flipped, a part lost or a file lost; or the whole version, which later ones are based on."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flipped bits", "truncated files", "lost files", "missing bases"])
    if kind == "flipped bits":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif kind == "truncated files":
        path.write_bytes(data[:rng.randrange(len(data))])
    elif kind == "lost files":
        path.unlink()
    else:
        shutil.rmtree(folder)
    return kind


def kill_in_the_middle(monkeypatch, publisher, step, state):
    """The writer dies before its folder is renamed; what it has written stays."""
    def die(*_):
        raise Killed

    with monkeypatch.context() as m, pytest.raises(Killed):
        m.setattr(miles.weights.store, "publish_dir", die)
        m.setattr(miles.weights.store.shutil, "rmtree", lambda *_, **__: None)
        publisher.publish(step, own(state))


LATE = ("before the look", "during the look", "after the look")


def hold_back(monkeypatch, publisher, step, state):
    """The writer stands still between its last look at the epoch and the rename. Returns the names that it is to rename."""
    held = []
    with monkeypatch.context() as m:
        m.setattr(miles.weights.store, "publish_dir", lambda tmp, final: held.append((tmp, final)))
        publisher.publish(step, own(state))
    return held[0]


@pytest.mark.parametrize(("seed", "how"), [(0, HOW), (1, None)])  # patches in place; a copy on the host that is loaded
def test_an_engine_serves_a_published_version_to_the_bit_or_is_restarted_and_recovers(folder, tmp_path, monkeypatch, seed, how):  # noqa: F811
    rng, g, seen = random.Random(seed), torch.Generator().manual_seed(seed), Counter()
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"model.path={folder}",
                                                                "model.recipe=none", "weights.keyframe_every=5")))
    run.new_epoch("rollout")
    truth, store, fenced = {}, WeightStore(run), []

    def new_publisher(late="", names=()):  # as a trainer that starts; `late`: when its predecessor makes the rename before which it stood still
        epoch = run.new_epoch("trainer")
        if late == "during the look":
            rng.choice(sorted(names[0].iterdir())).unlink()
        if late in LATE[:2]:
            publish_dir(*names)
        remove_unfinished(run.weights_dir)
        if late == "after the look":
            with pytest.raises(FileNotFoundError):
                publish_dir(*names)
        after = max(store.newest() or 0, 0 if late in LATE[:2] else max(truth, default=0))  # the late one is found there
        return Publisher(run, epoch, store, lambda: None, lambda s: "", after=after, checksum_of=how)

    async def main():
        publisher, state = new_publisher(), load_file(folder / "model.safetensors")
        ranks = [Rank(run, number, folder, truth, log) for number in range(2)]
        for rank in ranks:
            await rank.start()
        for step in range(VERSIONS):
            state = step_of_training(rng, g, state)
            if rng.random() < 0.06:
                kill_in_the_middle(monkeypatch, publisher, step, state)
                fenced.append(publisher)  # it is not dead after all, and goes on
                publisher, seen["killed writers"] = new_publisher(), seen["killed writers"] + 1
            if rng.random() < 0.06:
                late, truth[publisher.version + 1] = LATE[sum(seen[k] for k in LATE) % 3], state  # what it publishes is looked at like any other, and no number is used twice
                names = hold_back(monkeypatch, publisher, step, state)
                fenced.append(publisher)
                publisher, seen[late] = new_publisher(late, names), seen[late] + 1
                assert publisher.version == max(truth) and names[1].exists() == (late in LATE[:2])
            if fenced and rng.random() < 0.3:
                with pytest.raises(StaleEpochError):
                    rng.choice(fenced).publish(step, own(state))
                seen["stale writers"] += 1
            truth[publisher.version + 1] = state
            assert publisher.publish(step, own(state)).version == max(truth)
            if rng.random() < 0.2:
                seen[damage(rng, run.weights_dir / f"v{publisher.version:06d}")] += 1
            for rank in ranks:
                if rng.random() < 0.7:
                    await rank.look(rng, seen)
        publisher = new_publisher()  # its first version is a keyframe
        truth[publisher.version + 1] = state
        publisher.publish(VERSIONS, own(state))
        for rank in ranks:
            rank.engine.break_off = False
            assert await rank.weights.follow() and read_ack(run, rank.number).version == max(truth) and serves(rank.engine, state)
            await rank.stop()

    log = RunLog(tmp_path / "rank.h5")
    try:
        asyncio.run(main())
    finally:
        log.close()
    faults = ("flipped bits", "truncated files", "lost files", "missing bases", "killed writers", "killed readers", "stale writers", "poisoned")
    assert min(seen[k] for k in faults) >= 2 and min(seen[k] for k in LATE) >= 1, seen
    assert seen["served"] > 30 and seen["skipped some"] > 5 and seen["refused"] > 5, seen
    assert len(list(run.weights_dir.iterdir())) <= 4 * 5 and all(re.fullmatch(r"v\d{6}", p.name) for p in run.weights_dir.iterdir())
