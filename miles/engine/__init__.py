"""SGLang as a child process and over HTTP: start, health, generate, pause, update, digest.

Must not decide which session goes to which engine, nor know what a conversation is.
"""

from miles.engine.client import EngineClient, EngineGone, KeyRequired, TurnOverdue
from miles.engine.command import ModelShape, server_argv, server_env
from miles.engine.ports import PortLease, lease_port
from miles.engine.process import EngineProcess, detect_platform
from miles.engine.wire import Sampling

__all__ = [
    "EngineClient", "EngineGone", "EngineProcess", "KeyRequired", "ModelShape", "PortLease", "Sampling", "TurnOverdue", "detect_platform", "lease_port",
    "server_argv", "server_env",
]
