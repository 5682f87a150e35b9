"""An engine at exactly one version: what is read before it stands still, what never reaches it, and what it is restarted for."""

import asyncio
import os
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from miles.config import load_config
from miles.engine import EngineClient, ModelShape
from miles.engine.handover import PATCH_FORMAT, REHEARSE, WORKING, told
from miles.log import RunLog
from miles.rollout.weights import EnginePoisoned, EngineWeights
from miles.rundir import RunDir
from miles.weights.acks import read_ack
from miles.weights.digest import bits
from miles.weights.p2p.filled import Filled
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore
from miles.weights.turns import EngineTurns
from tests.engine.stub import TOKEN, StubEngine
from tests.engine.tiny import make_model

NORM = "model.norm.weight"
HOW = {"dtype": "float32", "tied": True}


class Engine(StubEngine):
    """Says what it was asked to do; `harm` does something to its weights behind each update; its next rehearsal takes `works_for_s`."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls, self.harm, self.works_for_s = [], lambda weights: None, 0.0

    async def _pause(self, request):
        self.calls.append("pause")
        return await super()._pause(request)

    async def _continue(self, request):
        self.calls.append("resume")
        return await super()._continue(request)

    async def _update_from_disk(self, request):
        self.calls.append("patch" if (await request.json())["load_format"] == PATCH_FORMAT else "load")
        answer = await super()._update_from_disk(request)
        self.harm(self.weights)
        return answer

    async def _set_version(self, request):
        self.calls.append("rename")
        return await super()._set_version(request)

    async def _checksums(self, request):
        action = (await request.json())["action"]
        self.calls.append("rehearse" if action.startswith(REHEARSE) else "checksum")
        if action.startswith(REHEARSE) and self.works_for_s:
            asyncio.get_running_loop().call_later(self.works_for_s, told(action.removeprefix(REHEARSE)).touch)
            self.works_for_s = 0.0
            return web.json_response({"success": True, "message": "", "ranks": [{"checksums": {"rehearsal": WORKING}, "per_gpu_checksum": WORKING}]})
        return await super()._checksums(request)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def scene(folder, tmp_path):
    """`scene(scenario, how)` runs `scenario(s)` with a trainer's publisher, an engine and its rank. how: of the engine's memory; None where it cannot be
    foretold, as on a GPU."""
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"model.path={folder}",
                                                                "model.recipe=none", "weights.keyframe_every=4")))
    epoch = run.new_epoch("rollout")
    source = load_file(folder / "model.safetensors")

    async def main(scenario, how):
        publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "", checksum_of=how)
        engine = Engine(ModelShape.from_folder(folder), 1)
        engine.weights, engine.tied = {n: t.numpy().copy() for n, t in source.items()}, True
        client = EngineClient(await engine.start(), TOKEN, folder, max_context=256)
        log = RunLog(tmp_path / "rank.h5")
        try:
            with closing(EngineWeights(run, 0, epoch, 0, client, log, EngineTurns(run, 0, epoch), None)) as weights:
                await scenario(SimpleNamespace(run=run, publisher=publisher, engine=engine, weights=weights, source=source, ack=lambda: read_ack(run, 0)))
        finally:
            log.close()
            await client.close()
            await engine.stop()

    return lambda scenario, how=HOW: asyncio.run(main(scenario, how))


def moved(state, k):
    """A step of training: one bit of some elements of each tensor."""
    new = {n: t.clone() for n, t in state.items()}
    for t in new.values():
        bits(t)[k::7] ^= 1
    return new


def own(state):
    """The publisher keeps what it is given."""
    return [(n, t.clone()) for n, t in state.items()]


def serves(engine, state):
    return engine.weights.keys() == state.keys() and all(np.array_equal(engine.weights[n].view(np.int32), t.numpy().view(np.int32)) for n, t in state.items())


@pytest.mark.parametrize(("how", "keyframe", "delta"), [
    (HOW, ["read", "pause", "load", "checksum", "resume"], ["read", "rehearse", "pause", "patch", "resume"]),  # the engine checks each block that it changes
    (None, ["read", "pause", "load", "resume"], ["read", "pause", "load", "resume"]),
])
def test_a_version_is_read_and_verified_before_the_engine_stands_still_and_checked_before_it_goes_on(scene, how, keyframe, delta):
    async def scenario(s):
        first, second = moved(s.source, 1), moved(s.source, 2)
        s.publisher.publish(0, own(first))
        advance, fetch = s.weights._copy.advance, s.weights._fetch
        s.weights._copy.advance = lambda target: (advance(target), s.engine.calls.append("read"))[0]
        s.weights._fetch = lambda patches: (fetch(patches), s.engine.calls.append("read"))[0]
        assert await s.weights.follow() and serves(s.engine, first)
        s.publisher.publish(1, own(second))
        assert await s.weights.follow() and serves(s.engine, second)
        assert s.engine.calls == [*keyframe, *delta]
        assert (s.ack().version, s.ack().digest, s.engine.version) == (2, WeightStore(s.run).manifest(2).digest, 2)
        assert not await s.weights.follow() and len(s.engine.calls) == len(keyframe) + len(delta)

    scene(scenario, how)


@pytest.mark.parametrize(("how", "calls"), [(HOW, ["load", "patch", "patch", "load", "patch", "patch"]), (None, ["load", "load", "load", "load"])])
def test_versions_may_be_skipped(scene, how, calls):
    async def scenario(s):
        states = [moved(s.source, k) for k in range(7)]
        for step, state in enumerate(states):
            s.publisher.publish(step, own(state))  # keyframes 1 and 5
            if step in (0, 2, 4, 6):
                assert await s.weights.follow() and serves(s.engine, state) and s.ack().version == step + 1
        assert [c for c in s.engine.calls if c in ("load", "patch")] == calls

    scene(scenario, how)


def test_a_version_of_the_same_weights_is_a_new_name_and_no_load(scene):
    async def scenario(s):
        for step in range(2):
            s.publisher.publish(step, own(moved(s.source, 1)))
            await s.weights.follow()
        assert s.engine.calls == ["pause", "load", "resume", "pause", "rename", "resume"] and s.ack().version == 2

    scene(scenario, None)


def flip(s, state):
    s.publisher.publish(1, own(state))
    path = s.run.weights_dir / "v000002" / "weights.patch"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def unreadable(s, state):
    s.publisher.publish(1, own(state))
    path = s.run.weights_dir / "v000002" / "weights.patch"
    path.unlink()
    path.mkdir()


def lost(s, state):
    s.publisher.publish(1, own(state))
    (s.run.weights_dir / "v000002" / "weights.patch").unlink()


def unknown(s, state):
    s.publisher.publish(1, own((state | {"nope.weight": torch.zeros(3)})))


def wrong_shape(s, state):
    s.publisher.publish(1, own((state | {NORM: torch.zeros(65)})))


def wrong_kind(s, state):
    s.publisher.publish(1, own((state | {NORM: torch.zeros(64, dtype=torch.int32)})))


def missing(s, state):
    s.publisher.publish(1, own({n: t for n, t in state.items() if n != NORM}))


@pytest.mark.parametrize(("publish", "said"), [
    (flip, "another digest"), (unreadable, "Is a directory"), (lost, "No such file"), (unknown, "no parameter 'nope.weight'"),
    (wrong_shape, r"model.norm.weight has shape \(65,\)"), (wrong_kind, "model.norm.weight is int32"),
    (missing, "lacks 1 of 20 tensors.*model.norm.weight"),
])
@pytest.mark.parametrize("how", [HOW, None])
def test_what_does_not_verify_or_is_not_the_model_never_reaches_an_engine_which_goes_on_with_what_it_serves(scene, publish, said, how):
    async def scenario(s):
        first, good = moved(s.source, 1), moved(s.source, 3)
        s.publisher.publish(0, own(first))
        await s.weights.follow()
        s.engine.calls.clear()
        publish(s, moved(s.source, 2))
        for _ in range(2):
            assert not await s.weights.follow()
            assert s.ack().version == 1 and re.search(f"(?s){said}", s.ack().error)
        assert s.engine.calls == [] and serves(s.engine, first)
        s.publisher._since_keyframe = 99
        s.publisher.publish(2, own(good))  # the next keyframe repairs it
        assert await s.weights.follow() and serves(s.engine, good) and (s.ack().version, s.ack().error) == (3, "")

    scene(scenario, how)


def file_keyframe(s, part):
    s.publisher.publish(1, own(part))


def point_to_point(s, part):
    described = {n: {"shape": list(t.shape), "dtype": "float32", "digest": "x"} for n, t in part.items()}
    s.publisher.publish_filled(1, Filled("1.1", 1, ("d",), described, 0), 0.0)


def by_broadcast(s, part):
    s.publisher._store.publish_broadcast(s.publisher.version + 1, 1, part, 1, base=s.weights.version, extra=lambda: {"group": {"members": {"0": 1}}})


@pytest.mark.parametrize("publish", [file_keyframe, point_to_point, by_broadcast])
@pytest.mark.parametrize("how", [HOW, None])
@pytest.mark.parametrize("served", [False, True])
def test_a_version_in_which_tensors_are_missing_never_reaches_an_engine_whatever_it_serves(scene, publish, how, served):
    """Whatever way it came, also as the first one, when a GPU's engine would keep the model folder's for those that are missing."""
    async def scenario(s):
        if served:
            s.publisher.publish(0, own(s.source))
            await s.weights.follow()
            s.engine.calls.clear()
        s.weights._receiver = SimpleNamespace(holds=lambda manifest: True)
        publish(s, dict(sorted(s.source.items())[:3]))
        assert not await s.weights.follow() and s.engine.calls == []
        assert s.ack().refused == 1 + served and "lacks 17 of 20 tensors" in s.ack().error and s.ack().version == (1 if served else -1)

    scene(scenario, how)


def test_an_engine_whose_memory_is_not_what_was_sent_is_poisoned_and_stays_paused(scene):
    def harm(weights):
        weights[NORM] = weights[NORM] + 1

    async def scenario(s):
        s.engine.harm = harm
        s.publisher.publish(0, own(moved(s.source, 1)))
        with pytest.raises(EnginePoisoned, match="engine's memory has checksum"):
            await s.weights.follow()
        assert (s.ack().version, s.ack().error) == (-1, "digest") and s.engine.calls[-1] == "checksum"

    scene(scenario)


def test_an_engine_that_rehearses_is_asked_again_only_when_it_has_said_that_it_has_ended(scene):
    async def scenario(s):
        s.publisher.publish(0, own(moved(s.source, 1)))
        await s.weights.follow()
        s.engine.works_for_s = 0.2
        s.publisher.publish(1, own(moved(s.source, 2)))
        assert await s.weights.follow() and s.engine.calls.count("rehearse") == 2
        assert not list(s.weights._handover.folder.iterdir())

    scene(scenario)


def test_an_engine_that_finds_its_memory_to_be_other_than_the_patch_says_is_poisoned(scene):
    async def scenario(s):
        s.publisher.publish(0, own(moved(s.source, 1)))
        await s.weights.follow()
        s.engine.weights[NORM] = s.engine.weights[NORM] + 1
        s.publisher.publish(1, own(moved(s.source, 2)))
        with pytest.raises(EnginePoisoned, match="a block does not become what the trainer had"):
            await s.weights.follow()
        assert s.ack().version == -1 and s.engine.calls[-2:] == ["resume", "rehearse"]

    scene(scenario)


def test_the_host_copy_is_the_file_that_the_engine_loads_and_nothing_of_it_outlives_the_rank(scene):
    async def scenario(s):
        for step in range(3):
            state = moved(s.source, step)
            s.publisher.publish(step, own(state))
            await s.weights.follow()
            file = s.weights._handover.folder / "model.safetensors"
            assert file.is_symlink()  # anonymous memory of this process
            loaded = load_file(file)
            assert all(torch.equal(loaded[n], t) for n, t in state.items())
            s.weights._copy.state[NORM].fill_(float(step))
            assert load_file(file)[NORM].eq(step).all()
            s.weights._copy.forget()  # it is no version any more
            assert not file.exists()
            folders.update((file.parent, s.weights._node.path))
        assert all(f.exists() for f in folders)

    folders = set()
    scene(scenario, None)
    assert len(folders) == 2 and not any(f.exists() for f in folders)
    assert not list(Path("/dev/shm").glob(f"miles-weights-{os.getpid()}-*"))
