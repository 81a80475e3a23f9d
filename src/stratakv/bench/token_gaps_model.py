"""Writes the model of ``token_gaps`` into a directory: ``python -m ... DIRECTORY``.

Owns nothing but these files: random weights, and a tokenizer with a word for each token, so that
each is sent when it is there.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models

from stratakv.bench.shapes import LLAMA_8X256, VOCABULARY, build


def write(path: Path) -> None:
    build(LLAMA_8X256).save_pretrained(path)
    words = {f"w{at}": at for at in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
