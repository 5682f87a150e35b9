"""The megatron-core model is the Hugging Face model: log-probabilities of every family, packed or not, at a temperature, under replay."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import worlds
from safetensors.torch import load_file, save_file

from miles.config.schema import LayoutConfig
from miles.core import ConfigError, Layout, StructureError
from miles.trainer.logprob import token_logprobs
from miles.trainer.model import build_model, transformer_config
from miles.weights.mapping import export_hf, read_architecture

ROUTES = (2, 2, 8)  # MoE layers, K, experts of the tiny Qwen3-MoE


def hugging_face(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def hf_logprobs(model, sequences, temperature=1.0):
    """Log-probabilities of the sampled tokens of each sequence, one sequence at a time."""
    out = []
    for s in sequences:
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        logps = torch.log_softmax(model(tokens[None]).logits[0].float() / temperature, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        out.append(logps[torch.from_numpy(s.loss_mask[1:]).bool()])
    return out


def largest_difference(ours, theirs):
    return max(float((torch.tensor(a) - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v3_yarn", "glm_moe_dsa"])
def test_logprobs_equal_hugging_face_in_packed_batches(world, models, family):
    batch = worlds.sequences(6, 3)
    ours = worlds.logprobs_of(worlds.build(models[family], {}), batch)
    assert largest_difference(ours, hf_logprobs(hugging_face(models[family]), batch)) <= 1e-5


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_the_selection_bias_of_a_router_is_that_of_the_folder_in_bf16_too(world, models, family):
    model = build_model(models[family], Layout(world=1), precision="bf16")
    exported, source = dict(export_hf(model.chunks, model.arch)), load_file(f"{models[family]}/model.safetensors")
    biases = [name for name in source if name.endswith("e_score_correction_bias")]
    assert biases and all(torch.equal(exported[name], source[name]) for name in biases)
    assert all(exported[name].dtype == torch.bfloat16 for name in source.keys() - biases)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def test_gradients_equal_hugging_face(world, models, family):
    batch = worlds.sequences(6, 13)
    step = worlds.build(models[family], {})
    inner = step._loss

    def sum_of_logprobs(tokens, output):
        _, figures = inner(tokens, output)
        return output[0].sum(), figures

    step._loss = sum_of_logprobs
    hf = hugging_face(models[family])
    for s in batch:
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        logprobs = torch.log_softmax(hf(tokens[None]).logits[0].float(), -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        logprobs[torch.from_numpy(s.loss_mask[1:]).bool()].sum().backward()
    squares = [float(p.grad.double().square().sum()) for p in hf.parameters() if p.grad is not None]
    assert step.run(batch, number=0).grad_norm == pytest.approx(sum(squares) ** 0.5, rel=1e-5)


def with_config(folder, target, **changes):
    """A copy of a model folder with other values in its config.json."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(target)


@pytest.mark.parametrize("top_k", [1, 5, 500])
def test_each_token_attends_to_the_keys_that_its_index_picks(world, models, tmp_path, top_k):
    batch = worlds.sequences(6, 3)
    folder = with_config(models["glm_moe_dsa"], tmp_path / "other", index_topk=top_k)
    ours, theirs = worlds.logprobs_of(worlds.build(folder, {}), batch), hf_logprobs(hugging_face(folder), batch)
    assert largest_difference(ours, theirs) <= 1e-5
    # 20 keys of up to 60 tokens: neither as few as 5 nor all
    assert largest_difference(ours, hf_logprobs(hugging_face(models["glm_moe_dsa"]), batch)) > 0.1


def test_a_stage_that_starts_without_an_index_of_its_own_is_refused(models):
    arch, layout = read_architecture(models["glm_moe_dsa"]), Layout(world=2, pp=2)
    with pytest.raises(ConfigError, match=r"pipeline stage 2 starts on layer 3, which uses the sparse index of a layer before it[\s\S]*layers 1, 2, 4"):
        transformer_config(arch, layout, "fp32", "none", True)
    assert transformer_config(arch, layout, "fp32", "none", True, LayoutConfig(first_stage_layers=3)).dsa_indexer_topk == 20


def test_a_step_changes_everything_but_the_index(world, models):
    step = worlds.build(models["glm_moe_dsa"], {})
    before = {name: p.detach().clone() for name, p in step.model.chunks[0].named_parameters()}
    step.run(worlds.sequences(8, 12), number=0)
    same = {name for name, p in step.model.chunks[0].named_parameters() if torch.equal(p, before[name])}
    assert same == {name for name in before if ".indexer." in name} and len(same) == 3 * 5


