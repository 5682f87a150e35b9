"""Parallel layouts and checkpoints on two ranks: the same step, the same weights, whatever the layout."""

import pytest
import worlds
from launch import Job, launch

ROUTES = [2, 2, 8]
MOE_LAYOUTS = {"ep2": {"ep": 2}, "tp2": {"tp": 2}, "tp2-etp2": {"tp": 2, "etp": 2}, "tp2-ep2": {"tp": 2, "ep": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
SEQUENCES = {"name": "gspo", "proximal": "rollout", "reduction": "sequence", "clip_low": 0.99, "clip_high": 1e6}  # ratios of whole sequences, none clipped
PRODUCTS = {"importance_level": "sequence", "importance_high": 1e6, "reduction": "constant"}
REFERENCE = {"kl": "unbiased", "kl_coefficient": 0.5, "entropy_coefficient": 0.1}
CRITIC = {"advantage": "gae", "critic": {"lr": 1e-3}, "kl": "k1", "kl_coefficient": 0.01}
LATENT_ROUTES = [1, 2, 8]  # the first layer is dense
LATENT_LAYOUTS = {"tp2": {"tp": 2}, "tp2-ep2": {"tp": 2, "ep": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
SPARSE_ROUTES = [3, 2, 8]
SPARSE_LAYOUTS = {**LATENT_LAYOUTS, "ep2": {"ep": 2}}
INDEXED = {"first_stage_layers": 3}  # of four layers the third uses the index of the second: the second stage starts on the fourth
STATES = ("resident", "streamed")
ROUNDTRIPS = [("qwen3", "tp2"), ("qwen3", "pp2"), ("glm", "tp2"), ("glm", "pp2"), ("glm", "ep2"), ("latent", "ep2")]  # of weights alone
DENSE_LAYOUTS = {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def state_folder(checkpoints, state):
    """Where optimizer state is streamed to; empty: it is resident."""
    (checkpoints / "state").mkdir(exist_ok=True)
    return str(checkpoints / "state") if state == "streamed" else ""


@pytest.fixture(scope="module")
def by_one_rank(world, models, checkpoints):
    """Steps before and after a checkpoint that one rank writes."""
    return {state: worlds.checkpoint_resume(models["qwen3_moe"], str(checkpoints / f"dp1 {state}"), {}, ROUTES, state_dir=state_folder(checkpoints, state))
            for state in STATES}


@pytest.fixture(scope="module")
def results(models, checkpoints, by_one_rank):
    """Everything that needs two ranks, in one pair of processes."""
    moe, dense, glm = models["qwen3_moe"], models["llama"], models["glm4_moe"]
    jobs = {}
    for state in STATES:
        folder = state_folder(checkpoints, state)
        jobs[f"dp1 to dp2 {state}"] = Job(worlds.resume_from, {}, (moe, str(checkpoints / f"dp1 {state}"), {}, ROUTES, folder))
        jobs[f"dp2 {state}"] = Job(worlds.checkpoint_resume, {}, (moe, str(checkpoints / f"dp2 {state}"), {}, ROUTES, 2, "fp32", folder))
    for name, layout in MOE_LAYOUTS.items():
        options = {"replay": True, "recompute": "full" if name == "pp2" else "none"}
        jobs[f"moe {name}"] = Job(worlds.run_steps, layout, (moe, options, layout, 2, 6, ROUTES))
        jobs[f"roundtrip moe {name}"] = Job(worlds.roundtrip, layout, (moe, layout, 20_000))
    for name, layout in DENSE_LAYOUTS.items():
        jobs[f"dense {name}"] = Job(worlds.run_steps, layout, (dense, {}, layout, 2, 6, None))
        jobs[f"roundtrip dense {name}"] = Job(worlds.roundtrip, layout, (dense, layout, 20_000))
    for name, layout in LATENT_LAYOUTS.items():
        jobs[f"latent {name}"] = Job(worlds.run_steps, layout, (models["deepseek_v3"], {"replay": True}, layout, 2, 6, LATENT_ROUTES))
        jobs[f"roundtrip latent {name}"] = Job(worlds.roundtrip, layout, (models["deepseek_v3"], layout, 20_000))
    for name, layout in SPARSE_LAYOUTS.items():
        stages = INDEXED if name == "pp2" else None
        options = {"replay": True, "recompute": "full" if name == "pp2" else "none", "stages": stages}
        jobs[f"sparse {name}"] = Job(worlds.run_steps, layout, (models["glm_moe_dsa"], options, layout, 2, 6, SPARSE_ROUTES))
        jobs[f"roundtrip sparse {name}"] = Job(worlds.roundtrip, layout, (models["glm_moe_dsa"], layout, 20_000, stages))
    for name, algorithm in (("gspo", SEQUENCES), ("products", PRODUCTS)):
        jobs[f"{name} cp2"] = Job(worlds.run_steps, {"cp": 2}, (moe, {"replay": True, "algorithm": algorithm}, {"cp": 2}, 2, 6, ROUTES))
    for name in ("tp2", "pp2", "cp2", "ep2"):
        jobs[f"critic {name}"] = Job(worlds.run_steps, MOE_LAYOUTS[name], (moe, {"replay": True, "algorithm": CRITIC}, MOE_LAYOUTS[name], 2, 6, ROUTES))
        jobs[f"reference {name}"] = Job(worlds.run_steps, MOE_LAYOUTS[name], (moe, {"replay": True, "algorithm": REFERENCE, "recompute": "full" if name == "pp2" else "none"},
                                                                               MOE_LAYOUTS[name], 2, 6, ROUTES))
    for reduction in ("token", "sequence"):
        jobs[f"leaves {reduction}"] = Job(worlds.split_rollout, {}, (dense, {}, reduction))
    jobs["idle"] = Job(worlds.run_steps, {"ep": 2}, (moe, {"replay": True}, {"ep": 2}, 2, 1, ROUTES))
    jobs["idle critic"] = Job(worlds.run_steps, {"ep": 2}, (moe, {"replay": True, "algorithm": CRITIC}, {"ep": 2}, 2, 1, ROUTES))
    for kind, name in ROUNDTRIPS:
        model, layout = {"glm": glm, "qwen3": models["qwen3"], "latent": models["deepseek_v3"]}[kind], {name[:2]: 2}
        jobs[f"roundtrip {kind} {name}"] = Job(worlds.roundtrip, layout, (model, layout, 20_000))
    jobs["resume"] = Job(worlds.checkpoint_resume, {"ep": 2}, (moe, str(checkpoints / "ep2"), {"ep": 2}, ROUTES))
    jobs["reshard"] = Job(worlds.resume_from, {"tp": 2}, (moe, str(checkpoints / "ep2"), {"tp": 2}, ROUTES))
    jobs["resume tp2"] = Job(worlds.checkpoint_resume, {"tp": 2}, (moe, str(checkpoints / "tp2"), {"tp": 2}, ROUTES))
    jobs["reshard tp2"] = Job(worlds.resume_from, {"ep": 2}, (moe, str(checkpoints / "tp2"), {"ep": 2}, ROUTES))
    jobs["tied critic pp2"] = Job(worlds.run_steps, {"pp": 2}, (dense, {"algorithm": CRITIC}, {"pp": 2}, 2, 6, None))
    jobs["resume critic"] = Job(worlds.checkpoint_resume, {"ep": 2}, (moe, str(checkpoints / "critic"), {"ep": 2}, ROUTES, 2, "fp32", "", CRITIC))
    jobs["reshard critic"] = Job(worlds.resume_from, {"tp": 2}, (moe, str(checkpoints / "critic"), {"tp": 2}, ROUTES, "", CRITIC))
    jobs["resume latent"] = Job(worlds.checkpoint_resume, {"ep": 2}, (models["deepseek_v3"], str(checkpoints / "latent"), {"ep": 2}, LATENT_ROUTES))
    jobs["reshard latent"] = Job(worlds.resume_from, {"tp": 2}, (models["deepseek_v3"], str(checkpoints / "latent"), {"tp": 2}, LATENT_ROUTES))
    sparse = models["glm_moe_dsa"]
    jobs["resume sparse"] = Job(worlds.checkpoint_resume, {"ep": 2}, (sparse, str(checkpoints / "sparse"), {"ep": 2}, SPARSE_ROUTES))
    jobs["reshard sparse"] = Job(worlds.resume_from, {"tp": 2}, (sparse, str(checkpoints / "sparse"), {"tp": 2}, SPARSE_ROUTES))
    return dict(zip(jobs, launch(list(jobs.values()), ranks=2, timeout_s=900), strict=True))


@pytest.fixture(scope="module")
def alone(world, models):
    return {"moe": worlds.run_steps(models["qwen3_moe"], {"replay": True}, {}, 2, 6, ROUTES),
            "dense": worlds.run_steps(models["llama"], {}, {}, 2, 6, None),
            "latent": worlds.run_steps(models["deepseek_v3"], {"replay": True}, {}, 2, 6, LATENT_ROUTES),
            "sparse": worlds.run_steps(models["glm_moe_dsa"], {"replay": True}, {}, 2, 6, SPARSE_ROUTES),
            "gspo": worlds.run_steps(models["qwen3_moe"], {"replay": True, "algorithm": SEQUENCES}, {}, 2, 6, ROUTES),
            "critic": worlds.run_steps(models["qwen3_moe"], {"replay": True, "algorithm": CRITIC}, {}, 2, 6, ROUTES),
            "tied critic": worlds.run_steps(models["llama"], {"algorithm": CRITIC}, {}, 2, 6, None),
            "reference": worlds.run_steps(models["qwen3_moe"], {"replay": True, "algorithm": REFERENCE}, {}, 2, 6, ROUTES),
            "products": worlds.run_steps(models["qwen3_moe"], {"replay": True, "algorithm": PRODUCTS}, {}, 2, 6, ROUTES)}


@pytest.mark.parametrize(("job", "options"), [("idle", {}), ("idle critic", {"algorithm": CRITIC})], ids=["policy", "critic"])
def test_a_rank_without_sequences_takes_part(results, world, models, job, options):
    want = worlds.run_steps(models["qwen3_moe"], {"replay": True, **options}, {}, 2, 1, ROUTES)
    for name, rank in (("loss", 1), ("grad_norm", 0), *((("critic_loss", 1), ("critic_grad_norm", 0)) if options else ())):
        assert [m[name] for m in results[job][rank]] == pytest.approx([m[name] for m in want], rel=2e-5)


CASES = [("moe", name) for name in MOE_LAYOUTS] + [("dense", name) for name in DENSE_LAYOUTS] + [("latent", name) for name in LATENT_LAYOUTS]
CASES += [("sparse", name) for name in SPARSE_LAYOUTS]
CUT = [("gspo", "cp2"), ("products", "cp2")]  # sequences whose tokens lie on two ranks
HELD = [("reference", name) for name in ("tp2", "pp2", "cp2", "ep2")]  # to a reference policy
JUDGED = [*(("critic", name) for name in ("tp2", "pp2", "cp2", "ep2")), ("tied critic", "pp2")]


@pytest.mark.parametrize(("kind", "name"), CASES + CUT + HELD + JUDGED)
def test_loss_gradient_norm_and_figures_equal_one_rank(results, alone, kind, name):
    # the second step also sees the parameters that the first one left
    for rank in results[f"{kind} {name}"]:
        assert_equal_steps(rank, alone[kind])


def assert_equal_steps(steps, wanted):
    for got, want in zip(steps, wanted, strict=True):
        for key in ("loss", "grad_norm", "logprob_diff_mean", "kl_mean", "ess", "entropy_mean"):
            assert got[key] == pytest.approx(want[key], rel=2e-5, abs=1e-6), key  # abs: with normalised advantages the loss is a sum around 0
        assert got["reference_kl_mean"] == pytest.approx(want["reference_kl_mean"], rel=2e-4, abs=1e-9, nan_ok=True)
        for key in ("routing_differs", "routing_experts_differ"):
            assert got[key] == pytest.approx(want[key], rel=1e-9, nan_ok=True), key
        for key in ("critic_loss", "critic_grad_norm", "critic_explained_variance"):
            assert got[key] == pytest.approx(want[key], rel=2e-4, abs=1e-6, nan_ok=True), key
        for key in ("tokens", "sampled_tokens", "exact_tokens", "skipped"):
            assert got[key] == want[key], key


def test_tensor_and_context_parallelism_of_sparse_attention_together(alone, models):
    layout = {"tp": 2, "cp": 2, "ep": 2}
    [ranks] = launch([Job(worlds.run_steps, layout, (models["glm_moe_dsa"], {"replay": True}, layout, 2, 6, SPARSE_ROUTES))], ranks=4)
    for rank in ranks:
        assert_equal_steps(rank, alone["sparse"])


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_leaves_of_one_rollout_on_different_ranks_train_what_one_sequence_trains(results, world, models, reduction):
    want = worlds.split_rollout(models["llama"], {}, reduction)["whole"]
    for rank in results[f"leaves {reduction}"]:
        assert sorted(rank["leaves"]) == [0, 1]
        for got in (rank["whole"], rank["split"]):
            for key in ("loss", "grad_norm", "kl_mean", "ess", "advantage_abs_mean"):
                assert got[key] == pytest.approx(want[key], rel=2e-5), key
            assert got["sampled_tokens"] == want["sampled_tokens"]


@pytest.mark.parametrize(("kind", "name"), [*CASES, *ROUNDTRIPS])
def test_weights_come_back_bit_for_bit_on_the_leader_alone(results, kind, name):
    leader, other = results[f"roundtrip {kind} {name}"]
    assert leader == {"names": leader["names"], "repeated": 0, "missing": [], "unknown": [], "different": []}
    assert leader["names"] == {"moe": 69, "dense": 20, "qwen3": 25, "glm": 57, "latent": 53, "sparse": 144}[kind]
    assert other == {"names": 0}


@pytest.mark.parametrize(("model", "tensors"), [("", 69), (" tp2", 69), (" latent", 53), (" sparse", 144), (" critic", 69)])
def test_a_resumed_run_goes_on_bit_for_bit(results, model, tensors):
    resumed = results[f"resume{model}"]
    for rank in resumed:
        assert rank["resumed"] == rank["went_on"]
        assert rank["random"][0] == rank["random"][1]
    assert resumed[0]["tensors"] == tensors
    assert resumed[0]["different"] == []


@pytest.mark.parametrize("model", ["", " tp2", " latent", " sparse", " critic"])
def test_a_checkpoint_goes_on_under_another_layout(results, model):
    """Of two expert-parallel ranks on two tensor-parallel ones; "tp2": the other way round."""
    for got, want in zip(results[f"reshard{model}"][0], results[f"resume{model}"][0]["went_on"], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=2e-5)
        assert got["critic_grad_norm"] == pytest.approx(want["critic_grad_norm"], rel=2e-4, nan_ok=True)


@pytest.mark.parametrize("state", STATES)
def test_a_checkpoint_of_one_data_parallel_rank_goes_on_on_two_and_back(results, by_one_rank, world, models, checkpoints, state):
    alone = worlds.resume_from(models["qwen3_moe"], str(checkpoints / f"dp2 {state}"), {}, ROUTES, state_folder(checkpoints, state))
    for resumed, saved in ((results[f"dp1 to dp2 {state}"][0], by_one_rank[state]), (alone, results[f"dp2 {state}"][0])):
        for got, want in zip(resumed, saved["went_on"], strict=True):
            for key in ("loss", "grad_norm"):
                assert got[key] == pytest.approx(want[key], rel=2e-5), key
