#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""The session server: what a turn costs over calling the engine directly, how many it serves, and prefix reuse of a real engine. [--quick] [--json]

Four processes: the server (pinned to one core), a stub engine that answers at once in SGLang's format, a relay, and this one, which plays the harness. All over
loopback HTTP, every turn durable (on disk before its answer) as in a run.
  added time    sessions with a history of 1k and of 64k tokens, ten turns each, which append 40 to 60 tokens a turn. Baseline: the same number of tokens
                sent to the engine by the client the server uses. Limit: what a relay adds to it, which has the server's core and its libraries and does
                with a turn what cannot be left out: takes the request, calls the engine with as many tokens, brings 1,500 bytes to disk, answers. The
                three take turns, in one run; p50 of the differences.
  throughput    512 sessions at once, each a conversation of 8 turns, then a new one. Limit: the same harness against a server that only answers.
  prefix reuse  a real SGLang on a tiny random model, 16 sessions of 24 turns at once, which begin with instructions of about 1,000 tokens as agents'
                do: prompt tokens that came from its cache. What a turn appends is new to every engine, so 100 % is out of reach. With --quick 4
                sessions on SGLang's stand-in from the tests, which keeps every token: what is left out is the cache of a real engine, whose start
                alone takes half a minute
Exit 1 where a target is missed.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import aiohttp
import msgspec
import numpy as np
import uvloop
from aiohttp import web

from tools.bench.table import figure, tell

TOKEN = "bench-token"
SENTENCE = "list the files in the folder, then print file.txt and count its lines\n"
REPLY_TOKENS = 12
CONTEXT = 120_000
SESSIONS = 512
TURNS = 8
TURN_BYTES = 1500  # about what a turn appends to the sessions' file


# -- the processes beside this one ------------------------------------------------------------------------------------------------
async def serve_stub(out: list[int]) -> None:
    """SGLang's `/generate`, answered at once: the tokens of a short reply, log-probabilities, versions, a prefix that is always cached."""
    logprobs = [[-0.25, t, None] for t in out]
    spans = [{"version": "0", "start": 0, "end": len(out)}]

    async def generate(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        n = len(body["input_ids"])
        return web.Response(body=msgspec.json.encode({"text": "", "output_ids": out, "meta_info": {
            "id": body["rid"], "finish_reason": {"type": "stop", "matched": out[-1]}, "prompt_tokens": n, "completion_tokens": len(out),
            "cached_tokens": n - 1, "weight_version": "0", "weight_versions": spans, "output_token_logprobs": logprobs}}), content_type="application/json")

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "0"})

    async def nothing(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b'{"choices": [{"message": {"role": "assistant", "content": "ok"}}]}', content_type="application/json")

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/generate", generate), web.get("/model_info", info), web.post("/nothing", nothing)])
    await _announce(app)


async def serve_sessions(folder: str, engine: str, store: str) -> None:
    from miles.engine import EngineClient
    from miles.session import (
        ChatTokenizer,
        Engines,
        SessionLimits,
        SessionServer,
        SessionService,
        SessionStore,
        settle_collector,
    )

    client = EngineClient(engine, TOKEN, folder, max_context=CONTEXT)
    await client.refresh_version()
    service = SessionService(Engines.of(client), ChatTokenizer.from_folder(folder), SessionLimits(CONTEXT - 1000, 64, 60.0, 1.0, max_sessions=2 * SESSIONS),
                             store=SessionStore(Path(store), 0, 1))
    settle_collector()
    print(await SessionServer(service, TOKEN).start(_free_port()), flush=True)
    await asyncio.Event().wait()


