"""Where adapters alone travel: what the engine loads is made of the model folder and the newest adapters, and is what the trainer computes with."""

import asyncio
import re
import shutil
from contextlib import closing
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.config import load_config
from miles.core import ConfigError, StructureError
from miles.engine import EngineClient, ModelShape
from miles.engine.handover import HANDOVER
from miles.log import RunLog
from miles.rollout.weights import EnginePoisoned, EngineWeights
from miles.rundir import RunDir
from miles.weights.acks import read_ack
from miles.weights.adapters import merge, new_a
from miles.weights.digest import digest
from miles.weights.merged import MergedModel
from miles.weights.node import NodeFolder
from miles.weights.publish import Publisher
from miles.weights.shared import NodeCopy
from miles.weights.store import WeightStore, combined_digest
from miles.weights.turns import EngineTurns
from tests.engine.stub import TOKEN
from tests.engine.tiny import make_model
from tests.rollout.test_weights import HOW, Engine, own, serves

RANK = 3
LAYERS = ("model.layers.0.", "model.layers.1.")
ADAPTED = {  # of a layer: names that share an A
    "self_attn.q_proj": ("q_proj", "k_proj", "v_proj"), "self_attn.o_proj": ("o_proj",), "mlp.gate_proj": ("gate_proj", "up_proj"), "mlp.down_proj": ("down_proj",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def adapters_of(source, seed):
    """New adapters of all layers, moved: A and B of each weight, and one A for those that the trainer has as one matrix."""
    g, out = torch.Generator().manual_seed(seed), {}
    for layer, (first, parts) in product(LAYERS, ADAPTED.items()):
        stem = layer + first.rpartition(".")[0] + "."
        out[f"{layer}{first}.lora_A.weight"] = new_a(first, seed, RANK, source[f"{layer}{first}.weight"].shape[1])
        out |= {f"{stem}{part}.lora_B.weight": torch.randn(len(source[f"{stem}{part}.weight"]), RANK, generator=g) * 0.1 for part in parts}
    return out


def merged(source, adapters, scale):
    out = {n: t.clone() for n, t in source.items()}
    for layer, (first, parts) in product(LAYERS, ADAPTED.items()):
        for part in parts:
            stem = f"{layer}{first.rpartition('.')[0]}.{part}"
            merge(source[f"{stem}.weight"], adapters[f"{layer}{first}.lora_A.weight"], adapters[f"{stem}.lora_B.weight"], scale, out[f"{stem}.weight"])
    return out


@pytest.fixture
def scene(folder, tmp_path):
    """`scene(scenario)` runs `scenario(s)` with a trainer's publisher of adapters, an engine and its rank."""
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"model.path={folder}", "model.recipe=none", "weights.keyframe_every=4",
                                                                f"trainer.lora.rank={RANK}", "trainer.lora.alpha=6.0")))
    epoch, source = run.new_epoch("rollout"), load_file(folder / "model.safetensors")
    base = {"base": combined_digest({n: digest(t) for n, t in source.items()}), "dtype": "float32", "scale": 2.0}

    async def main(scenario, how, base):
        def publisher(base=base, before=None):
            return Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "", checksum_of=how, adapters=base, adapters_before=before)

        engine = Engine(ModelShape.from_folder(folder), 1)
        engine.weights, engine.tied = {n: t.numpy().copy() for n, t in source.items()}, True
        client = EngineClient(await engine.start(), TOKEN, folder, max_context=256)
        log = RunLog(tmp_path / "rank.h5")

        def rank():
            return EngineWeights(run, 0, epoch, 0, client, log, EngineTurns(run, 0, epoch), None)

        try:
            with closing(rank()) as weights:
                await scenario(SimpleNamespace(run=run, publisher=publisher(), publishers=publisher, engine=engine, weights=weights, rank=rank, source=source,
                                               ack=lambda: read_ack(run, 0)))
        finally:
            log.close()
            await client.close()
            await engine.stop()

    return lambda scenario, how=HOW, **changes: asyncio.run(main(scenario, how, {**base, **changes}))


@pytest.mark.parametrize("how", [HOW, None])
def test_an_engine_serves_the_folder_with_the_newest_adapters_merged(scene, how):
    async def scenario(s):
        for step in range(6):  # keyframes 1 and 5
            state = adapters_of(s.source, step)
            s.publisher.publish(step, own(state))
            if step in (0, 1, 4, 5):  # versions may be skipped
                assert await s.weights.follow() and serves(s.engine, merged(s.source, state, 2.0)) and s.ack().version == step + 1
        assert not await s.weights.follow()
        assert [c for c in s.engine.calls if c in ("load", "patch")] == ["load"] * 4  # a patch is of adapters, which are no parameters of the engine

    scene(scenario, how)


def test_what_travels_are_the_adapters_alone(scene):
    async def scenario(s):
        sizes = [s.publisher.publish(step, own(adapters_of(s.source, step))).bytes for step in range(2)]
        adapters, model = (sum(t.nbytes for t in state.values()) for state in (adapters_of(s.source, 0), s.source))
        names = 120 * len(adapters_of(s.source, 0))  # bytes of the file's header
        assert adapters < sizes[0] < adapters + names and sizes[1] < adapters + names and adapters < 0.1 * model
        assert WeightStore(s.run).manifest(2).tensors.keys() == adapters_of(s.source, 0).keys()

    scene(scenario)


def test_a_rank_that_starts_anew_makes_the_same_of_the_newest_version(scene):
    async def scenario(s):
        for step in range(3):
            s.publisher.publish(step, own(adapters_of(s.source, step)))
        await s.weights.follow()
        with closing(s.rank()) as again:
            assert await again.follow() and again.version == 3 and serves(s.engine, merged(s.source, adapters_of(s.source, 2), 2.0))

    scene(scenario)


