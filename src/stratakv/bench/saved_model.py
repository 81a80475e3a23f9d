"""A model of the benches as a directory, as a server takes one.

Owns the tokenizer that stands beside it: of bytes, as none of their models has read anything.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from stratakv.bench.shapes import VOCABULARY


def save(model: PreTrainedModel, path: Path) -> None:
    """Weights, a byte-level tokenizer, and a template that joins messages."""
    model.save_pretrained(path)
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator([__doc__ or ""], trainer)
    fast.save(str(path / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
