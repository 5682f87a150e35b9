"""A real SGLang server against Hugging Face's forward: what Miles records is what the model did."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import miles.engine.process
from miles.core import EnvironmentFault, StructureError
from miles.engine import EngineClient, EngineProcess, KeyRequired, Sampling
from miles.engine.handover import handover_folder
from miles.engine.digest import combined_checksum, expected_checksums, require_equal
from miles.engine.process import _group_members
from miles.engine.wire import parse_reply
from miles.models.draft import add_draft_layer
from miles.models.tiny_moe import build
from miles.weights.digest import bits
from miles.weights.p2p.image import Image
from miles.weights.p2p.plan import Tensor
from miles.weights.p2p.receivers import whole
from miles.weights.patch import encode_patch, write_patch
from tests.engine.conftest import TOKEN
from tests.engine.stub import TOKEN as STUB_TOKEN
from tests.engine.stub import StubEngine
from tests.engine.tiny import make_tokenizer

pytestmark = pytest.mark.engine

LONG = Sampling(200, ignore_eos=True)


@pytest.fixture(scope="module")
def weights(engine):
    return load_file(engine.folder / "model.safetensors")


@pytest.fixture(scope="module")
def hf(engine, tmp_path_factory):
    """Hugging Face's model with any state dict in it, read from a folder because that also joins the experts as it wants them."""
    from transformers import AutoModelForCausalLM

    def load(state=None):
        folder = engine.folder
        if state is not None:
            folder = tmp_path_factory.mktemp("hf")
            shutil.copy(engine.folder / "config.json", folder)
            save_file(state, folder / "model.safetensors", {"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    return load


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(3, 380, n)


def changed(weights, seed):
    g = torch.Generator().manual_seed(seed)
    return {k: v + 0.02 * torch.randn(v.shape, generator=g) for k, v in weights.items()}


def logprobs(model, tokens, temperature=1.0):
    with torch.no_grad():
        out = model(torch.as_tensor(tokens)[None], output_router_logits=True)
    return torch.log_softmax(out.logits[0].float() / temperature, -1), out.router_logits


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(engine, hf, temperature):
    turn = engine.run(engine.client.generate("a", prompt(40), Sampling(24, temperature, ignore_eos=True), routing_key="k"))
    tokens = np.concatenate([turn.input_ids, turn.output_ids])
    lp, _ = logprobs(hf(), tokens, temperature)
    expected = [lp[i - 1, tokens[i]].item() for i in range(40, 64)]
    assert np.abs(turn.logprobs - expected).max() < 1e-4


def test_routes_are_the_models_top_k_and_can_start_anywhere(engine, hf):
    turn = engine.run(engine.client.generate("b", prompt(30, 1), Sampling(10, ignore_eos=True), routing_key="k"))
    tokens = np.concatenate([turn.input_ids, turn.output_ids])
    _, router = logprobs(hf(), tokens)
    expected = torch.stack([r.topk(2, -1).indices for r in router], 1)[:39].numpy()
    assert turn.routes.shape == (39, 2, 2)
    assert (np.sort(turn.routes, -1) == np.sort(expected, -1)).all()
    more = engine.run(engine.client.generate("b2", np.append(tokens, [5, 6]), Sampling(3, ignore_eos=True), routing_key="k", routes_from=39))
    assert more.routes_start == 39 and len(more.routes) == 42 + 3 - 1 - 39


def test_a_longer_prompt_hits_the_prefix_and_another_namespace_does_not(engine):
    first = engine.run(engine.client.generate("c", prompt(50, 2), Sampling(8, ignore_eos=True), routing_key="k", extra_key="v7"))
    longer = np.concatenate([first.input_ids, first.output_ids, [5, 6, 7]])
    other = engine.run(engine.client.generate("c2", longer, Sampling(2), routing_key="k", extra_key="v8"))
    same = engine.run(engine.client.generate("c3", longer, Sampling(2), routing_key="k", extra_key="v7"))
    assert (first.cached_tokens, other.cached_tokens, same.cached_tokens) == (0, 0, 57)  # 50 + 8, less the last sampled token


def test_output_includes_the_stop_token_with_its_logprob(engine):
    stops = tuple(range(0, 390, 3))
    turn = engine.run(engine.client.generate("d", prompt(20, 3), Sampling(100, stop_token_ids=stops), routing_key="k"))
    assert turn.finish_reason == "stop" and turn.output_ids[-1] in stops and not set(turn.output_ids[:-1].tolist()) & set(stops)
    assert len(turn.logprobs) == len(turn.output_ids)


def test_generation_without_a_routing_key_is_refused(engine):
    with pytest.raises(KeyRequired, match="no routing key"):
        engine.run(engine.client.generate("e", prompt(5), LONG, routing_key=""))


def test_an_id_outside_the_vocabulary_never_reaches_the_server(engine):
    with pytest.raises(StructureError, match="token id 392"):
        engine.run(engine.client.generate("f", [1, 392], LONG, routing_key="k"))
    assert engine.run(engine.client.info())["weight_version"] == "7"


def test_abort_returns_what_was_sampled_and_leaves_similar_ids_alone(engine):
    async def scenario():
        first = asyncio.create_task(engine.client.generate("s1", prompt(20, 4), Sampling(1500, ignore_eos=True), routing_key="k"))
        second = asyncio.create_task(engine.client.generate("s10", prompt(20, 5), LONG, routing_key="k"))
        await asyncio.sleep(0.4)
        await engine.client.abort("s1")
        return await first, await second

    first, second = engine.run(scenario())
    assert first.finish_reason == "abort" and 0 < len(first.output_ids) < 1500 and len(first.logprobs) == len(first.output_ids)
    assert second.finish_reason == "length" and len(second.output_ids) == 200


def test_past_its_deadline_a_request_is_aborted(engine):
    with pytest.raises(EnvironmentFault, match="longer than 0.3 s"):
        engine.run(engine.client.generate("g", prompt(20, 6), Sampling(1900, ignore_eos=True), routing_key="k", deadline_s=0.3))
    time.sleep(0.2)
    engine.run(engine.client.flush())  # the engine refuses this while anything runs


def generate_across_an_update(engine, weights, new, pause, ids):
    """One turn of 600 tokens, sampled partly under version 7 (`weights`) and partly under 8 (`new`), however busy the machine is."""
    flush = pause == "retract"

    async def attempt(wait_s):
        await engine.client.update_tensors(weights, 7)
        await engine.client.flush()
        task = asyncio.create_task(engine.client.generate("h", ids, Sampling(600, ignore_eos=True), routing_key="k"))
        await asyncio.sleep(wait_s)
        await engine.client.pause(pause)
        await engine.client.update_tensors(new, 8, flush=flush)
        await engine.client.resume()
        return await task

    for wait_s in (0.5, 1.0, 2.0, 4.0, 8.0, 0.2):
        turn = engine.run(attempt(wait_s))
        if set(turn.versions.tolist()) == {7, 8}:
            return turn
    pytest.fail("no update fell into the middle of a turn")


def test_in_place_update_versions_are_right_to_the_token(engine, weights, hf):
    """Old weights computed the KV of every position before the boundary, new ones everything after: the log-probabilities say which is which."""
    new = changed(weights, 1)
    turn = generate_across_an_update(engine, weights, new, "in_place", prompt(30, 7))
    boundary = int((turn.versions == 7).sum())
    assert turn.versions.tolist() == [7] * boundary + [8] * (600 - boundary)
    tokens = torch.as_tensor(np.concatenate([turn.input_ids, turn.output_ids]))[None]
    split = 30 + boundary - 1  # the last token sampled under the old weights is the first one the new ones process
    with torch.no_grad():
        old = hf()(tokens[:, :split], use_cache=True)
        after = hf(new)(tokens[:, split:], past_key_values=old.past_key_values).logits[0]
    lp = torch.log_softmax(torch.cat([old.logits[0], after]).float(), -1)
    expected = np.array([lp[i - 1, tokens[0, i]].item() for i in range(30, 630)])
    assert np.abs(turn.logprobs - expected).max() < 1e-4
    engine.run(_restore(engine, weights))


def test_retract_prefills_again_under_the_new_weights(engine, weights, hf):
    new = changed(weights, 2)
    turn = generate_across_an_update(engine, weights, new, "retract", prompt(30, 8))
    tokens = np.concatenate([turn.input_ids, turn.output_ids])
    by_version = {7: logprobs(hf(), tokens)[0], 8: logprobs(hf(new), tokens)[0]}
    expected = [by_version[v][30 + i - 1, tokens[30 + i]].item() for i, v in enumerate(turn.versions.tolist())]
    assert np.abs(turn.logprobs - expected).max() < 1e-4
    engine.run(_restore(engine, weights))


async def _restore(engine, weights):
    await engine.client.pause("in_place")
    await engine.client.update_tensors(weights, 7, flush=False)
    await engine.client.resume()
    await engine.client.flush()


def test_the_engines_memory_is_acknowledged_by_checksum(engine, weights):
    new = changed(weights, 3)
    began = time.perf_counter()
    expected = expected_checksums(new)
    assert time.perf_counter() - began < 0.5
    with pytest.raises(StructureError, match="holds other bytes in 21 of 21"):
        require_equal(expected, engine.run(engine.client.checksums()), 8)
    engine.run(engine.client.update_tensors(new, 8))
    found = engine.run(engine.client.checksums())
    require_equal(expected, found, 8)
    assert combined_checksum(found) == combined_checksum(expected)
    engine.run(engine.client.update_tensors({"lm_head.weight": weights["lm_head.weight"]}, 9))
    assert expected_checksums({**new, "lm_head.weight": weights["lm_head.weight"]}) == engine.run(engine.client.checksums())
    assert engine.run(engine.client.refresh_version()) == 9
    engine.run(_restore(engine, weights))


def test_an_engine_that_does_not_speculate_takes_versions_with_a_draft_layer_and_leaves_that_out(make_config, token_file, tmp_path, runner):
    folder = tmp_path / "drafting"
    build("tiny_glm4_moe", make_tokenizer(folder), 512)[0].save_pretrained(folder)
    add_draft_layer(folder)
    tensors = load_file(folder / "model.safetensors")
    process = EngineProcess(make_config(**{"model.path": str(folder), "model.max_context": 512, "rollout.max_session_tokens": 256}), rank=0, log_path=tmp_path / "e.log", token_file=token_file, platform="cpu")

    async def scenario():
        await process.start(weight_version=1)
        client = EngineClient(process.url, TOKEN, folder, max_context=512)
        try:
            require_equal(expected_checksums(tensors, layers=4), await client.checksums(), 1)
            new = changed(tensors, 4)
            await client.pause("in_place")
            await client.update_tensors(new, 2)
            require_equal(expected_checksums(new, layers=4), await client.checksums(), 2)
            assert any(n.startswith("model.layers.4.") for n in expected_checksums(new))
            await client.resume()
            delta = {n: nudged(t, 50) for n, t in new.items()}
            with open(tmp_path / "patch", "wb") as f:
                write_patch(f, encode_patch(delta.items(), new))
            await client.rehearse_patch(tmp_path / "patch")
            await client.pause("in_place")
            await client.apply_patch(tmp_path / "patch", 3)
            require_equal(expected_checksums(delta, layers=4), await client.checksums(), 3)
        finally:
            await client.close()
            await process.stop()

    runner.run(scenario())


def test_unknown_names_and_wrong_shapes_are_refused_before_anything_changes(engine, weights):
    before = engine.run(engine.client.checksums())
    for tensors, cause in (({"nope.weight": torch.zeros(2)}, "name"), ({"lm_head.weight": torch.zeros(2, 2)}, "shape"),
                           ({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}, "dtype")):
        with pytest.raises(StructureError) as e:
            engine.run(engine.client.update_tensors({"model.layers.0.mlp.gate.weight": weights["model.layers.0.mlp.gate.weight"] + 1, **tensors}, 8))
        assert e.value.cause == f"weights:{cause}"
    assert engine.run(engine.client.checksums()) == before and engine.client.version == 7


def test_an_image_is_loaded_and_loaded_again_when_it_was_written_over(engine, weights):
    """What trainer ranks send point to point lies in one file, which the next version replaces in place."""
    tensors = {n: Tensor(tuple(t.shape), "float32") for n, t in weights.items()}
    image = Image(handover_folder(), tensors, whole(tensors))
    try:
        for version, seed in ((8, 5), (9, 6)):
            new = changed(weights, seed)
            for name, tensor in new.items():
                image.write(name, tensors[name].whole, tensor.reshape(-1).numpy().view(np.uint8))
            engine.run(engine.client.pause("in_place"))
            engine.run(engine.client.update_from_folder(image.folder, version))
            assert engine.run(engine.client.checksums()) == expected_checksums(new) == expected_checksums(image.state())
            engine.run(engine.client.resume())
    finally:
        image.close()
        engine.run(_restore(engine, weights))


def nudged(tensor, every):
    """A step in the last place of every so many elements."""
    out = tensor.clone()
    bits(out)[::every] += 1
    return out


@pytest.mark.parametrize("rehearsed", [True, False])
def test_a_patch_is_applied_to_the_engines_own_memory_or_refused_and_nothing_changed(engine, weights, tmp_path, rehearsed):
    new = {n: nudged(t, 50) for n, t in weights.items()}
    with open(tmp_path / "patch", "wb") as f:
        write_patch(f, encode_patch(new.items(), weights))
    before = engine.run(engine.client.checksums())
    if rehearsed:
        engine.run(engine.client.rehearse_patch(tmp_path / "patch"))
        assert engine.run(engine.client.checksums()) == before
    engine.run(engine.client.pause("in_place"))
    engine.run(engine.client.apply_patch(tmp_path / "patch", 8))
    assert engine.run(engine.client.checksums()) == expected_checksums(new) and engine.run(engine.client.refresh_version()) == 8
    with open(tmp_path / "patch", "wb") as f:
        write_patch(f, encode_patch(((n, nudged(t, 70)) for n, t in new.items()), {n: nudged(t, 33) for n, t in weights.items()}))  # not a base that the engine has
    with pytest.raises(EnvironmentFault, match="does not become what the trainer had"):
        engine.run(engine.client.rehearse_patch(tmp_path / "patch") if rehearsed else engine.client.apply_patch(tmp_path / "patch", 9))
    assert engine.run(engine.client.checksums()) == expected_checksums(new) and engine.run(engine.client.refresh_version()) == 8
    engine.run(engine.client.resume())
    engine.run(_restore(engine, weights))


def test_weights_by_gloo_broadcast(engine, weights):
    from sglang.srt.utils import init_custom_process_group

    new = changed(weights, 4)

    async def scenario():
        joined = asyncio.create_task(engine.client.init_broadcast("127.0.0.1", 34990, rank=1, world_size=2, group="g", backend="gloo"))
        group = await asyncio.to_thread(init_custom_process_group, backend="gloo", init_method="tcp://127.0.0.1:34990", world_size=2, rank=0, group_name="g")
        await joined
        await engine.client.pause("in_place")
        received = asyncio.create_task(engine.client.update_from_broadcast(
            list(new), ["float32"] * len(new), [t.shape for t in new.values()], 8, group="g"))
        for tensor in new.values():
            await asyncio.to_thread(torch.distributed.broadcast, tensor, src=0, group=group)
        await received
        found = await engine.client.checksums()
        await engine.client.resume()
        await engine.client.destroy_broadcast("g")
        return found

    assert engine.run(scenario()) == expected_checksums(new)
    assert engine.client.version == 8
    engine.run(_restore(engine, weights))


def test_the_stub_engine_speaks_like_the_real_one(engine):
    """Every field the stub sends exists in the real reply, and both parse to the same kind of turn."""
    async def scenario():
        stub = StubEngine(engine.client.shape, stop_id=2)
        client = EngineClient(await stub.start(), STUB_TOKEN, engine.folder, max_context=2048)
        mine = await client.generate("a", prompt(9), Sampling(4), routing_key="k", routes_from=3, extra_key="v7")
        body = {**stub.requests[-1], "rid": "stub-check"}
        fake, real = await client._post("/generate", body), await engine.client._post("/generate", {**body, "rid": "stub-check-2"})
        await client.close()
        await stub.stop()
        return mine, body, fake, real

    mine, body, fake, real = engine.run(scenario())
    assert fake.keys() <= real.keys() and fake["meta_info"].keys() <= real["meta_info"].keys()
    assert fake["meta_info"]["finish_reason"].keys() <= real["meta_info"]["finish_reason"].keys() | {"matched", "length"}
    theirs = parse_reply(body, np.array(body["input_ids"], np.int32), real, engine.client.shape, 0.0)
    assert mine.routes.dtype == theirs.routes.dtype and mine.routes.shape[1:] == theirs.routes.shape[1:] and mine.routes_start == theirs.routes_start == 3


def test_the_stub_engine_is_steered_like_the_real_one(engine, weights, make_config, token_file, tmp_path, runner, monkeypatch):
    """As a process, by the same calls: each field it answers with is one of the real reply, and its memory sums to the same."""
    monkeypatch.setattr(miles.engine.process, "SERVER", "tests.engine.stub")
    process = EngineProcess(make_config(**{"engine.port_base": 35400}), rank=0, log_path=tmp_path / "stub.log", token_file=token_file, platform="cpu")
    runner.run(process.start(weight_version=7))
    stub = EngineClient(process.url, TOKEN, engine.folder, max_context=2048)
    new = changed(weights, 5)

    async def steer(client, folder):
        replies = [await client._post("/pause_generation", {"mode": "in_place"})]
        replies.append(await client._post("/update_weights_from_disk", {
            "model_path": str(folder), "load_format": "safetensors", "weight_version": "8", "flush_cache": False, "abort_all_requests": False}))
        checked = await client._post("/weights_checker", {"action": "checksum"})
        replies += [checked, checked["ranks"][0], await client._post("/continue_generation", {})]
        replies += [await client._post("/update_weight_version", {"new_version": "9", "abort_all_requests": False}), await client.info()]
        await client.flush()
        return replies

    save_file(new, tmp_path / "model.safetensors", {"format": "pt"})
    try:
        theirs, ours = engine.run(steer(engine.client, tmp_path)), engine.run(steer(stub, tmp_path))
    finally:
        engine.run(stub.close())
        runner.run(process.stop())
        engine.run(_restore(engine, weights))
    for real, fake in zip(theirs, ours, strict=True):
        assert fake.keys() <= real.keys()
    assert ours[3]["checksums"] == theirs[3]["checksums"] == expected_checksums(new) and ours[3]["per_gpu_checksum"] == theirs[3]["per_gpu_checksum"]
    assert ours[-1]["weight_version"] == theirs[-1]["weight_version"] == "9"


def test_the_token_is_required_and_shows_neither_in_the_process_list_nor_in_the_log(engine):
    stranger = EngineClient(engine.process.url, "wrong", engine.folder, max_context=2048)
    with pytest.raises(EnvironmentFault, match="401"):
        engine.run(stranger.info())
    engine.run(stranger.close())
    for pid in _group_members(engine.process.pid):
        assert TOKEN not in Path(f"/proc/{pid}/cmdline").read_text()
    assert TOKEN not in engine.process.log_path.read_text()


def test_an_engine_that_does_not_start_shows_the_end_of_its_log(make_config, token_file, tmp_path, runner):
    living = {*Path(tempfile.gettempdir()).glob(f"miles-engine-{os.getpid()}-*")}
    process = EngineProcess(make_config(**{"engine.extra_args": "['--no-such-flag']"}), rank=3, log_path=tmp_path / "e.log", token_file=token_file,
                            platform="cpu")
    with pytest.raises(EnvironmentFault, match=r"(?s)ended with exit status 2.*unrecognized arguments: --no-such-flag"):
        runner.run(process.start())
    slow = EngineProcess(make_config(**{"engine.start_timeout_s": 2.0}), rank=3, log_path=tmp_path / "e.log", token_file=token_file, platform="cpu")
    with pytest.raises(EnvironmentFault, match="did not answer within 2 s"):
        runner.run(slow.start())
    assert not slow.alive and not _group_members(slow.pid)
    assert not [f for f in Path(tempfile.gettempdir()).glob(f"miles-engine-{os.getpid()}-*") if f not in living], "nothing is left of an engine that was stopped"


def test_kill_9_of_the_parent_leaves_no_process(make_config, token_file, tmp_path):
    program = textwrap.dedent(f"""
        import asyncio
        from miles.config import load_config
        from miles.engine import EngineProcess
        config = load_config("configs/tiny_async.toml", ("model.path={make_config().model.path}", "model.recipe=none", "engine.port_base=34400"))
        async def main():
            engine = EngineProcess(config, rank=0, log_path={str(tmp_path / "e.log")!r}, token_file={str(token_file)!r}, platform="cpu")
            await engine.start()
            print(engine.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        group = int(parent.stdout.readline())
        assert len(_group_members(group)) == 3  # server, scheduler, detokenizer
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 10
        while _group_members(group) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _group_members(group) == []
    finally:
        parent.kill()
        parent.wait()