def test_an_engine_whose_memory_is_not_what_was_merged_is_poisoned(scene):
    def harm(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"] + 1

    async def scenario(s):
        s.engine.harm = harm
        s.publisher.publish(0, own(adapters_of(s.source, 0)))
        with pytest.raises(EnginePoisoned, match="engine's memory has checksum"):
            await s.weights.follow()

    scene(scenario)


def test_adapters_of_other_weights_than_those_of_the_folder_never_reach_an_engine(scene):
    async def scenario(s):
        s.publisher.publish(0, own(adapters_of(s.source, 0)))
        for _ in range(2):
            assert not await s.weights.follow() and s.engine.calls == [] and s.ack().version == -1
        assert re.search("(?s)the weights of .* have the digest .*expected: 00, that of the weights that the trainer's adapters go with", s.ack().error)

    scene(scenario, base="00")


Q_B, DOWN_A = f"{LAYERS[1]}self_attn.q_proj.lora_B.weight", f"{LAYERS[1]}mlp.down_proj.lora_A.weight"
UNFIT = "adapters that fit no weight of"


def without(*names):
    return lambda s: {n: t for n, t in s.items() if not n.startswith(names)}


@pytest.mark.parametrize(("harm", "said"), [
    (without(Q_B), "lacks 1 of 22 tensors"),
    (without(LAYERS[0] + "mlp.down_proj."), "lacks 2 of 22 tensors"),  # both factors: the weight would stay as it is
    (lambda s: s | {Q_B: torch.zeros(64, RANK + 1)}, UNFIT),
    (lambda s: s | {DOWN_A: torch.zeros(RANK, 127)}, UNFIT),
    (lambda s: s | {DOWN_A: s[DOWN_A].bfloat16()}, UNFIT),
    (lambda s: s | {"model.layers.7.mlp.down_proj.lora_A.weight": torch.zeros(RANK, 128)}, UNFIT),
])
def test_adapters_that_do_not_fit_are_refused_and_the_engine_goes_on_with_what_it_serves(scene, harm, said):
    async def scenario(s):
        good = adapters_of(s.source, 0)
        s.publisher.publish(0, own(good))
        await s.weights.follow()
        s.engine.calls.clear()
        s.publisher._since_keyframe = 99
        s.publisher.publish(1, own(harm(adapters_of(s.source, 1))))
        assert not await s.weights.follow() and s.engine.calls == [] and serves(s.engine, merged(s.source, good, 2.0))
        assert s.ack().version == 1 and said in s.ack().error
        s.publisher._since_keyframe = 99
        s.publisher.publish(2, own(adapters_of(s.source, 2)))
        assert await s.weights.follow() and serves(s.engine, merged(s.source, adapters_of(s.source, 2), 2.0))

    scene(scenario)


def test_a_trainer_that_finds_another_model_folder_than_the_run_began_with_ends(scene):
    async def scenario(s):
        s.publisher.publish(0, own(adapters_of(s.source, 0)))
        assert s.publishers().version == 1
        with pytest.raises(ConfigError, match="(?s)have the digest 00.*expected: .*, that of the weights that this run began with"):
            s.publishers({"base": "00", "dtype": "float32", "scale": 2.0})

    scene(scenario)


def test_a_checkpoint_knows_its_frozen_weights_where_no_version_is_left(scene):
    async def scenario(s):
        before = {"base": "00", "dtype": "float32", "scale": 2.0}
        assert s.publishers(before, before).version == 0
        with pytest.raises(ConfigError, match="(?s)expected: 00, that of the weights that this run began with"):
            s.publishers(before=before)

    scene(scenario)


def test_a_model_folder_that_changes_during_a_run_is_noticed_at_the_next_version(folder, tmp_path):
    copy, source = shutil.copytree(folder, tmp_path / "model"), load_file(folder / "model.safetensors")
    base = {"base": combined_digest({n: digest(t) for n, t in source.items()}), "dtype": "float32", "scale": 2.0}
    model = MergedModel(copy)
    made, expected = model.make(base, adapters_of(source, 0)), merged(source, adapters_of(source, 0), 2.0)
    assert all(torch.equal(made[n], t) for n, t in expected.items())
    save_file({n: t + 1 for n, t in source.items()}, tmp_path / "other", metadata={"format": "pt"})
    (tmp_path / "other").rename(copy / "model.safetensors")
    with pytest.raises(StructureError, match="is not what it was when this rank read it first"):
        model.make(base, adapters_of(source, 1))
    model.forget()


def test_a_rank_that_ends_while_it_waits_for_another_ends_its_wait_first(scene):
    async def scenario(s):
        s.publisher.publish(0, own(adapters_of(s.source, 0)))
        await s.weights.follow()
        node = NodeFolder(HANDOVER, s.run)
        reader = NodeCopy(WeightStore(s.run), node.shared("copy"))
        reader.advance(1)
        s.publisher.publish(1, own(adapters_of(s.source, 1)))
        following = asyncio.create_task(s.weights.follow())
        await asyncio.sleep(0.05)  # whether it waits by then makes no difference to what follows
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        reader.forget()
        node.close()

    scene(scenario)


def test_the_host_copy_is_the_file_that_the_engine_loads(scene):
    folders = []

    async def scenario(s):
        state = adapters_of(s.source, 0)
        s.publisher.publish(0, own(state))
        await s.weights.follow()
        loaded = load_file(s.weights._handover.folder / "model.safetensors")
        assert loaded.keys() == s.source.keys() and all(torch.equal(loaded[n], t) for n, t in merged(s.source, state, 2.0).items())
        folders.append(s.weights._handover.folder)

    scene(scenario)
    assert not folders[0].exists()
