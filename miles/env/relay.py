"""Runs inside the sandbox: offers the session's socket as http://127.0.0.1:PORT, runs the harness, and ends as it ends.

A script for the sandbox's own Python (3.8 or newer), without anything of Miles: `python3 -I relay.py job.json`. The job: `socket`, `port`, `argv`, `env`.
"""

import asyncio
import json
import sys

KEPT = 3000  # bytes of the harness's output that are shown from its beginning (as they come), and as many from its end


async def forward(reader, writer):
    try:
        while True:
            data = await reader.read(1 << 16)
            if not data:
                break
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # the other side is closed in any case
    finally:
        writer.close()


async def show(stream):
    """Pass on the first bytes at once, for a harness that is killed; hold back the last ones."""
    shown, tail, left_out = 0, b"", False
    while True:
        data = await stream.read(1 << 16)
        now, tail = data[: KEPT - shown], tail + data[KEPT - shown :]
        shown += len(now)
        left_out, tail = left_out or len(tail) > KEPT, tail[-KEPT:]
        out(now if data else (b"\n[...]\n" if left_out else b"") + tail)
        if not data:
            return


def out(data):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


async def main(job):
    async def connect(reader, writer):
        try:
            session_reader, session_writer = await asyncio.open_unix_connection(job["socket"])
        except OSError as e:
            out(b"relay: no session: " + str(e).encode() + b"\n")
            writer.close()
            return
        await asyncio.gather(forward(reader, session_writer), forward(session_reader, writer))

    await asyncio.start_server(connect, "127.0.0.1", job["port"])
    try:
        harness = await asyncio.create_subprocess_exec(*job["argv"], env=job["env"], stdin=asyncio.subprocess.DEVNULL,
                                                       stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    except OSError as e:
        out(f"relay: cannot start {job['argv'][0]}: {e}\n".encode())
        return 127
    showing = asyncio.ensure_future(show(harness.stdout))
    code = await harness.wait()
    await asyncio.wait([showing], timeout=1)  # not longer: what it left behind may hold its output open
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        task = json.load(f)
    sys.exit(asyncio.run(main(task)))
