"""A small BPE tokenizer with a ChatML template, and a stub engine behind a session service."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from miles.engine import EngineClient, ModelShape
from miles.session import ChatTokenizer, Engines, SessionLimits, SessionService
from tests.engine.stub import TOKEN, StubEngine
from tests.engine.tiny import make_tokenizer

SHAPE_CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 392, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def chat(tokenizer):
    return ChatTokenizer(tokenizer)


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory):
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("stub-model")
    (folder / "config.json").write_text(json.dumps(SHAPE_CONFIG))
    save_file({"model.norm.weight": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def make_world(chat, stub_folder):
    def run(scenario, **limits):
        async def main():
            stub = StubEngine(ModelShape.from_folder(stub_folder), stop_id=chat.stop_ids[0])
            stub.decode = chat.text
            client = EngineClient(await stub.start(), TOKEN, stub_folder, max_context=2048)
            await client.refresh_version()
            service = SessionService(Engines.of(client), chat, SessionLimits(**{
                "max_session_tokens": 400, "max_turn_tokens": 16, "turn_deadline_s": 5.0, "temperature": 1.0, **limits}))
            try:
                return await scenario(SimpleNamespace(stub=stub, client=client, service=service, chat=chat))
            finally:
                await client.close()
                await stub.stop()

        return asyncio.run(main())

    return run


@pytest.fixture
def world(chat, stub_folder):
    """Runs `async def scenario(w)` with a started stub engine `w.stub` and a `w.service` over it."""
    return make_world(chat, stub_folder)


def user(text):
    return {"role": "user", "content": text}
