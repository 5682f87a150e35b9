"""A real SGLang server that gives its memory back and takes it again, on a CPU with the shim's memory saver in the place of torch_memory_saver."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from miles.config import load_config
from miles.core import StructureError
from miles.engine import EngineClient, EngineProcess, Sampling
from miles.engine.digest import expected_checksums, require_equal
from miles.engine.process import _group_members
from miles.rollout.weights import RELEASED
from tests.engine.conftest import TOKEN
from tests.engine.test_engine_real import logprobs

pytestmark = pytest.mark.engine
PROMPT = np.random.default_rng(9).integers(3, 380, 40)
SHORT = Sampling(16, ignore_eos=True)
KV_TOKENS = 400_000  # of 2 layers x 2 x 2 heads x 16 x 4 bytes each: 205 MB, to be seen among the rest


@pytest.fixture(scope="module")
def shared(tiny_moe, token_file, runner, tmp_path_factory):
    config = load_config("configs/tiny_colocated.toml", (f"model.path={tiny_moe}", "model.recipe=none", "engine.port_base=34500", f"engine.max_total_tokens={KV_TOKENS}"))
    process = EngineProcess(config, rank=0, log_path=tmp_path_factory.mktemp("log") / "engine.log", token_file=token_file, platform="cpu")
    runner.run(process.start(weight_version=1))
    client = EngineClient(process.url, TOKEN, tiny_moe, max_context=2048)
    yield process, client
    runner.run(client.close())
    runner.run(process.stop())


def resident(process) -> int:
    """MB of all processes of the server."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in _group_members(process.pid)) / 1e6


def generate(client, rid, sampling=SHORT):
    """In a prefix cache of its own, so that what is cached is what this request was given before."""
    return client.generate(rid, PROMPT, sampling, routing_key="k", extra_key=rid.rstrip("'"))


@pytest.fixture(scope="module")
def computed(tiny_moe):
    """Largest difference of a turn's log-probabilities from those that the model has for its tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32).eval()

    def difference(turn):
        tokens = np.concatenate([turn.input_ids, turn.output_ids])
        lp, _ = logprobs(model, tokens)
        return max(abs(turn.logprobs[i - len(PROMPT)] - lp[i - 1, tokens[i]].item()) for i in range(len(PROMPT), len(tokens)))

    return difference


def test_memory_is_released_and_weights_are_undefined_until_all_are_given_again(shared, tiny_moe, runner, computed):
    process, client = shared
    weights = load_file(tiny_moe / "model.safetensors")

    async def scenario():
        await generate(client, "late")
        running = asyncio.create_task(generate(client, "long", Sampling(1500, ignore_eos=True)))
        await asyncio.sleep(0.5)
        await client.pause("retract")
        full = resident(process)
        await client.release_memory(RELEASED["all"])
        empty = resident(process)
        waiting = asyncio.create_task(generate(client, "late'"))
        await asyncio.sleep(0.2)
        await client.take_memory(RELEASED["all"])
        with pytest.raises(StructureError, match="holds other bytes in 21 of 21"):
            require_equal(expected_checksums(weights), await client.checksums(), 2)
        await client.update_tensors(weights, 2)
        require_equal(expected_checksums(weights), await client.checksums(), 2)
        assert not running.done() and not waiting.done()  # held, through all of it
        await client.resume()
        return await running, await waiting, full - empty

    running, late, freed = runner.run(scenario())
    assert freed > 190
    assert len(running.output_ids) == 1500 and set(running.versions.tolist()) == {1, 2}
    assert late.cached_tokens == 0, "nothing of the old cache is left"
    assert computed(running) < 1e-4 and computed(late) < 1e-4


def test_with_the_kv_cache_alone_the_weights_stay(shared, tiny_moe, runner, computed):
    _, client = shared
    weights = load_file(tiny_moe / "model.safetensors")

    async def scenario():
        before = await generate(client, "b"), await generate(client, "b'")
        await client.pause("retract")
        await client.release_memory(RELEASED["kv_cache"])
        await client.take_memory(RELEASED["kv_cache"])
        require_equal(expected_checksums(weights), await client.checksums(), 2)
        await client.resume()
        return *before, await generate(client, "b'")

    _, before, after = runner.run(scenario())
    assert (before.cached_tokens, after.cached_tokens) == (len(PROMPT) - 1, 0)
    assert computed(before) < 1e-4 and computed(after) < 1e-4
