"""The canary matrix: on four ranks, combinations of parallelism give the loss and gradient norm of one rank, and each other's checkpoints.

fp32 over gloo. Tolerance: 2e-5 of the value, what sums in another order make of it after a step of Adam.
"""

import pytest
import worlds
from launch import Job, launch
from tiny_models import make

ROUTES = [4, 2, 8]
WITHIN = [2e-6, 1e-4]
"""Relative, of each of the two steps. Adam divides a gradient by its own size, so that what is near 0 moves by a whole learning rate to where rounding points."""
MOE = {
    "ep4": {"ep": 4}, "tp2-ep4": {"tp": 2, "ep": 4}, "tp2-etp2-ep2": {"tp": 2, "etp": 2, "ep": 2}, "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-pp2-ep2": {"tp": 2, "pp": 2, "ep": 2}, "tp2-cp2": {"tp": 2, "cp": 2}, "pp2-cp2": {"pp": 2, "cp": 2}, "pp2-ep2": {"pp": 2, "ep": 2},
    "cp2-ep2": {"cp": 2, "ep": 2}, "pp4": {"pp": 4},
}
DENSE = {"dp4": {}, "tp2-pp2": {"tp": 2, "pp": 2}, "tp2-cp2": {"tp": 2, "cp": 2}, "pp2-cp2": {"pp": 2, "cp": 2}}
RESHARD = (({"tp": 2}, {"pp": 2}), ({}, {"tp": 2, "ep": 2}), ({"pp": 2, "ep": 2}, {"cp": 2}), ({"ep": 2}, {"tp": 2}))  # a checkpoint of one goes on under the other, and back


def name_of(layout):
    return "-".join(f"{k}{v}" for k, v in layout.items()) or "dp"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("canary")
    return {family: str(make(family, root / family, layers=4)) for family in ("qwen3_moe", "qwen3")}


@pytest.fixture(scope="module")
def four(folders, tmp_path_factory):
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    jobs = {}
    for name, layout in MOE.items():
        options = {"replay": True, "recompute": "full" if "pp" in layout else "none"}
        jobs[f"moe {name}"] = Job(worlds.run_steps, layout, (folders["qwen3_moe"], options, layout, 2, 8, ROUTES))
    for name, layout in DENSE.items():
        jobs[f"dense {name}"] = Job(worlds.run_steps, layout, (folders["qwen3"], {}, layout, 2, 8, None))
    for one, other in RESHARD:
        for a, b in ((one, other), (other, one)):
            pair = f"{name_of(a)} {name_of(b)}"
            folder = str(checkpoints / pair.replace(" ", "_"))
            jobs[f"save {pair}"] = Job(worlds.checkpoint_resume, a, (folders["qwen3_moe"], folder, a, ROUTES))
            jobs[f"load {pair}"] = Job(worlds.resume_from, b, (folders["qwen3_moe"], folder, b, ROUTES))
    return dict(zip(jobs, launch(list(jobs.values()), ranks=4, timeout_s=900), strict=True))


@pytest.fixture(scope="module")
def alone(world, folders):
    return {"moe": worlds.run_steps(folders["qwen3_moe"], {"replay": True}, {}, 2, 8, ROUTES), "dense": worlds.run_steps(folders["qwen3"], {}, {}, 2, 8, None)}


@pytest.mark.parametrize(("kind", "name"), [("moe", n) for n in MOE] + [("dense", n) for n in DENSE])
def test_loss_and_gradient_norm_equal_one_rank(four, alone, kind, name):
    for rank in four[f"{kind} {name}"]:
        for got, want, within in zip(rank, alone[kind], WITHIN, strict=True):
            for key in ("loss", "grad_norm", "logprob_diff_mean", "kl_mean", "ess"):
                assert got[key] == pytest.approx(want[key], rel=within), key
            for key in ("tokens", "sampled_tokens", "exact_tokens", "skipped"):
                assert got[key] == want[key], key


@pytest.mark.parametrize("pair", [f"{name_of(a)} {name_of(b)}" for one, other in RESHARD for a, b in ((one, other), (other, one))])
def test_a_checkpoint_goes_on_under_another_layout_with_the_same_next_steps(four, pair):
    saved, loaded = four[f"save {pair}"][0], four[f"load {pair}"][0]
    assert saved["resumed"] == saved["went_on"]
    for got, want in zip(loaded, saved["went_on"], strict=True):
        for key in ("loss", "grad_norm"):
            assert got[key] == pytest.approx(want[key], rel=2e-5), key
