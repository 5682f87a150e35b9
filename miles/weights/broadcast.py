"""One process group over the trainer leader (rank 0) and the engines (ranks 1..n): NCCL on GPU, gloo on CPU.

The engines join through SGLang's `/init_weights_update_group`, which meets in a TCP store under a prefix that is the group's name; this is
the trainer's half of the same rendezvous. torch offers no public way to build a group outside the default world, so it uses the same
private function as SGLang 0.5.23 does, for the pinned torch 2.13.
"""

from __future__ import annotations

import datetime
import socket

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from miles.core import EnvironmentFault
from miles.weights.store import State


class BroadcastGroup:
    """The trainer leader's end. Create it, publish `address`, then `join` while the engines join; then `send` each version."""

    def __init__(self, name: str, engines: int, timeout_s: float):
        self.world = engines + 1
        self._timeout = datetime.timedelta(seconds=timeout_s)
        host = _host()
        self._store = dist.TCPStore(host, 0, self.world, is_master=True, timeout=self._timeout, wait_for_workers=False)
        self.address, self.port = host, self._store.port
        self.name = f"{name}-{self.port}"  # torch refuses a name twice in one process
        self._group: dist.ProcessGroup | None = None

    @property
    def joined(self) -> bool:
        return self._group is not None

    def join(self) -> None:
        """Meet the engines. Raises EnvironmentFault when one does not come within the timeout."""
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        try:
            self._group, _ = _new_process_group_helper(
                self.world, 0, [], Backend(backend), PrefixStore(self.name, self._store), group_name=self.name, backend_options=None,
                timeout=self._timeout, device_id=None,
            )
            _world.pg_group_ranks[self._group] = {i: i for i in range(self.world)}
        except (RuntimeError, dist.DistError) as e:
            raise EnvironmentFault(f"weight broadcast group {self.name}: not all {self.world - 1} engines joined: {e}",
                                   "every engine within weights.ack_timeout_s", "the version goes out by disk instead") from e

    def send(self, state: State) -> None:
        """Broadcast every tensor, in the order of the manifest. Raises EnvironmentFault when an engine is lost on the way."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        try:
            for tensor in state.values():
                sent = tensor.to(device).contiguous()
                if sent.is_floating_point() and sent.element_size() == 1:
                    sent = sent.view(torch.uint8)  # gloo has no 8-bit floats; the bytes are the same
                self._group.broadcast(sent, 0).wait(self._timeout)
        except (RuntimeError, dist.DistError) as e:
            raise EnvironmentFault(f"weight broadcast {self.name} broke off: {e}", "all engines to receive every tensor",
                                   "the version goes out by disk instead; engines that got a part are reloaded") from e

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _host() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
