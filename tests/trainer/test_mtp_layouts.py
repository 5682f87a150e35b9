"""The draft layer in parallel layouts: the same losses and gradients as on one rank, the same folder again, and checkpoints that go on under another layout."""

import pytest
import worlds
from launch import Job, launch

ROUTES = {"glm4_moe": [1, 2, 8], "deepseek_v3": [1, 2, 8], "glm_moe_dsa": [3, 2, 8]}
LAYOUTS = {"tp2": {"tp": 2}, "tp2-ep2": {"tp": 2, "ep": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}, "ep2": {"ep": 2}}
STAGES = {("glm_moe_dsa", "pp2"): {"first_stage_layers": 3}}
SHARED = ["embed_tokens.weight", "shared_head.head.weight"]
LR = 2e-3


@pytest.fixture(scope="module")
def two(drafting, tmp_path_factory):
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    jobs = {}
    for family, routes in ROUTES.items():
        for name, layout in LAYOUTS.items():
            stages = STAGES.get((family, name))
            options = {"replay": True, "mtp": LR, "stages": stages, "recompute": "full" if name == "pp2" else "none"}
            jobs[f"{family} {name}"] = Job(worlds.run_steps, layout, (drafting[family], options, layout, 2, 6, routes))
            jobs[f"roundtrip {family} {name}"] = Job(worlds.roundtrip, layout, (drafting[family], layout, 20_000, stages, True))
    for name in ("dp2", "pp2"):
        layout, unclipped = LAYOUTS.get(name, {}), {"optimizer": {"clip_grad": 0.0}}
        jobs[f"weights {name}"] = Job(worlds.weights_after, layout, (drafting["glm4_moe"], {**unclipped, "mtp": LR}, layout, 2))
        jobs[f"plain {name}"] = Job(worlds.weights_after, layout, (drafting["glm4_moe"], unclipped, layout, 2))
    for kind, state in (("resident", ""), ("streamed", str(tmp_path_factory.mktemp("state")))):
        checkpoint = str(checkpoints / kind)
        folder, routes = drafting["deepseek_v3"], ROUTES["deepseek_v3"]
        jobs[f"save {kind}"] = Job(worlds.checkpoint_resume, {"ep": 2}, (folder, checkpoint, {"ep": 2}, routes, 2, "fp32", state, None, None, LR))
        for name in ("tp2", "pp2"):
            jobs[f"load {kind} {name}"] = Job(worlds.resume_from, LAYOUTS[name], (folder, checkpoint, LAYOUTS[name], routes, state, None, None, LR))
    return dict(zip(jobs, launch(list(jobs.values()), ranks=2, timeout_s=900), strict=True))


@pytest.fixture(scope="module")
def alone(world, drafting):
    return {family: worlds.run_steps(drafting[family], {"replay": True, "mtp": LR}, {}, 2, 6, routes) for family, routes in ROUTES.items()}


def assert_equal_steps(steps, wanted):
    for got, want in zip(steps, wanted, strict=True):
        for key in ("loss", "grad_norm", "mtp_loss", "mtp_grad_norm"):
            assert got[key] == pytest.approx(want[key], rel=2e-5, abs=1e-6), key
        assert got["mtp_agreement"] == pytest.approx(want["mtp_agreement"])
        assert got["skipped"] == want["skipped"]


CASES = [(family, name) for family in ROUTES for name in LAYOUTS]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_losses_and_gradient_norms_equal_one_rank(two, alone, family, name):
    # the second step also sees the draft layer, and the last stage's copy of the embedding, that the first one left
    for rank in two[f"{family} {name}"]:
        assert_equal_steps(rank, alone[family])


def test_four_dimensions_at_once(drafting, alone):
    layout = {"tp": 2, "cp": 2, "ep": 2}
    [ranks] = launch([Job(worlds.run_steps, layout, (drafting["glm_moe_dsa"], {"replay": True, "mtp": LR}, layout, 2, 6, ROUTES["glm_moe_dsa"]))], ranks=4)
    for rank in ranks:
        assert_equal_steps(rank, alone["glm_moe_dsa"])


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_folder_comes_back_bit_for_bit_on_the_leader_alone(two, family, name):
    leader, other = two[f"roundtrip {family} {name}"]
    layers = {"glm4_moe": 2, "deepseek_v3": 2, "glm_moe_dsa": 4}[family]
    assert leader == {"names": {"glm4_moe": 101, "deepseek_v3": 95, "glm_moe_dsa": 191}[family], "repeated": 0,
                      "missing": [f"model.layers.{layers}.{n}" for n in SHARED], "unknown": [], "different": []}
    assert other == {"names": 0}


@pytest.mark.parametrize("name", ["dp2", "pp2"])
def test_what_is_published_of_the_policy_is_bit_for_bit_what_it_is_without_a_draft_layer(two, name):
    # without a limit of the gradient: its norm is summed in another order where data-parallel ranks share it in other pieces
    drafted, plain = two[f"weights {name}"][0], two[f"plain {name}"][0]
    assert {n: digest for n, digest in drafted.items() if not n.startswith("model.layers.2.")} == plain
    assert len(drafted) - len(plain) == 44


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_a_resumed_run_goes_on_bit_for_bit_and_another_layout_with_the_same_steps(two, kind):
    for rank in two[f"save {kind}"]:
        assert rank["resumed"] == rank["went_on"] and rank["different"] == [] and rank["random"][0] == rank["random"][1]
    for name in ("tp2", "pp2"):
        assert_equal_steps(two[f"load {kind} {name}"][0], two[f"save {kind}"][0]["went_on"])
