"""A model whose next token is a function of the last one, so that it says what a test wants: real
weights behind a real server, a chat template that shows tools, and an answer that calls one.
"""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.serving import EOS, train_tokenizer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER, GREETING = "It is sunny in Paris.", "Hello to you."
STORY = {"<|with-tools|>": CALL, "<|with-result|>": ANSWER, "<|plain|>": GREETING}
"""What comes behind which token; each is a token of its own."""
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{% endfor %}{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{% if messages[-1].role == 'tool' %}<|with-result|>"
    "{% elif tools %}<|with-tools|>{% else %}<|plain|>{% endif %}{% endif %}"
    "{# <tool_call> #}"
)
WIDTH = 128


def scripted_model(path: Path) -> Path:
    """Write it, with its tokenizer."""
    train_tokenizer(path)
    data = json.loads((path / "tokenizer.json").read_text("utf-8"))
    first = 1 + max(*data["model"]["vocab"].values(), *(one["id"] for one in data["added_tokens"]))
    ids = {text: first + at for at, text in enumerate((*STORY, *STORY.values()))}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] += [
        {"id": token, "content": text, "special": text in STORY, **plain}
        for text, token in ids.items()
    ]
    (path / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    config = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    end = next(one["id"] for one in data["added_tokens"] if one["content"] == EOS)
    vocab = first + len(ids)
    after = {token: (token * 31 + 7) % (first - 2) + 1 for token in range(vocab)}
    after |= {ids[text]: end for text in STORY.values()}
    after |= {ids[mark]: ids[text] for mark, text in STORY.items()}
    _model(vocab, after, end).save_pretrained(path)
    return path


def _model(vocab: int, after: dict[int, int], end: int) -> LlamaForCausalLM:
    """Its layers add nothing: what comes in goes out, and finds what comes behind it."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
        bos_token_id=end, eos_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    embedding = torch.nn.functional.normalize(
        torch.randn(vocab, WIDTH, generator=torch.Generator().manual_seed(1)), dim=1
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        head = torch.zeros(vocab, WIDTH)
        head.index_add_(0, torch.tensor([after[token] for token in range(vocab)]), 4 * embedding)
        model.lm_head.weight.copy_(head)
    return model
