"""One real SGLang server for all engine tests, on a tiny random Qwen3-MoE."""

import asyncio
from types import SimpleNamespace

import pytest

from miles.config import load_config
from miles.engine import EngineClient, EngineProcess
from tests.engine.tiny import make_model

TOKEN = "engine-test-token-5f2c"


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny-moe")


@pytest.fixture(scope="session")
def token_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture(scope="session")
def make_config(tiny_moe):
    def make(**overrides):
        values = {"model.path": str(tiny_moe), "model.recipe": "none", "engine.port_base": 34000, **overrides}
        return load_config("configs/tiny_async.toml", tuple(f"{k}={v}" for k, v in values.items()))

    return make


@pytest.fixture(scope="session")
def runner():
    """One event loop for the whole test session: the server process and its client belong to it."""
    with asyncio.Runner() as r:
        yield r


@pytest.fixture(scope="session")
def engine(make_config, token_file, tiny_moe, runner, tmp_path_factory):
    process = EngineProcess(make_config(), rank=0, log_path=tmp_path_factory.mktemp("log") / "engine.log", token_file=token_file, platform="cpu")
    runner.run(process.start(weight_version=7))
    client = EngineClient(process.url, TOKEN, tiny_moe, max_context=2048)
    assert runner.run(client.refresh_version()) == 7
    yield SimpleNamespace(process=process, client=client, run=runner.run, folder=tiny_moe)
    runner.run(client.close())
    runner.run(process.stop())
