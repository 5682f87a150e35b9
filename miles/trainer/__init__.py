"""The trainer: megatron-core model and parallel state, batching, advantages and losses, routing replay, the step, checkpoints.

Must not know how a trajectory was made or where weights go. Importing this package adapts megatron-core to the machine
(`miles.platform.activate`), so `import miles.trainer` (or any module of it) has to come before the first `import megatron.core`.
"""

import miles.platform

miles.platform.activate()
