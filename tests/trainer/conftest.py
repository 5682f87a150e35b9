import pytest
import tiny_models

FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v3_yarn", "glm_moe_dsa")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of a tiny random model of each family, by name."""
    root = tmp_path_factory.mktemp("models")
    return {family: str(tiny_models.make(family, root / family)) for family in FAMILIES}


@pytest.fixture(scope="session")
def drafting(models, tmp_path_factory):
    """Folder of a tiny random model with a draft layer of each family that may have one, by name."""
    root = tmp_path_factory.mktemp("drafting")
    return {family: str(tiny_models.with_draft(models[family], root / family)) for family in ("glm4_moe", "deepseek_v3", "glm_moe_dsa")}


@pytest.fixture(scope="session")
def world():
    """torch.distributed and megatron-core with this process as the only rank."""
    from miles.core import Layout
    from miles.trainer.distributed import close_distributed, init_distributed

    init_distributed(0, Layout(world=1), lambda data: data, seed=1)
    yield
    close_distributed()