async def serve_relay(folder: str, engine: str, store: str) -> None:
    """A turn without a session: its request is read and not looked at."""
    from miles.engine import EngineClient, Sampling

    client, rng, turns = EngineClient(engine, TOKEN, folder, max_context=CONTEXT), np.random.default_rng(1), itertools.count()

    def write() -> None:
        out.write(b"x" * TURN_BYTES)
        os.fdatasync(out.fileno())

    async def turn(request: web.Request) -> web.Response:
        await request.read()
        ids = rng.integers(10, 300, int(request.query["tokens"])).astype(np.int32)
        await client.generate(f"relay.{next(turns)}", ids, Sampling(64, stop_token_ids=(2,)), routing_key="bench", routes_from=len(ids) - 60, extra_key="v0")
        await asyncio.to_thread(write)
        return web.Response(body=b'{"choices": []}', content_type="application/json")

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/turn", turn)])
    with open(store, "wb", buffering=0) as out:
        await _announce(app)


async def _announce(app: web.Application) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def _free_port() -> int:
    from miles.engine import lease_port

    return lease_port(37000).port


@contextmanager
def process(core: int | None, *args: str):
    """(process, the URL it announced). `core`: the one it runs on."""
    child = subprocess.Popen([sys.executable, __file__, *args], stdout=subprocess.PIPE, text=True)
    try:
        if core is not None and os.cpu_count() > 1:
            os.sched_setaffinity(child.pid, {core})
        url = child.stdout.readline().strip()
        if not url:
            raise SystemExit(f"the {args[1]} process did not start")
        yield child, url
    finally:
        child.kill()
        child.wait()


def reply_tokens(folder: str) -> list[int]:
    """Of what the stub answers."""
    from miles.session import ChatTokenizer

    chat = ChatTokenizer.from_folder(folder)
    return [*chat.encode("echo hello world > out.txt && cat out.txt")[: REPLY_TOKENS - 1], chat.stop_ids[0]]


# -- the harness ------------------------------------------------------------------------------------------------------------------
class Harness:
    """One conversation over HTTP."""

    def __init__(self, http: aiohttp.ClientSession, server: str):
        self._http, self._server, self.messages, self.base = http, server, [], ""

    async def open(self) -> None:
        async with self._http.post(f"{self._server}/sessions", json={}) as r:
            opened = await r.json()
        self.base, self.messages = f"{self._server}/sessions/{opened['id']}", []

    async def turn(self, text: str) -> dict:
        self.messages.append({"role": "user", "content": text})
        async with self._http.post(self.base + "/v1/chat/completions", data=msgspec.json.encode({"messages": self.messages})) as r:
            answer = msgspec.json.decode(await r.read())
        if "choices" not in answer:
            raise SystemExit(f"a turn failed: {answer}")
        self.messages.append(answer["choices"][0]["message"])
        return answer["usage"]

    async def finish(self) -> dict:
        async with self._http.post(self.base + "/finish") as r:
            return await r.json()


def _http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}, connector=aiohttp.TCPConnector(limit=0))


async def added_time(folder: str, server: str, engine: str, relay: str, history: int, sessions: int) -> tuple[float, float, float]:
    """(p50 of what a turn through a session takes longer than the engine alone, of what one through the relay does, of the engine alone), seconds, with about
    `history` tokens before: each of `sessions` ends after ten turns, lest a short history becomes a long one."""
    from miles.engine import EngineClient, Sampling
    from miles.session import ChatTokenizer

    per_sentence = len(ChatTokenizer.from_folder(folder).encode(SENTENCE * 100)) / 100
    client, rng = EngineClient(engine, TOKEN, folder, max_context=CONTEXT), np.random.default_rng(0)
    through, relayed, alone = [], [], []
    async with _http() as http:
        for n in range(sessions):
            harness = Harness(http, server)
            await harness.open()
            await harness.turn(SENTENCE * int(history / per_sentence))
            for i in range(10):
                start = time.perf_counter()
                usage = await harness.turn(f"output {i}: " + SENTENCE * 2)
                through.append(time.perf_counter() - start)
                ids = rng.integers(10, 300, usage["prompt_tokens"]).astype(np.int32)
                start = time.perf_counter()
                await client.generate(f"alone{n}.{i}", ids, Sampling(64, stop_token_ids=(2,)), routing_key="bench", routes_from=len(ids) - 60, extra_key="v0")
                alone.append(time.perf_counter() - start)
                start = time.perf_counter()
                async with http.post(f"{relay}/turn?tokens={len(ids)}", data=msgspec.json.encode({"messages": harness.messages})) as r:
                    await r.read()
                relayed.append(time.perf_counter() - start)
            await harness.finish()
    await client.close()
    return *(statistics.median(t - a for t, a in list(zip(times, alone, strict=True))[3:]) for times in (through, relayed)), statistics.median(alone[3:])


