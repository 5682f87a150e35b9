"""Training with streamed optimizer state is training with resident state, bit for bit."""

import pytest
import worlds
from launch import Job, launch


@pytest.mark.parametrize(("family", "precision"), [("qwen3_moe", "fp32"), ("qwen3_moe", "bf16"), ("glm_moe_dsa", "bf16")])
def test_parameters_after_three_steps_are_those_of_resident_state(world, models, tmp_path, family, precision):
    after = {d: worlds.weights_after(models[family], {"precision": precision, "state_dir": d}, {}, 3) for d in ("", str(tmp_path))}
    assert after[str(tmp_path)] == after[""]


def test_on_two_data_parallel_ranks_too(models, tmp_path):
    jobs = [Job(worlds.weights_after, {}, (models["qwen3_moe"], {"precision": p, "state_dir": d}, {}, 3)) for p in ("fp32", "bf16") for d in ("", str(tmp_path))]
    *results, = launch(jobs, ranks=2)
    resident, streamed = results[0::2], results[1::2]
    assert streamed == resident and len(resident[0]) == 2


@pytest.mark.parametrize(("family", "precision", "before"), [("qwen3_moe", "fp32", 0), ("qwen3_moe", "fp32", 2), ("qwen3_moe", "bf16", 2), ("glm_moe_dsa", "bf16", 2)])
def test_a_resumed_run_goes_on_bit_for_bit(world, models, tmp_path, family, precision, before):
    (tmp_path / "state").mkdir()
    routes = [3 if family == "glm_moe_dsa" else 2, 2, 8]
    result = worlds.checkpoint_resume(models[family], str(tmp_path / "c"), {}, routes, before, precision, str(tmp_path / "state"))
    assert result["resumed"] == result["went_on"] and result["different"] == []


@pytest.mark.parametrize(("one", "other"), [({"ep": 2}, {"tp": 2}), ({"tp": 2}, {"ep": 2})], ids=["ep2 to tp2", "tp2 to ep2"])
def test_resident_and_streamed_state_go_on_from_each_others_checkpoints_under_another_layout(models, tmp_path, one, other):
    moe, routes, state = models["qwen3_moe"], [2, 2, 8], str(tmp_path / "state")
    (tmp_path / "state").mkdir()
    jobs = []
    for kind, folder in (("streamed", state), ("resident", "")):
        checkpoint = str(tmp_path / kind)
        jobs.append(Job(worlds.checkpoint_resume, one, (moe, checkpoint, one, routes, 2, "fp32", folder)))
        jobs += [Job(worlds.resume_from, other, (moe, checkpoint, other, routes, then)) for then in (state, "")]
    streamed, streamed_to_streamed, streamed_to_resident, resident, resident_to_streamed, resident_to_resident = launch(jobs, ranks=2)
    for a, b in zip(streamed, resident, strict=True):
        assert a["went_on"] == a["resumed"] == b["went_on"]
    assert streamed_to_streamed == streamed_to_resident == resident_to_streamed == resident_to_resident
    for got, want in zip(streamed_to_resident[0], streamed[0]["went_on"], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-5) and got["grad_norm"] == pytest.approx(want["grad_norm"], rel=2e-5)


BF16 = {"moments": "bf16"}


def test_a_resumed_run_with_bf16_moments_goes_on_bit_for_bit(world, models, tmp_path):
    (tmp_path / "state").mkdir()
    result = worlds.checkpoint_resume(models["qwen3_moe"], str(tmp_path / "c"), {}, [2, 2, 8], 2, "bf16", str(tmp_path / "state"), None, BF16)
    assert result["resumed"] == result["went_on"] and result["different"] == []


def test_bf16_moments_go_on_under_another_layout_and_as_fp32_and_fp32_moments_as_bf16(models, tmp_path):
    """After loading, step 2 has the moments of the checkpoint or the nearest to them; loss and gradient of step 3 tell what it made of them."""
    moe, routes, state = models["qwen3_moe"], [2, 2, 8], str(tmp_path / "state")
    (tmp_path / "state").mkdir()
    narrow, wide = str(tmp_path / "narrow"), str(tmp_path / "wide")
    jobs = [Job(worlds.checkpoint_resume, {"ep": 2}, (moe, narrow, {"ep": 2}, routes, 2, "fp32", state, None, BF16)),
            Job(worlds.resume_from, {"tp": 2}, (moe, narrow, {"tp": 2}, routes, state, None, BF16)),
            Job(worlds.resume_from, {"tp": 2}, (moe, narrow, {"tp": 2}, routes)),
            Job(worlds.checkpoint_resume, {"ep": 2}, (moe, wide, {"ep": 2}, routes, 2, "fp32", state)),
            Job(worlds.resume_from, {"tp": 2}, (moe, wide, {"tp": 2}, routes, state, None, BF16))]
    saved, to_narrow, to_resident, saved_wide, wide_to_narrow = launch(jobs, ranks=2)
    assert to_narrow == to_resident  # step 2 computes in fp32, from the same numbers
    for loaded, then, rel in ((to_narrow, saved, 2e-5), (wide_to_narrow, saved_wide, 2e-3)):
        for got, want in zip(loaded[0], then[0]["went_on"], strict=True):
            assert got["loss"] == pytest.approx(want["loss"], rel=rel) and got["grad_norm"] == pytest.approx(want["grad_norm"], rel=rel)


def test_streamed_state_finds_its_elements_whatever_cut_the_parameters(models, tmp_path):
    """A tied embedding of 131 rows: 66 a rank under TP2, where they are padded; on both stages under PP2."""
    (state := tmp_path / "state").mkdir()
    llama, jobs = models["llama"], []
    critic = {"advantage": "gae", "critic": {"lr": 1e-3}}
    for one, other, algorithm in (({"tp": 2}, {"pp": 2}, None), ({"pp": 2}, {"tp": 2}, None), ({}, {"tp": 2}, None), ({"tp": 2}, {"pp": 2}, critic)):
        checkpoint = str(tmp_path / "-".join([*one, "to", *other, str(bool(algorithm))]))
        jobs.append(Job(worlds.checkpoint_resume, one, (llama, checkpoint, one, None, 2, "fp32", str(state), algorithm)))
        jobs.append(Job(worlds.resume_from, other, (llama, checkpoint, other, None, str(state), algorithm)))
    results = launch(jobs, ranks=2)
    for saved, loaded in zip(results[0::2], results[1::2], strict=True):
        assert saved[0]["resumed"] == saved[0]["went_on"]
        for got, want in zip(loaded[0], saved[0]["went_on"], strict=True):
            assert got["loss"] == pytest.approx(want["loss"], rel=2e-5, abs=1e-6) and got["grad_norm"] == pytest.approx(want["grad_norm"], rel=2e-5)
            assert got["critic_grad_norm"] == pytest.approx(want["critic_grad_norm"], rel=2e-5, nan_ok=True)


def test_no_tensor_of_the_optimizer_is_in_megatrons_part_of_a_checkpoint(world, models, tmp_path):
    """Else taking one would gather the state in memory."""
    (tmp_path / "state").mkdir()
    sizes = {}
    for kind, state in (("streamed", str(tmp_path / "state")), ("resident", "")):
        worlds.checkpoint_resume(models["llama"], str(tmp_path / kind), {}, None, 1, "fp32", state)
        sizes[kind] = sum(p.stat().st_size for p in (tmp_path / kind).glob("*.distcp"))
    assert sizes["streamed"] < 0.4 * sizes["resident"]  # weights, of weights, main values and two moments
