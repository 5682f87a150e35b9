"""How far the trainer's own routing is from the experts that were recorded, with replay and without."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import worlds

from miles.trainer.replay import differences

ROUTES = (2, 2, 8)


def test_sets_are_compared_whatever_their_order_and_padding_counts_nothing():
    given = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 1, 7], [6, 5, 4], [0, 1, 2]])
    chosen = torch.tensor([[2, 0, 1], [3, 4, 6], [2, 3, 4], [4, 5, 6], [5, 6, 7]])
    rows = torch.tensor([True, True, True, True, False])
    # the second row lacks one expert of three, the third all three
    assert differences(chosen, given, rows).tolist() == [4, 2, 4]


def own_routes(step, batch):
    """`batch` with the experts that the routers of `step` choose themselves; the parameters stay."""
    chosen = [[] for _ in range(ROUTES[0])]
    layers = step.model.chunks[0].module.decoder.layers
    hooks = [layer.mlp.router.register_forward_hook(lambda m, i, out, seen=seen: seen.append(out[1])) for layer, seen in zip(layers, chosen, strict=True)]
    before = [p.detach().clone() for p in step.model.chunks[0].parameters()]
    order = step.plan([len(s.tokens) for s in batch]).of_rank(0)
    step.run(batch, number=0)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        for p, was in zip(step.model.chunks[0].parameters(), before, strict=True):
            p.copy_(was)
    whole = torch.stack([torch.cat(seen).nonzero()[:, 1].view(-1, ROUTES[1]) for seen in chosen], 1).numpy().astype(np.uint8)
    parts = dict(zip(order, np.split(whole, np.cumsum([batch[i].fed for i in order])[:-1]), strict=True))
    return [replace(s, routes=parts[i]) for i, s in enumerate(batch)]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("replay", [True, False])
def test_the_trainers_own_routes_differ_nowhere_and_others_as_often_as_they_are_others(world, models, replay, recompute):
    batch = own_routes(worlds.build(models["qwen3_moe"], {}), worlds.sequences(4, 70))
    step = worlds.build(models["qwen3_moe"], {}, replay=replay, recompute=recompute)
    same = step.run(batch, number=0)
    assert (same.routing_differs, same.routing_experts_differ) == (0.0, 0.0)
    # at three tokens the last layer has one other expert, at a fourth two others: what comes before is as it was
    for at in (0, 1, 2):
        taken = batch[1].routes[at, 1].tolist()
        batch[1].routes[at, 1, 0] = next(e for e in range(8) if e not in taken)
    taken = batch[2].routes[4, 1].tolist()
    batch[2].routes[4, 1] = [e for e in range(8) if e not in taken][:2]
    other = worlds.build(models["qwen3_moe"], {}, replay=replay, recompute=recompute).run(batch, number=0)
    pairs = 2 * sum(s.fed for s in batch)
    assert (other.routing_differs, other.routing_experts_differ) == (4 / pairs, 5 / (2 * pairs))
    # one set for all tokens: at most of them the router chooses another
    far = worlds.build(models["qwen3_moe"], {}, replay=replay).run([replace(s, routes=np.broadcast_to(np.uint8([3, 7]), s.routes.shape)) for s in batch], number=0)
    assert far.routing_differs > 0.5


def test_routes_that_are_compared_and_not_replayed_change_nothing(world, models):
    batch = worlds.sequences(4, 71, routes=ROUTES)
    with_routes = worlds.build(models["qwen3_moe"], {}, recompute="full").run(batch, number=0)
    without = worlds.build(models["qwen3_moe"], {}, recompute="full").run([replace(s, routes=None) for s in batch], number=0)
    assert (with_routes.loss, with_routes.grad_norm) == (without.loss, without.grad_norm)
    assert with_routes.routing_differs > 0.5 and math.isnan(without.routing_differs) and math.isnan(without.routing_experts_differ)


def test_the_pass_of_a_reference_policy_is_not_counted(world, models):
    batch = worlds.sequences(4, 72, routes=ROUTES)
    alone, held = (worlds.build(models["qwen3_moe"], {}, replay=True, algorithm=a).run(batch, number=0) for a in ({}, {"kl_coefficient": 0.1}))
    assert alone.routing_differs == held.routing_differs
    held = worlds.build(models["qwen3_moe"], {}, replay=True, algorithm={"kl_coefficient": 0.1})
    held.run(batch, number=0)
    assert held.forward.replay.counts[0] == 2 * sum(s.fed for s in batch)


def test_a_dense_model_has_no_routes_to_compare(world, models):
    assert math.isnan(worlds.build(models["llama"], {}).run(worlds.sequences(2, 73), number=0).routing_differs)
