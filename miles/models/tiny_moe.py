"""Recipes `tiny_moe` and `tiny_glm4_moe`: a Qwen3-MoE or GLM-4 MoE of about 1.5 million parameters with its own tokenizer, made and warm-started here.

It is an ordinary Hugging Face folder (fp32 safetensors, per-expert names) that SGLang and megatron-core load unchanged. The warm start is supervised
training on demonstrations of mixed quality (miles.models.demonstrations), after which it solves about a third of its tasks when sampled at
temperature 1 (the GLM-4 MoE, which rehearses production jobs, gets a shorter one, and a draft layer that knows nothing yet). The result depends on the seed, the tasks and the CPU's floating point alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from miles.config import MilesConfig, load_site
from miles.core import ConfigError
from miles.env import EpisodeLimits, load_tasks
from miles.models.demonstrations import Demonstration, demonstrate, plan
from miles.models.draft import add_draft_layer
from miles.models.prepare import Say
from miles.models.sampled_success import sampled_success
from miles.models.warm_start import EPOCHS, train

VOCAB_SIZE = 512
IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
CHAT_TEMPLATE = (  # ChatML; append-only: no message is written differently because of those after it
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAMPLES = 8  # episodes per task when success is measured


def make(config: MilesConfig, folder: Path, say: Say) -> dict:
    """Fill `folder`. Returns the facts of the recipe, success of the warm start among them. Raises ConfigError for tasks without a solution."""
    if config.model.max_context > 32768:
        raise ConfigError(f"model.max_context = {config.model.max_context} for a tiny model", "<= 32768", "lower it")
    tasks = load_tasks(config.tasks.path)
    limits = EpisodeLimits.from_config(config, load_site(config.cluster.site))
    seed = config.run.seed
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on how they are split; and at this size more threads only wait for each other
    try:
        demonstrations = demonstrate(plan(tasks, limits.max_turns, seed), limits)
        share = sum(d.weight * d.reward for d in demonstrations) / len(tasks)
        say(f"  {len(demonstrations)} demonstrations of {len(tasks)} tasks run in the sandbox; by weight {share:.0%} of them solve their task")
        tokenizer = make_tokenizer(demonstrations)
        torch.manual_seed(seed)
        model, epochs = build(config.model.recipe, tokenizer, config.model.max_context)
        say(f"  {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens; training on the demonstrations")
        train(model, tokenizer, demonstrations, seed, say, epochs)
        success = sampled_success(model, tokenizer, tasks, limits, SAMPLES, seed, config.rollout.max_turn_tokens)
    finally:
        torch.set_num_threads(threads)
    mean = sum(success.values()) / len(success)
    between = sum(0 < s < 1 for s in success.values())
    say(f"  sampled at temperature 1 it solves {mean:.0%} ({SAMPLES} episodes of each task; {between} of {len(tasks)} tasks are solved sometimes but not always)")
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    if config.model.recipe == "tiny_glm4_moe":
        say(f"  a draft layer of {add_draft_layer(folder):,} parameters, not trained")
    tokenizer.save_pretrained(folder)
    return {"seed": seed, "tasks": str(config.tasks.path), "demonstrations": len(demonstrations), "demonstrated_success": round(share, 4),
            "sampled_success": round(mean, 4), "success_by_task": success}


def build(recipe: str, tokenizer: transformers.PreTrainedTokenizerFast, max_context: int) -> tuple[transformers.PreTrainedModel, int]:
    """(a model with random weights, passes of its warm start)."""
    common = dict(
        vocab_size=len(tokenizer), hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=256,
        moe_intermediate_size=128, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=max_context, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32")
    if recipe == "tiny_glm4_moe":  # one dense layer first, a shared expert, sigmoid router with a bias, as its large relatives; 4 layers for 2 stages
        return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(
            num_hidden_layers=4, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, use_qk_norm=True,
            attention_bias=True, partial_rotary_factor=0.5, routed_scaling_factor=1.0, **common)), 12
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        num_hidden_layers=3, num_experts=8, decoder_sparse_step=1, mlp_only_layers=[], router_aux_loss_coef=0.01, **common)), EPOCHS


def make_tokenizer(demonstrations: Iterable[Demonstration]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE over the demonstrations' own words, so that a word or a path is one token or few. Any text can be written with it.

    Exactly VOCAB_SIZE tokens, filled up with reserved ones: every id that the model can sample has a text.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r" ?\S+|\s"), "isolated"),  # a word with the space before it; paths stay whole
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    core.decoder = decoders.ByteLevel()
    specials = [IM_START, IM_END, PAD]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, min_frequency=2, special_tokens=specials, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    core.train_from_iterator((text for d in demonstrations for m in d.messages for text in (m["role"], m["content"])), trainer)
    core.add_special_tokens([f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - core.get_vocab_size())])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=IM_END, pad_token=PAD, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