def test_draft_layers_of_a_folder_are_neither_loaded_nor_exported(world, models, tmp_path):
    folder = with_config(models["glm_moe_dsa"], tmp_path / "draft", num_nextn_predict_layers=1)
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    draft = {f"model.layers.4.{name}.weight": torch.ones(64, 128) for name in ("eh_proj", "self_attn.indexer.wk")}
    save_file({**tensors, **draft}, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    result = worlds.roundtrip(folder, {}, 20_000)
    assert result == {"names": len(tensors), "repeated": 0, "missing": sorted(draft), "unknown": [], "different": []}


def test_temperature_divides_the_logits(world, models):
    batch = worlds.sequences(3, 4)
    ours = worlds.logprobs_of(worlds.build(models["llama"], {}, temperature=0.7), batch)
    assert largest_difference(ours, hf_logprobs(hugging_face(models["llama"]), batch, temperature=0.7)) <= 1e-5


def test_packed_sequences_do_not_see_each_other(world, models):
    batch = worlds.sequences(5, 5)
    together = worlds.logprobs_of(worlds.build(models["qwen3_moe"], {}, max_tokens_per_microbatch=1000), batch)
    for one, alone in zip(together, batch, strict=True):
        separate = worlds.logprobs_of(worlds.build(models["qwen3_moe"], {}), [replace(alone, rollout=0)])[0]
        np.testing.assert_allclose(one, separate, atol=2e-6)


class ForcedRouting:
    """Makes the gates of a Hugging Face Qwen3-MoE take given experts; without `routes`, records the ones they choose."""

    def __init__(self, model, routes=None):
        self.routes, self.seen = routes, []
        self.hooks = [layer.mlp.gate.register_forward_hook(self._hook(i)) for i, layer in enumerate(model.model.layers)]

    def _hook(self, layer):
        def hook(gate, inputs, output):
            logits, scores, indices = output
            if self.routes is None:
                self.seen.append(indices)
                return None
            chosen = torch.from_numpy(self.routes[:, layer].astype(np.int64))
            given = logits.softmax(-1).gather(1, chosen)
            return logits, given / given.sum(-1, keepdim=True), chosen

        return hook

    def remove(self):
        for hook in self.hooks:
            hook.remove()


def with_routes(s, routes):
    return replace(s, routes=routes)


def test_replaying_the_routes_of_hugging_face_gives_its_logprobs(world, models):
    hf, batch, recorded = hugging_face(models["qwen3_moe"]), worlds.sequences(4, 6), []
    for s in batch:
        gates = ForcedRouting(hf)
        hf_logprobs(hf, [s])
        recorded.append(with_routes(s, torch.stack(gates.seen, 1)[:-1].numpy().astype(np.uint8)))
        gates.remove()
    ours = worlds.logprobs_of(worlds.build(models["qwen3_moe"], {}, replay=True), recorded)
    assert largest_difference(ours, hf_logprobs(hf, batch)) <= 1e-5


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_replayed_experts_are_the_given_ones_in_forward_and_recomputation(world, models, recompute):
    # random routes, which no router would choose, forced on both models
    hf, batch = hugging_face(models["qwen3_moe"]), worlds.sequences(4, 7, routes=ROUTES)
    theirs = []
    for s in batch:
        gates = ForcedRouting(hf, np.concatenate([s.routes, s.routes[-1:]]))
        theirs += hf_logprobs(hf, [s])
        gates.remove()
    step = worlds.build(models["qwen3_moe"], {}, replay=True, recompute=recompute)
    maps = [[] for _ in range(2)]
    layers = step.model.chunks[0].module.decoder.layers
    hooks = [layer.mlp.router.register_forward_hook(lambda m, i, out, seen=seen: seen.append(out[1])) for layer, seen in zip(layers, maps, strict=True)]
    ours = worlds.logprobs_of(step, batch)
    assert largest_difference(ours, theirs) <= 1e-5
    order = step.plan([len(s.tokens) for s in batch]).of_rank(0)
    want = np.concatenate([batch[i].routes for i in order])
    for layer, seen in enumerate(maps):
        given = torch.zeros(len(want), 8, dtype=torch.bool).scatter_(1, torch.from_numpy(want[:, layer].astype(np.int64)), True)
        # with recomputation every micro-batch passes the router twice: forward, and again just before its own backward
        passes = 2 if recompute == "full" else 1
        assert torch.equal(torch.cat(seen[::passes]), given)
        assert torch.equal(torch.cat(seen[passes - 1 :: passes]), given)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("family", "routes"), [("qwen3_moe", ROUTES), ("glm_moe_dsa", (3, 2, 8))])
def test_recomputation_does_not_change_the_step(world, models, family, routes):
    batch = worlds.sequences(4, 8, routes=routes)
    results = [worlds.build(models[family], {}, replay=True, recompute=r).run(batch, number=0) for r in ("none", "full")]
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)
    assert results[0].loss == results[1].loss