async def throughput(server: str, pid: int, conversations: int) -> tuple[float, float, int]:
    """(turns/s, growth of the server's memory over the second half, turns lost) of SESSIONS conversations at once."""
    done, lost, memory = 0, 0, []
    left = conversations

    async def play(http: aiohttp.ClientSession) -> None:
        nonlocal done, lost, left
        while left > 0:
            left -= 1
            harness = Harness(http, server)
            await harness.open()
            for i in range(TURNS):
                await harness.turn(f"output {i}: " + SENTENCE * 2)
                done += 1
            summary = await harness.finish()
            lost += TURNS - len(summary["turns"])
            memory.append(_rss(pid))

    start = time.perf_counter()
    async with _http() as http:
        await asyncio.gather(*(play(http) for _ in range(SESSIONS)))
    seconds = time.perf_counter() - start
    half = memory[len(memory) // 2:]
    return done / seconds, half[-1] / half[0], lost


async def harness_limit(engine: str, requests: int) -> float:
    """Turns/s of the same harness against a server that answers without doing anything."""
    async with _http() as http:
        async def play(n: int) -> None:
            messages = []
            for i in range(n):
                messages.append({"role": "user", "content": f"output {i}: " + SENTENCE * 2})
                async with http.post(engine + "/nothing", data=msgspec.json.encode({"messages": messages})) as r:
                    messages.append(msgspec.json.decode(await r.read())["choices"][0]["message"])

        start = time.perf_counter()
        await asyncio.gather(*(play(TURNS) for _ in range(requests // TURNS)))
        return requests / (time.perf_counter() - start)


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- prefix reuse -----------------------------------------------------------------------------------------------------------------
@asynccontextmanager
async def real_engine(folder: str, scratch: Path) -> AsyncIterator[str]:
    """Its URL."""
    from miles.config import load_config
    from miles.engine import EngineProcess

    config = load_config(ROOT / "configs/tiny_async.toml", (f"model.path={folder}", "model.recipe=none", "engine.port_base=37100",
                                                            "engine.max_total_tokens=200000", "model.max_context=4096"))
    (scratch / "token").write_text(TOKEN)
    engine = EngineProcess(config, rank=0, log_path=scratch / "engine.log", token_file=scratch / "token", platform="cpu")
    try:
        yield await engine.start()
    finally:
        await engine.stop()


@asynccontextmanager
async def stand_in(folder: str, scratch: Path) -> AsyncIterator[str]:
    """Its URL."""
    from miles.engine import ModelShape
    from tests.engine.stub import StubEngine

    engine = StubEngine(ModelShape.from_folder(folder), reply_tokens(folder)[-1], TOKEN)
    try:
        yield await engine.start()
    finally:
        await engine.stop()


async def play(service, name: str, text: str, turns: int):
    """A session of `turns` turns, the first of which begins with `text`."""
    session, messages = service.open(name), [{"role": "user", "content": text}]
    while len(session.turns) < turns:
        # A random model hardly ever says the stop token: common letters end a turn, so that it can be continued.
        reply = await session.chat(messages, stop=("a", "e", "i", "o"))
        if reply.finish_reason == "stop":
            messages += [reply.message, {"role": "user", "content": f"output {len(session.turns)}: {SENTENCE}"}]
    return session


async def prefix_reuse(folder: str, started, sessions: int, turns: int) -> tuple[float, float]:
    """(of the prompt tokens already computed for their session, the share that came from the cache; the same of all after the first turn).
    `started`: one of the engines above."""
    from miles.engine import EngineClient
    from miles.session import ChatTokenizer, Engines, SessionLimits, SessionService

    async with started as url:
        client = EngineClient(url, TOKEN, folder, max_context=4096)
        try:
            await client.refresh_version()
            service = SessionService(Engines.of(client), ChatTokenizer.from_folder(folder), SessionLimits(4000, 32, 120.0, 1.0))
            played = await asyncio.gather(*(play(service, f"s{n}", f"{n}: {SENTENCE * 40}", turns) for n in range(sessions)))
        finally:
            await client.close()
    checkpoints = [c for s in played for c in s.history.checkpoints]
    reused, cacheable = sum(c.reused_tokens for c in checkpoints), sum(c.cacheable_tokens for c in checkpoints)
    later = [t for s in played for t in s.turns[1:]]
    return reused / cacheable, sum(t.cached_tokens for t in later) / sum(len(t.input_ids) for t in later)


# -- figures ----------------------------------------------------------------------------------------------------------------------
def measure(quick: bool) -> list[dict]:
    from tests.engine.tiny import make_model

    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        moe, folder = str(make_model(Path(scratch) / "moe")), str(make_model(Path(scratch) / "dense", "llama"))
        os.sched_setaffinity(0, {os.cpu_count() - 1})
        with process(os.cpu_count() - 1, "--role", "stub", "--reply", ",".join(map(str, reply_tokens(folder)))) as (_, engine), \
                process(0, "--role", "relay", "--folder", folder, "--engine", engine, "--store", f"{scratch}/relay") as (_, relay), \
                process(0, "--role", "server", "--folder", folder, "--engine", engine, "--store", f"{scratch}/sessions") as (server, url):
            added = {}
            for tokens, most in ((1024, 2e-3), (65536, 5e-3)):
                added[tokens], limit, alone = asyncio.run(added_time(folder, url, engine, relay, tokens, 3 if quick else 20))
                figures.append(figure(f"added time of a turn, {tokens // 1024}k tokens", "ms", 1e3 * added[tokens], 1e3 * alone, 1e3 * limit, most=1e3 * most))
            figures.append(figure("added time at 64k over that at 1k", "x", added[65536] / added[1024], None, 1.0, most=2.0))
            limit = asyncio.run(harness_limit(engine, 2048 if quick else 4096))
            rate, growth, lost = asyncio.run(throughput(url, server.pid, SESSIONS * (1 if quick else 6)))
            figures.append(figure(f"{SESSIONS} sessions at once, one core", "turns/s", rate, None, limit, least=500))
            figures.append(figure("memory at the end over that at half", "x", growth, None, 1.0, most=1.05))
            figures.append(figure("turns lost", "", lost, None, 0, most=0))
        os.sched_setaffinity(0, set(range(os.cpu_count())))
        started = (stand_in if quick else real_engine)(moe, Path(scratch))
        same, all_later = asyncio.run(prefix_reuse(moe, started, 4 if quick else 16, 24))
        figures.append(figure("prefix tokens of the session from the cache", "", same, None, 1.0, least=0.96))
        figures.append(figure("all prompt tokens after the first turn", "", all_later, None, 1.0, least=0.96))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns; prefix reuse on a stand-in, not on a real engine")
    parser.add_argument("--json", action="store_true")
    for name in ("--role", "--reply", "--folder", "--engine", "--store"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        # The server has the event loop that rollout ranks have.
        if args.role == "stub":
            asyncio.run(serve_stub([int(t) for t in args.reply.split(",")]))
        else:
            serve = serve_relay if args.role == "relay" else serve_sessions
            uvloop.run(serve(args.folder, args.engine, args.store))
        return 0
    figures = measure(args.quick)
    return tell("session", figures, args.json)


if __name__ == "__main__":
    sys.exit(main())
