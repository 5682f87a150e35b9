"""A session server of its own, for tests that kill it: `python -m tests.session.server_program MODEL ENGINE_URL STORE EPOCH PORT`."""

import asyncio
import sys
from pathlib import Path

from miles.engine import EngineClient
from miles.session import (
    ChatTokenizer,
    Engines,
    SessionLimits,
    SessionServer,
    SessionService,
    SessionStore,
)

TOKEN = "server-program-token"


async def main(model: str, engine: str, store: str, epoch: str, port: str) -> None:
    from tests.engine.stub import TOKEN as ENGINE_TOKEN

    client = EngineClient(engine, ENGINE_TOKEN, model, max_context=4096)
    await client.refresh_version()
    service = SessionService(Engines.of(client), ChatTokenizer.from_folder(model), SessionLimits(4000, 16, 20.0, 1.0), store=SessionStore(Path(store), 0, int(epoch)))
    print(await SessionServer(service, TOKEN).start(int(port)), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