def test_gradients_flow_to_the_router_under_replay(world, models):
    step = worlds.build(models["qwen3_moe"], {}, replay=True)
    before = step.model.chunks[0].module.decoder.layers[0].mlp.router.weight.detach().clone()
    step.run(worlds.sequences(4, 9, routes=ROUTES), number=0)
    assert not torch.equal(before, step.model.chunks[0].module.decoder.layers[0].mlp.router.weight)


def test_routes_that_name_an_expert_twice_are_refused(world, models):
    batch = worlds.sequences(2, 10, routes=ROUTES)
    batch[0].routes[3, 1] = [5, 5]
    with pytest.raises(StructureError, match=r"token \d+, layer 1 name an expert twice: \[5, 5\]"):
        worlds.build(models["qwen3_moe"], {}, replay=True).run(batch, number=0)


def test_bf16_with_replay_stays_near_fp32(world, models):
    batch = worlds.sequences(4, 11, routes=ROUTES)
    fp32, bf16 = (worlds.logprobs_of(worlds.build(models["qwen3_moe"], {}, replay=True, precision=p), batch) for p in ("fp32", "bf16"))
    differences = np.concatenate([np.abs(np.subtract(a, b)) for a, b in zip(fp32, bf16, strict=True)])
    assert 0 < differences.mean() < 0.03


# -- log-probabilities and entropy -------------------------------------------------------------------------------------------
@pytest.fixture
def alone(world):
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def test_logprob_and_entropy_by_hand(alone):
    # logits log 2, log 1, log 1: p = 1/2, 1/4, 1/4, H = 3/2 log 2; and 0, 0, 0: H = log 3. At temperature 1/2: logits log 4, 0, 0: p = 2/3, 1/6, 1/6
    hidden, weight = torch.tensor([[1.0], [0.0]]), torch.tensor([[np.log(2.0)], [0.0], [0.0]], dtype=torch.float32)
    targets = torch.tensor([0, 2])
    logprobs, entropy, highest = token_logprobs(hidden, weight, targets, temperature=1.0, vocab=3, tp_group=alone)
    assert (highest == logprobs).tolist() == [True, True] and not highest.requires_grad
    assert token_logprobs(hidden, weight, torch.tensor([1, 0]), temperature=1.0, vocab=3, tp_group=alone).highest.tolist() == highest.tolist()
    assert logprobs.tolist() == pytest.approx([np.log(1 / 2), np.log(1 / 3)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([1.5 * np.log(2), np.log(3)], abs=1e-6)
    logprobs, entropy, _ = token_logprobs(hidden, weight, targets, temperature=0.5, vocab=3, tp_group=alone)
    assert logprobs[0].item() == pytest.approx(np.log(2 / 3), abs=1e-6)
    assert entropy[0].item() == pytest.approx(2 / 3 * np.log(3 / 2) + 1 / 3 * np.log(6), abs=1e-6)


def test_a_certain_distribution_has_entropy_zero_and_finite_gradients(alone):
    hidden = torch.tensor([[1.0]], requires_grad=True)
    logprobs, entropy, _ = token_logprobs(hidden, torch.tensor([[500.0], [-500.0]]), torch.tensor([1]), temperature=1.0, vocab=2, tp_group=alone)
    (entropy.sum() + logprobs.sum()).backward()
    assert (entropy.item(), logprobs.item(), hidden.grad.item()) == (0.0, -1000.0, -1000.0)


@pytest.mark.parametrize("uses", ["logprobs", "entropy", "both"])
def test_chunked_logprobs_entropies_and_gradients_equal_log_softmax(alone, monkeypatch, uses):
    import miles.trainer.logprob as module

    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * 11)  # 3 rows at a time
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 5, generator=generator, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, requires_grad=True)
    targets = torch.randint(0, 9, (8,), generator=generator)
    factors = torch.randn(2, 8, generator=generator) * torch.tensor([[uses != "entropy"], [uses != "logprobs"]])
    *ours, highest = token_logprobs(hidden, weight, targets, temperature=0.8, vocab=9, tp_group=alone)
    used = [x * f for x, f, name in zip(ours, factors, ("logprobs", "entropy"), strict=True) if uses in (name, "both")]
    got = torch.autograd.grad(sum(used).sum(), (hidden, weight))
    every = torch.log_softmax((hidden @ weight[:9].t()) / 0.8, -1)  # 2 rows only pad the vocabulary
    plain, entropy = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(1)
    want = torch.autograd.grad((plain * factors[0] + entropy * factors[1]).sum(), (hidden, weight))
    torch.testing.assert_close([*ours, highest], [plain, entropy, every.max(1).values], atol=1e-5, rtol=1e-5)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradients_of_logprob_and_entropy_are_those_of_finite_differences(alone):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2, 4])
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, temperature=0.7, vocab=5, tp_group=alone), (hidden, weight))
