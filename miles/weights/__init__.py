"""Weight versions: what the trainer publishes, how it travels, what an engine acknowledges.

    patch.py      the patch file: which elements changed and by how much, compressed block by block; dense where that does not pay
    kernels.py    its compiled loops, each with its definition in NumPy
    digest.py     the digest of a tensor, over blocks; the threads for block work
    store.py      versions as folders: keyframes, deltas and what went over the wire, each with a manifest that verifies
    follow.py     the reader's side: from the version it has to the newest one, digests checked
    shared.py     one pull and one host copy for all ranks of a node
    node.py       memory that they share, with a lock and a record of what lies where
    adapters.py   low-rank adapters, and the weights that they make
    required.py   which tensors a version must have
    merged.py     the reader's side where adapters alone travel: the model folder with the newest merged into it
    file_layout.py where tensors lie in a safetensors file made in memory
    acks.py       what each engine says it serves
    retention.py  which versions nobody needs any more
    publish.py    the trainer's side: choose the encoding, publish, broadcast
    choose.py     which transport is kept when all are tried
    p2p/          from trainer ranks to rollout ranks, shard by shard
    precision/    quantizers, and the stream of tensors on its way to engines of a quantized rollout
    mapping/      Hugging Face names <-> megatron-core shards

Must not know the schedule.
"""
