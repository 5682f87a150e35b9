"""Weights from trainer ranks straight to rollout ranks, shard by shard, without gathering them anywhere.

    plan.py       which rank sends which rectangle of which tensor to whom, from both layouts; pure
    receivers.py  what a receiver holds: whole tensors, or the share of one process of an engine; pure
    source.py     what a trainer rank has; needs megatron's parallel state
    image.py      the receiver's memory: the safetensors file that its engine loads
    chunks.py     rectangles <-> the bytes of a message, with their digests
    send.py       the trainer ranks' side: connect, fill the receivers, hear whether all of them have everything
    filled.py     what a transfer leaves to be published
    receive.py    a rollout rank's side

A version is filled first and published afterwards: its manifest exists only when every receiver has verified every byte (miles.weights.publish).
"""
