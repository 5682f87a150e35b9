"""The draft layer (multi-token prediction): what it computes, what it learns from, and that the policy does not notice it. In layouts: test_mtp_layouts.py."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
import worlds
from safetensors.torch import load_file

from miles.core import ConfigError, Layout
from miles.trainer.batching import pack
from miles.trainer.model import transformer_config
from miles.weights.mapping import read_architecture
from miles.weights.mapping.architecture import architecture_of

ROUTES = {"glm4_moe": (1, 2, 8), "deepseek_v3": (1, 2, 8), "glm_moe_dsa": (3, 2, 8)}
FAMILIES = tuple(ROUTES)
LR = 2e-3


@torch.no_grad()
def drafts_of_hugging_face(folder, batch, temperature):
    """(mean cross entropy, share of most likely tokens) of the draft layer of a folder: a model of transformers for the hidden states, and one of a single layer, that
    of the draft, which is fed the joined projection."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = load_file(f"{folder}/model.safetensors")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(folder)
    layers = config.num_hidden_layers
    own = {n.removeprefix(f"model.layers.{layers}."): t for n, t in tensors.items() if n.startswith(f"model.layers.{layers}.")}
    config.num_hidden_layers, config.first_k_dense_replace, config.mlp_layer_types, config.indexer_types = 1, 0, ["sparse"], ["full"]
    one = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    given = {"model.norm.weight": own["shared_head.norm.weight"], **{n: tensors[n] for n in ("lm_head.weight", "model.embed_tokens.weight")}}
    for name in one.state_dict():
        if name in given:
            continue
        inner = name.removeprefix("model.layers.0.")
        if inner in own:
            given[name] = own[inner]
        elif inner == "mlp.experts.gate_up_proj":
            given[name] = torch.stack([torch.cat([own[f"mlp.experts.{e}.{p}.weight"] for p in ("gate_proj", "up_proj")]) for e in range(config.n_routed_experts)])
        else:
            given[name] = torch.stack([own[f"mlp.experts.{e}.down_proj.weight"] for e in range(config.n_routed_experts)])
    one.load_state_dict(given)

    def norm(x, weight):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, config.rms_norm_eps)

    nats, agreed = [], []
    for s in batch:
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        hidden = whole.model(tokens[None, :-2]).last_hidden_state[0]
        joined = torch.cat([norm(tensors["model.embed_tokens.weight"][tokens[1:-1]], own["enorm.weight"]), norm(hidden, own["hnorm.weight"])], -1)
        logits = one(inputs_embeds=(joined @ own["eh_proj.weight"].t())[None]).logits[0]
        mask = torch.from_numpy(s.loss_mask[2:]).bool()
        nats += torch.log_softmax(logits / temperature, -1).gather(1, tokens[2:, None])[:, 0][mask].tolist()
        agreed += (logits.argmax(-1) == tokens[2:])[mask].tolist()
    return -np.mean(nats), np.mean(agreed)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_loss_is_that_of_transformers_modules_put_together_as_published(world, drafting, family):
    batch = worlds.sequences(6, 3)
    for s in batch[:3]:
        s.tokens[2:] = 7  # so that the most likely token is the given one here and there
    metrics = worlds.build(drafting[family], {}, mtp=LR, temperature=0.8).run(batch, number=0)
    nats, agreed = drafts_of_hugging_face(drafting[family], batch, 0.8)
    assert metrics.mtp_loss == pytest.approx(nats, abs=1e-5)
    assert metrics.mtp_agreement == pytest.approx(agreed)


def test_targets_are_the_sampled_tokens_two_ahead_within_a_sequence():
    a, b = worlds.sequences(2, 1)
    tokens, mask = np.array([4, 5, 6, 7], np.int32), np.array([0, 0, 1, 1], np.uint8)
    a = replace(a, tokens=tokens, loss_mask=mask, logprobs=np.zeros(4, np.float32), versions=np.zeros(4, np.int32))
    b = replace(b, tokens=tokens + 10, loss_mask=np.array([0, 1, 0, 1], np.uint8), logprobs=np.zeros(4, np.float32), versions=np.zeros(4, np.int32))
    packed = pack([a, b], [1.0, 1.0], total_align=8)
    # rows of a: 4 5 6; the row of 5 predicts 7, that of 6 would predict what comes after the end. Rows of b: 14 15 16. Two of padding
    assert [bool(x) for x in packed.draft_mask] == [True, True, False, False, True, False, False, False]
    assert packed.draft_targets[packed.draft_mask].tolist() == [6, 7, 17]


