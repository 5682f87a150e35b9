"""A real trainer of adapters and a real SGLang server: after each step the engine, which was given the adapters alone, gives the trainer's log-probabilities."""

from contextlib import closing

import numpy as np
import pytest
from safetensors.torch import load_file

from miles.core import Layout
from miles.engine import Sampling
from miles.log import RunLog
from miles.rollout.weights import EngineWeights
from miles.rundir import RunDir
from miles.trainer.batching import Sequence
from miles.trainer.distributed import close_distributed, init_distributed
from miles.trainer.lora import describe_base
from miles.weights.acks import read_ack
from miles.weights.mapping import export_hf
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore
from miles.weights.turns import EngineTurns
from tests.trainer import worlds

pytestmark = pytest.mark.engine

GIVEN, SAMPLED = 30, 40


@pytest.fixture
def world():
    init_distributed(0, Layout(world=1), lambda data: data, seed=1)
    yield
    close_distributed()


@pytest.fixture
def own_weights_afterwards(engine):
    yield
    engine.run(engine.client.update_tensors(load_file(engine.folder / "model.safetensors"), 7))


def sampled(engine, number, version):
    """What the engine samples now, as a sequence to train."""
    given = np.random.default_rng(number).integers(3, 380, GIVEN)
    turn = engine.run(engine.client.generate(f"lora{version}.{number}", given, Sampling(SAMPLED, ignore_eos=True), routing_key="k", extra_key=f"v{version}"))
    mask = np.r_[np.zeros(GIVEN), np.ones(SAMPLED)].astype(np.uint8)
    return Sequence(tokens=np.concatenate([turn.input_ids, turn.output_ids]).astype(np.int32), loss_mask=mask, logprobs=np.r_[np.zeros(GIVEN), turn.logprobs].astype(np.float32),
                    versions=np.where(mask, version, -1).astype(np.int32), routes=turn.routes, advantage=(-1.0) ** number, exact=True, rollout=number)


def test_an_engine_with_the_adapters_of_a_step_samples_with_the_trainers_weights(engine, make_config, world, own_weights_afterwards, tmp_path):
    run = RunDir.create(make_config(**{"run.root": tmp_path, "trainer.lora.rank": 4, "trainer.lora.alpha": 8}))
    step = worlds.build(str(engine.folder), {}, replay=True, lora={"rank": 4, "alpha": 8.0}, optimizer={"lr": 2e-2, "clip_grad": 0.0})
    model, how, epoch = step.model, {"dtype": "float32", "tied": False, "layers": 2}, run.new_epoch("rollout")
    publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "", checksum_of=how, adapters=describe_base(model.chunks, model.arch))
    log, batches = RunLog(tmp_path / "rank.h5"), []
    with closing(log), closing(EngineWeights(run, 0, epoch, 0, engine.client, log, EngineTurns(run, 0, epoch), None)) as weights:
        for number in range(3):
            published = publisher.publish(number, export_hf(model.chunks, model.arch, adapters=True))
            assert published.bytes < 0.4 * sum(t.nbytes for t in load_file(engine.folder / "model.safetensors").values())  # hidden 64: factors of rank 4 are not small beside it
            assert engine.run(weights.follow()) and read_ack(run, 0).version == number + 1 and read_ack(run, 0).digest  # of the engine's memory, as it must be
            batches.append([sampled(engine, i, number + 1) for i in range(4)])
            metrics = step.run(batches[-1], number=number)
            assert metrics.exact_tokens == 4 * SAMPLED and metrics.exact_logprob_diff_max < 1e-4 and metrics.routing_differs == 0
    assert step.run(batches[0], number=3).exact_logprob_diff_mean > 0.01  # the weights have moved since
