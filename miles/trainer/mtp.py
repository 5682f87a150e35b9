"""Multi-token prediction: the draft layer of a model trained beside it, so that engines that speculate with it keep accepting what it drafts
(DeepSeek-V3, arXiv:2412.19437, section 2.2).

From the last hidden state of a token and the embedding of the next one the draft layer predicts the one after. It learns what the policy samples, and the policy
learns nothing from it: hidden states, embedding and output layer are given to it without a way back for its gradient, which has a norm and a clip of its own. So the
parameters of the model after a step are those of a step without it, and a weight of this loss beside the policy's would change nothing: what counts is the learning
rate of the draft layer. Of the token after the last one sampled nothing is known: a sequence of T tokens has at most T - 2 targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from miles.trainer.logprob import Scores, token_logprobs

if TYPE_CHECKING:
    from miles.trainer.forward import Figures, SampledRows


class DraftingModel(GPTModel):
    """Gives its output hook the hidden states of the draft layer too. megatron-core computes a loss from them before it calls the hook, with the logits of all tokens at
    once, averaged over each micro-batch, and without the last token of a sequence."""

    def _postprocess(self, *, hidden_states, input_ids, position_ids, mtp_in_postprocess, attention_mask, padding_mask, rotary_pos_emb, rotary_pos_cos, rotary_pos_sin,
                     packed_seq_params, sequence_len_offset, output_processor, output_processor_context, **_unused):
        if not self.post_process:
            return hidden_states
        more = {}
        if mtp_in_postprocess and torch.is_grad_enabled():  # a pass that only scores needs no drafts
            both = self.mtp(
                input_ids=input_ids, position_ids=position_ids, hidden_states=hidden_states, attention_mask=attention_mask, padding_mask=padding_mask,
                rotary_pos_emb=rotary_pos_emb, rotary_pos_cos=rotary_pos_cos, rotary_pos_sin=rotary_pos_sin, packed_seq_params=packed_seq_params,
                sequence_len_offset=sequence_len_offset, embedding=self.embedding,
            )
            more = {"draft_states": both[len(hidden_states):]}
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return output_processor(hidden_states=hidden_states, output_layer=self.output_layer, output_weight=weight, context=output_processor_context, **more)


@dataclass(frozen=True)
class MtpLoss:
    """Cross entropy of the draft layer in one step: -sum_t log q_t / n over the n tokens of the step that were sampled and have two before them in their sequence.

    q is taken at the temperature at which the tokens were sampled. The share of tokens that are the most likely ones of q stands for the share of drafts that an
    engine accepts.
    """

    vocab: int
    temperature: float
    tokens: int  # n

    def head(self, hidden: torch.Tensor, weight: torch.Tensor, tokens: SampledRows) -> Scores:
        return token_logprobs(hidden, weight, tokens.of("draft_targets"), temperature=self.temperature, vocab=self.vocab,
                              tp_group=parallel_state.get_tensor_model_parallel_group())

    def loss(self, found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Figures]:
        """Of what `head` gave, a plain tuple by now: what is to be summed over micro-batches and ranks, and as `mtp` (float64 [2]) its value and the share of tokens
        that were most likely."""
        logprobs, _, highest = found
        loss = -logprobs.sum() / max(self.tokens, 1)
        agreed = (logprobs == highest).sum() / max(self.tokens, 1)
        return loss, {"mtp": torch.stack([loss.detach().double(), agreed.double()])}