def weights_of(step):
    return {name: p.detach().clone() for name, p in step.model.chunks[0].module.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_is_trained_bit_for_bit_as_without_it_and_of_the_draft_layer_all_but_the_index_moves(world, drafting, family):
    # the norms of both gradients are above the limit, so both are clipped, each by its own
    batches = [worlds.sequences(6, i, routes=ROUTES[family]) for i in range(3)]
    optimizer = {"clip_grad": 0.05}
    plain = worlds.build(drafting[family], {}, replay=True, optimizer=optimizer)
    step = worlds.build(drafting[family], {}, replay=True, optimizer=optimizer, mtp=LR)
    before = weights_of(step)
    for number, batch in enumerate(batches):
        want, got = plain.run(batch, number=number), step.run(batch, number=number)
        assert {k: v for k, v in vars(got).items() if not k.startswith(("mtp_", "critic_", "reference_"))} == {
            k: v for k, v in vars(want).items() if not k.startswith(("mtp_", "critic_", "reference_"))}
        assert got.grad_norm > 0.05 and got.mtp_grad_norm > 0.05 and math.isnan(want.mtp_loss)
    after, alone = weights_of(step), weights_of(plain)
    assert [n for n in alone if not torch.equal(after[n], alone[n])] == []
    drafts = {n for n in after if n.startswith("mtp.")}
    assert set(after) - set(alone) == drafts
    assert {n for n in drafts if torch.equal(after[n], before[n])} == {n for n in drafts if ".indexer." in n}


def test_its_loss_alone_gives_no_other_parameter_a_gradient(world, drafting):
    step = worlds.build(drafting["glm4_moe"], {}, mtp=LR)
    step._loss = lambda tokens, output: (output[0].sum() * 0, {"add": torch.zeros(0), "max": torch.zeros(0)})
    batch = worlds.sequences(4, 2)
    plan = step.plan([len(s.tokens) for s in batch])
    mine = [batch[i] for i in plan.of_rank(0)]
    from miles.trainer.mtp import MtpLoss

    step._pass(plan, mine, [0.1] * 4, [{}] * plan.microbatches, step._loss, mtp=MtpLoss(131, 1.0, 50))
    moved = {n for n, p in step.model.chunks[0].module.named_parameters() if p.main_grad.any()}
    assert moved == {n for n, _ in step.model.chunks[0].module.named_parameters() if n.startswith("mtp.")}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_few_steps_lower_its_loss_and_raise_its_agreement_on_a_fixed_batch(world, drafting, recompute):
    step = worlds.build(drafting["deepseek_v3"], {}, replay=True, mtp=1e-2, recompute=recompute, optimizer={"lr": 1e-9})
    batch = worlds.sequences(6, 4, routes=ROUTES["deepseek_v3"])
    found = [step.run(batch, number=i) for i in range(12)]
    assert found[-1].mtp_loss < found[0].mtp_loss - 2
    assert found[-1].mtp_agreement > found[0].mtp_agreement + 0.2


def test_bf16_stays_near_fp32(world, drafting):
    batch = worlds.sequences(6, 4, routes=ROUTES["glm4_moe"])
    fp32, bf16 = (worlds.build(drafting["glm4_moe"], {}, replay=True, mtp=LR, precision=p).run(batch, number=0) for p in ("fp32", "bf16"))
    assert 0 < abs(fp32.mtp_loss - bf16.mtp_loss) < 0.05


def test_recomputation_changes_neither_loss(world, drafting):
    batch = worlds.sequences(4, 8, routes=ROUTES["glm_moe_dsa"])
    one, other = (worlds.build(drafting["glm_moe_dsa"], {}, replay=True, recompute=r, mtp=LR).run(batch, number=0) for r in ("none", "full"))
    assert (one.loss, one.mtp_loss) == (other.loss, other.mtp_loss)
    assert (one.grad_norm, one.mtp_grad_norm) == (pytest.approx(other.grad_norm, rel=1e-6), pytest.approx(other.mtp_grad_norm, rel=1e-6))


def test_it_learns_at_its_own_rate_with_the_same_warm_up(world, drafting):
    # one step of Adam moves every element that has a gradient by the rate
    optimizer = {"lr": 1e-3, "warmup_steps": 4, "weight_decay": 0.0, "clip_grad": 0.0}
    step = worlds.build(drafting["glm4_moe"], {}, mtp=8e-3, optimizer=optimizer)
    before = weights_of(step)
    metrics = step.run(worlds.sequences(4, 5), number=0)
    moved = {n: float((p - before[n]).abs().max()) for n, p in weights_of(step).items()}
    assert moved["decoder.final_layernorm.weight"] == pytest.approx(2.5e-4, rel=1e-2)
    assert moved["mtp.layers.0.final_layernorm.weight"] == pytest.approx(2e-3, rel=1e-2)
    assert math.isnan(metrics.mtp_grad_norm)  # which is made only for a limit


def test_a_batch_without_a_token_two_ahead_trains_the_policy_alone(world, drafting):
    batch = [replace(s, tokens=s.tokens[:2], loss_mask=np.array([0, 1], np.uint8), logprobs=np.array([0, -4], np.float32), versions=np.array([-1, 0], np.int32))
             for s in worlds.sequences(3, 6)]
    metrics = worlds.build(drafting["glm4_moe"], {}, mtp=LR).run(batch, number=0)
    assert (metrics.mtp_loss, metrics.mtp_agreement, metrics.skipped) == (0.0, 0.0, False) and metrics.grad_norm > 0


def test_it_learns_where_the_policy_has_nothing_to_learn(world, drafting):
    step = worlds.build(drafting["glm4_moe"], {}, mtp=LR)
    before = weights_of(step)
    metrics = step.run([replace(s, advantage=0.0) for s in worlds.sequences(3, 7)], number=0)
    assert metrics.grad_norm == 0 and metrics.mtp_grad_norm > 0 and metrics.mtp_loss > 0
    assert {n for n, p in weights_of(step).items() if not torch.equal(p, before[n])} == {n for n in before if n.startswith("mtp.")}


def test_a_step_whose_draft_is_not_finite_changes_nothing(world, drafting):
    step = worlds.build(drafting["glm4_moe"], {}, mtp=LR)
    with torch.no_grad():
        step.model.chunks[0].module.mtp.layers[0].enorm.weight[0] = torch.nan
    before = weights_of(step)
    metrics = step.run(worlds.sequences(3, 7), number=0)
    assert metrics.skipped and math.isnan(metrics.mtp_loss) and math.isfinite(metrics.loss)
    assert [n for n, p in weights_of(step).items() if not torch.equal(p.nan_to_num(9), before[n].nan_to_num(9))] == []


def test_beside_a_reference_and_a_critic_which_have_no_use_for_it(world, drafting):
    algorithm = {"advantage": "gae", "critic": {"lr": 1e-3}, "kl": "k1", "kl_coefficient": 0.01}
    batch = worlds.sequences(4, 9, routes=ROUTES["glm4_moe"])
    with_it, without = (worlds.build(drafting["glm4_moe"], {}, replay=True, algorithm=algorithm, mtp=m).run(batch, number=0) for m in (LR, None))
    assert (with_it.loss, with_it.grad_norm, with_it.critic_grad_norm) == (without.loss, without.grad_norm, without.critic_grad_norm)
    assert with_it.mtp_loss > 0


def test_what_has_no_draft_layer_is_refused(world, models, drafting):
    with pytest.raises(ConfigError, match=r"'qwen3_moe' with num_nextn_predict_layers = 0 has no draft layer[\s\S]*remove \[trainer.mtp\]"):
        read_architecture(models["qwen3_moe"], draft=True)
    assert read_architecture(drafting["glm4_moe"]).draft_layers == 0
    config = json.loads(Path(drafting["glm4_moe"], "config.json").read_text())
    for key, value, message in (("num_nextn_predict_layers", 3, "'glm4_moe' with num_nextn_predict_layers = 3"), ("tie_word_embeddings", True, "tie_word_embeddings = true is not")):
        with pytest.raises(ConfigError, match=message):
            architecture_of({**config, key: value}, draft=True)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.2\.enorm\.weight"):  # transformers writes the key into every config.json of this family
        worlds.roundtrip(models["glm4_moe"], {}, 20_000, None, True)


def test_recomputation_with_an_index_that_the_second_layer_takes_from_the_first_is_refused(drafting):
    arch = read_architecture(drafting["glm_moe_dsa"], draft=True)
    shared = replace(arch, sparse=replace(arch.sparse, offset=1))
    with pytest.raises(ConfigError, match="second layer that uses the sparse index of the first"):
        transformer_config(shared, Layout(world=1), "fp32", "full", True)
    for fine, recompute in ((arch, "full"), (shared, "none")):
        assert transformer_config(fine, Layout(world=1), "fp32", recompute, True).mtp_num_layers == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_comes_back_bit_for_bit_but_for_what_the_draft_layer_shares(world, drafting, family):
    layers = read_architecture(drafting[family]).layers
    result = worlds.roundtrip(drafting[family], {}, 20_000, None, True)
    assert result.pop("names") == {"glm4_moe": 57 + 44, "deepseek_v3": 53 + 42, "glm_moe_dsa": 144 + 47}[family]
    assert result == {"repeated": 0, "missing": sorted(f"model.layers.{layers}.{n}" for n in tiny_models.SHARED_HEAD), "unknown": [], "different": []}
