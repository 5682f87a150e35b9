"""Which tensors every version of a run has: those that the trainer exports, of each family, in each format of the rollout."""

import pytest

from miles.config import load_config
from miles.config.precision import FORMATS, high_precision, is_quantized
from miles.engine.params import read_parameters
from miles.weights.mapping.architecture import read_architecture
from miles.weights.required import required_tensors
from tests.trainer.tiny_models import SHARED_HEAD, make, with_draft

FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v3_yarn", "glm_moe_dsa")
DRAFTING = ("glm4_moe", "deepseek_v3", "glm_moe_dsa")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {family: make(family, tmp_path_factory.mktemp(family) / "model") for family in FAMILIES}


def config(folder, *more):
    return load_config("configs/tiny_async.toml", (f"model.path={folder}", "model.recipe=none", *more))


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_model_folder_every_tensor_is_required(models, family):
    known = read_parameters(models[family])
    assert required_tensors(config(models[family]), known) == known.keys()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_of_a_quantized_weight_all_parts_are_required(models, family, format):
    source, patterns = read_parameters(models[family]), high_precision(read_architecture(models[family]).family)
    known = {n.removesuffix("weight") + part for n, p in source.items() if is_quantized(n, p.shape, patterns) for part in FORMATS[format].parts}
    known |= {n for n, p in source.items() if not is_quantized(n, p.shape, patterns)}
    run = config(models[family], "model.trainer_precision=bf16", f"model.rollout_precision={format}", "model.rollout_path=/models/quantized")
    assert required_tensors(run, known | {"model.layers.0.self_attn.q_proj.input_scale"}) == known and len(known) > len(source)


@pytest.mark.parametrize("family", DRAFTING)
def test_the_draft_layer_is_required_where_it_is_trained_and_never_what_it_shares_with_the_model(models, family, tmp_path):
    folder = with_draft(models[family], tmp_path / "drafting")
    plain, known = read_parameters(models[family]).keys(), read_parameters(folder).keys()
    assert required_tensors(config(folder), known) == plain
    assert required_tensors(config(folder, "trainer.mtp.lr=1e-5"), known) == {n for n in known if n in plain or not n.endswith(SHARED_HEAD)} > plain


def test_what_a_trainer_never_has_is_not_required(models):
    """An output layer that is the embedding, and buffers that older folders have."""
    known = read_parameters(models["llama"]).keys()
    assert required_tensors(config(models["llama"]), {*known, "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}) == known


def test_with_adapters_these_are_required_both_factors_of_each(models):
    """Of two layers: query, key and value share an A, gate and up too."""
    required = required_tensors(config(models["llama"], "trainer.lora.rank=4", "trainer.lora.alpha=8.0"), ())
    assert required == {f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in (
        "self_attn.q_proj.lora_A", "self_attn.q_proj.lora_B", "self_attn.k_proj.lora_B", "self_attn.v_proj.lora_B", "self_attn.o_proj.lora_A", "self_attn.o_proj.lora_B",
        "mlp.gate_proj.lora_A", "mlp.gate_proj.lora_B", "mlp.up_proj.lora_B", "mlp.down_proj.lora_A", "mlp.down_proj.lora_B")}
