"""Chat templates of the named families, written from their public descriptions, with tokenizers trained on the spot.

DeepSeek-V3.2 has no template file: its messages are written by the encoder that SGLang ships.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from jinja2 import TemplateError

from miles.session import ChatTokenizer
from tests.engine.tiny import CHATML, make_tokenizer

# Hermes-style calls; consecutive tool results share one user message.
_QWEN_HEAD = (
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% if tools %}<|im_start|>system\n{{ first }}\n\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif first %}<|im_start|>system\n{{ first }}<|im_end|>\n{% endif %}"
)
_QWEN_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    "{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
_QWEN_TOOL = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN3 = (
    _QWEN_HEAD + "{% for m in messages %}{% if m.role == 'tool' %}" + _QWEN_TOOL + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    + _QWEN_CALLS + "<|im_end|>\n{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning stays in replies after the last question of a user, and is left out of those before it; the prompt opens it.
QWEN3_THINKING = (
    _QWEN_HEAD + "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}" + _QWEN_TOOL + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.asked and (loop.last or m.reasoning_content) %}<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ m.content }}"
    + _QWEN_CALLS + "<|im_end|>\n{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
GLM47 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>{% endif %}"
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'system' %}<|system|>{{ m.content }}"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|assistant|>{% if loop.index0 > ns.asked and m.reasoning_content %}<think>{{ m.reasoning_content.strip() }}</think>{% else %}</think>{% endif %}"
    "{{ m.content.strip() }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{% endif %}"
    "{% if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}{% elif m.role == 'system' %}<|im_system|>system<|im_middle|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
# Trims every text, allows one call per reply, and writes only the call where there is one.
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}Today Date: 26 Jul 2024\n\n"
    "{{ messages[0].content.strip() if messages[0].role == 'system' else '' }}<|eot_id|>"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{\"name\": \"{{ m.tool_calls[0].function.name }}\", \"parameters\": "
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% elif not (loop.first and m.role == 'system') %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content.strip() }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are SmolLM.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    rule: str
    template: str
    specials: tuple[str, ...] = ()


FAMILIES = {
    "chatml": Family("chatml", CHATML),
    "qwen3": Family("qwen3", QWEN3, ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")),
    "qwen3-thinking": Family("qwen3-thinking", QWEN3_THINKING, ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")),
    "glm-4.7": Family("glm", GLM47, ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>",
                                     "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")),
    "deepseek-v3.2": Family("deepseek-v3.2", "", ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")),
    "kimi-k2": Family("kimi-k2", KIMI_K2, ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
                                           "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")),
    "llama-3": Family("llama-3", LLAMA3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")),
    "smollm2": Family("smollm2", SMOLLM2),
}


class DeepSeekV32:
    """The tokenizer with SGLang's encoder of messages in place of a template."""

    def __init__(self, tokenizer):
        self.encode, self.decode = tokenizer.encode, tokenizer.decode

    def apply_chat_template(self, conversation, *, tools, tokenize, add_generation_prompt):
        from sglang.srt.entrypoints.openai.encoding_dsv32 import (
            DS32EncodingError,
            encode_messages,
        )

        messages = [{**m, "tool_calls": [{**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
                                         for c in m.get("tool_calls") or []]} for m in conversation]
        if tools:
            if messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": ""})
            messages[0]["tools"] = tools
        try:
            return encode_messages(messages, thinking_mode="chat")
        except DS32EncodingError as e:
            raise TemplateError(str(e)) from e


def make_chat(name: str, folder, change: tuple[str, str] = ("", "")) -> ChatTokenizer:
    """The family's tokenizer and template; `change` = (text, what stands there instead) for variants of it."""
    family = FAMILIES[name]
    assert change[0] in family.template
    template = family.template.replace(*change) if change[0] else family.template
    template = template.replace("%}\n", "%}{{ '\\n' }}")  # Hugging Face's environment drops a newline right after a block
    tokenizer = make_tokenizer(folder, template or "none", family.specials)
    return ChatTokenizer(DeepSeekV32(tokenizer) if name == "deepseek-v3.2" else tokenizer)
