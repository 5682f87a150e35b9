"""The stand-in for SGLang as a process: started, steered and killed as the real one, with weights that it really holds."""

import asyncio
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import miles.engine.process
from miles.core import EnvironmentFault
from miles.engine import EngineClient, EngineProcess, Sampling
from miles.engine.digest import expected_checksums
from miles.engine.process import EngineKilled, _group_members
from tests.engine.conftest import TOKEN
from tests.engine.tiny import make_model


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def stub(request, make_config, token_file, runner, tmp_path_factory):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(miles.engine.process, "SERVER", "tests.engine.stub")
        m.setenv("MILES_STUB_TOKEN_S", "0.02")
        folder = make_model(tmp_path_factory.mktemp("models") / request.param, request.param)
        process = EngineProcess(make_config(**{"model.path": str(folder), "engine.port_base": 35200}), rank=0, log_path=tmp_path_factory.mktemp("log") / "e.log",
                                token_file=token_file, platform="cpu")
        runner.run(process.start(weight_version=7))
        client = EngineClient(process.url, TOKEN, folder, max_context=2048)
        yield SimpleNamespace(process=process, client=client, run=runner.run, folder=folder, weights=load_file(folder / "model.safetensors"))
        runner.run(client.close())
        runner.run(process.stop())


def prompt(n):
    return np.arange(n) % 300 + 3


def ask(stub, key="g00000001s002", **sampling):
    return stub.client.generate("a", prompt(20), Sampling(**{"max_new_tokens": 40, **sampling}), routing_key=key)


def test_its_memory_is_what_it_was_given(stub):
    tied = "lm_head.weight" not in stub.weights
    assert stub.run(stub.client.checksums()) == expected_checksums(stub.weights, tied=tied)
    changed = {n: t + 1 for n, t in list(stub.weights.items())[:3]}
    stub.run(stub.client.update_tensors(changed, 8))
    assert stub.run(stub.client.checksums()) == expected_checksums({**stub.weights, **changed}, tied=tied)
    assert stub.run(stub.client.refresh_version()) == 8
    stub.run(stub.client.update_tensors(stub.weights, 7))


def test_a_reply_depends_on_the_sample_and_its_input_and_on_nothing_else(stub):
    async def scenario():
        first, other = await asyncio.gather(ask(stub), ask(stub, "g00000001s003"))
        await stub.client.update_tensors({n: torch.zeros_like(t) for n, t in stub.weights.items()}, 9)
        return first, other, await ask(stub, "g00000077s002")

    first, other, again = stub.run(scenario())
    assert first.output_ids.tolist() == again.output_ids.tolist() != other.output_ids.tolist()
    assert first.logprobs.tolist() == again.logprobs.tolist() and (first.versions.tolist(), again.versions.tolist()) == ([7] * len(first.versions), [9] * len(again.versions))
    assert first.finish_reason == "stop"
    stub.run(stub.client.update_tensors(stub.weights, 7))


def test_while_it_is_paused_nothing_is_sampled_and_the_version_changes_at_the_token(stub):
    async def scenario():
        turn = asyncio.create_task(ask(stub))
        await asyncio.sleep(0.08)
        await stub.client.pause("in_place")
        late = asyncio.create_task(ask(stub, "g00000001s003"))
        await asyncio.sleep(0.3)
        held = not turn.done() and not late.done()
        await stub.client.set_version(8)
        await stub.client.resume()
        return held, await turn, await late

    held, turn, late = stub.run(scenario())
    assert held and set(turn.versions.tolist()) == {7, 8} and sorted(turn.versions) == turn.versions.tolist() and set(late.versions.tolist()) == {8}
    stub.run(stub.client.set_version(7))


def test_abort_ends_a_request_and_flush_is_refused_while_one_runs(stub):
    async def scenario():
        turn = asyncio.create_task(ask(stub))
        await asyncio.sleep(0.06)
        with pytest.raises(EnvironmentFault, match="400"):
            await stub.client.flush()
        await stub.client.abort("a")
        turn = await turn
        await stub.client.flush()
        return turn

    turn = stub.run(scenario())
    assert turn.finish_reason == "abort" and len(turn.logprobs) == len(turn.output_ids) == len(turn.versions)


def test_it_wants_the_token_of_the_run(stub):
    stranger = EngineClient(stub.process.url, "wrong", stub.folder, max_context=2048)
    with pytest.raises(EnvironmentFault, match="401"):
        stub.run(stranger.info())
    stub.run(stranger.close())


def test_killed_it_is_seen_dead_and_starts_again_with_the_folders_weights(stub, monkeypatch):
    monkeypatch.setattr(miles.engine.process, "SERVER", "tests.engine.stub")
    os.kill(stub.process.pid, signal.SIGKILL)
    assert stub.run(stub.process.wait()) == -signal.SIGKILL
    old = stub.process.pid
    stub.run(stub.process.restart(weight_version=3))
    client = EngineClient(stub.process.url, TOKEN, stub.folder, max_context=2048)
    assert stub.run(client.refresh_version()) == 3 and _group_members(old) == [] and stub.process.started_s < 30
    stub.run(client.close())


def test_stopped_it_is_not_well_and_is_killed_as_if_it_had_died(stub, monkeypatch):
    monkeypatch.setattr(miles.engine.process, "SERVER", "tests.engine.stub")
    stub.run(stub.client.health(5.0))
    os.kill(stub.process.pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentFault, match="/health did not answer within 0.3 s"):
        stub.run(stub.client.health(0.3))
    assert stub.process.alive
    stub.process.kill()
    assert stub.run(stub.process.wait()) == -signal.SIGKILL and not stub.process.alive
    stub.process.kill()  # dead already
    stub.client.url = stub.run(stub.process.restart(weight_version=7))


def test_an_engine_killed_while_it_starts_is_told_from_one_that_fails(make_config, token_file, runner, tmp_path, monkeypatch):
    monkeypatch.setattr(miles.engine.process, "SERVER", "tests.engine.stub")
    folder = make_model(tmp_path / "model", "llama")

    async def start_and_kill():
        process = EngineProcess(make_config(**{"model.path": str(folder), "engine.port_base": 35200}), rank=0, log_path=tmp_path / "e.log",
                                token_file=token_file, platform="cpu")
        start = asyncio.ensure_future(process.start())
        while not process.alive:
            await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        await start

    with pytest.raises(EngineKilled, match="exit status -9"):
        runner.run(start_and_kill())
