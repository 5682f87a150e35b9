"""A tiny random Qwen3-MoE (or Llama) checkpoint with its own small BPE tokenizer and ChatML template, made on the spot."""

from __future__ import annotations

from pathlib import Path

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ("list the files in the folder, then print file.txt and count its lines\n", "echo hello world > out.txt && cat out.txt\n",
          "user asked: what is in notes.md? assistant said: done\n", "    indented   text\twith tabs\n\n\nand blank lines\n")


def make_tokenizer(folder: Path, chat_template: str = CHATML, specials: tuple[str, ...] = ()):
    """Train a byte-level BPE of 384 tokens (plus `specials`) on a few lines; save it as an ordinary tokenizer folder; return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=384, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *specials]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(folder: Path, family: str = "qwen3_moe", seed: int = 0) -> Path:
    """Save a random model of `family` (qwen3_moe | llama) with `make_tokenizer`'s tokenizer. Weights are large enough that logits and routes are not flat."""
    import torch
    import transformers as hf

    tokenizer = make_tokenizer(folder)
    common = {
        "vocab_size": 392, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
        "max_position_embeddings": 4096, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if family == "qwen3_moe":
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(
            moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
            tie_word_embeddings=False, **common))
    elif family == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(tie_word_embeddings=True, **common))
    else:
        raise ValueError(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.1)
    model.float().save_pretrained(folder)
    return folder
