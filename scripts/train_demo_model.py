"""Train the demo model: a small sliding + full hybrid that answers questions about Python.

Owns the corpus (text that ships with Python and nothing else), the tokenizer, the chat template
and the training loop, and writes one Hugging Face model directory. Needs no network. It is a run
by hand, not part of the package: nothing imports it. The text differs a little between Python
versions and the number of steps between machines, so a second run gives a similar model, not the
same bytes.

    python scripts/train_demo_model.py --out models/demo --seconds 660 --threads 1
"""

import argparse
import ast
import builtins
import inspect
import math
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
)

VOCABULARY = 2048
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
# No whitespace between the parts: a turn's text is then exactly the text between two special
# tokens, which BPE never merges across, so the next prompt extends "prompt + answer + </s>".
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' ~ message.role) }}{% endif %}"
    "{{ '<|' ~ message.role ~ '|>' ~ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SKIPPED_PACKAGES = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages")
)
SKIPPED_MODULES = frozenset(
    ("encodings", "distutils", "ensurepip", "pydoc_data", "ntpath", "this", "antigravity")
)
BUILTIN_MODULES = ("math", "cmath", "itertools", "time", "operator", "gc", "sys", "errno", "zlib")
ANSWER_CHARS = (25, 330)
SHORT_INSTRUCTIONS = (
    "You answer questions about Python.",
    "You are a helpful assistant. Answer from the Python manual.",
    "Answer in one or two sentences.",
)
# Tokens per row, rows per step, share of the steps: mostly short, some long for many turns.
ROWS = ((128, 8, 0.40), (256, 4, 0.37), (512, 2, 0.15), (1024, 1, 0.06), (2048, 1, 0.02))


class Question(NamedTuple):
    """One question with its wordings, its answer, and the answer to "Tell me more." or ""."""

    wordings: tuple[str, ...]
    answer: str
    more: str
    weight: float


SMALL_TALK = tuple(
    Question(wordings, answer, "", 8.0)
    for wordings, answer in (
        (("Hello!", "Hi", "Hello", "Good morning."), "Hello! Ask me about Python."),
        (("Thanks.", "Thank you!", "Thanks, that helps."), "You are welcome."),
        (("Who are you?", "What can you do?"), "I am a small model that answers about Python."),
    )
)


def paragraphs(text: str) -> list[str]:
    """The prose paragraphs of a docstring or help topic, each on one line, best first."""
    found = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = block.splitlines()
        if any(re.match(r"\s{2,}|\s*([*=~^+|-]{3,}|>>>|::|[*-] |\d+\. )", line) for line in lines):
            continue
        prose = " ".join(block.split())
        # A signature is no sentence: "object.__call__(self[, args...])", "slice(stop) -> ...".
        if re.match(r"[\w.]+\(", prose) or len(prose.split()) < 4:
            continue
        if prose[:1].isalnum() and prose[-1] in ".!:" and "::=" not in prose:
            found.append(re.sub(r":$", ".", prose))
    return found


def shortened(paragraph: str) -> str:
    """Whole sentences of the paragraph within the length of an answer, "" if none fits."""
    low, high = ANSWER_CHARS
    answer = ""
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph):
        if len(answer) + len(sentence) >= high:
            break
        answer = f"{answer} {sentence}".strip()
    return answer if len(answer) >= low else ""


def as_question(wordings: tuple[str, ...], text: str, weight: float) -> Question | None:
    """A question answered by the text's first prose paragraph, None if it has no usable one."""
    answers = [answer for answer in map(shortened, paragraphs(text)) if answer]
    if not answers:
        return None
    return Question(wordings, answers[0], answers[1] if len(answers) > 1 else "", weight)


def source_docstrings() -> Iterator[tuple[str, str, str]]:
    """(dotted name, kind, docstring) of the public modules, functions and classes of the stdlib."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names = parts[:-1] if parts[-1] == "__init__" else parts
        names = ("os", "path") if names == ("posixpath",) else names
        if (SKIPPED_PACKAGES | SKIPPED_MODULES).intersection(parts) or any(
            n[0] == "_" for n in names
        ):
            continue
        module = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        nodes = [(".".join(names), "module", module)]
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                nodes.append((".".join((*names, node.name)), kind, node))
        for name, kind, node in nodes:
            if not name.split(".")[-1].startswith("_"):
                yield name, kind, ast.get_docstring(node) or ""


def builtin_docstrings() -> Iterator[tuple[str, str, str]]:
    """(dotted name, kind, docstring) of what is written in C and has no source to parse."""
    for name, value in sorted(vars(builtins).items()):
        if name.startswith("_") or not callable(value):
            continue
        yield name, "class" if isinstance(value, type) else "function", inspect.getdoc(value) or ""
        if isinstance(value, type) and not issubclass(value, BaseException):
            for member, method in sorted(vars(value).items()):
                if not member.startswith("_") and callable(method):
                    yield f"{name}.{member}", "function", inspect.getdoc(method) or ""
    for module in BUILTIN_MODULES:
        for name, value in sorted(vars(__import__(module)).items()):
            if not name.startswith("_") and callable(value):
                yield f"{module}.{name}", "function", inspect.getdoc(value) or ""


def questions() -> list[Question]:
    """Every question of the corpus, help topics and built-ins weighted up."""
    wordings = {
        "module": ("What is the {} module for?", "What is {}?", "Tell me about {}."),
        "class": ("What is {}?", "Tell me about {}.", "What is {} for?"),
        "function": ("What does {} do?", "Explain {}.", "Tell me about {}."),
    }
    found: list[Question | None] = list(SMALL_TALK)
    for weight, documented in ((2.0, builtin_docstrings()), (1.0, source_docstrings())):
        for name, kind, text in documented:
            asked = tuple(wording.format(name) for wording in wordings[kind])
            found.append(as_question(asked, text, weight * (2.0 if kind == "module" else 1.0)))
    for text in dict.fromkeys(topics.values()):
        title = text.partition("\n")[0].replace('"', "").strip()
        title = re.sub(r"^(The|A|An) ", lambda article: article[0].lower(), title)
        asked = (f"What is {title}?", f"Explain {title}.", f"Tell me about {title}.")
        found.append(as_question(asked, text, 6.0))
    return [question for question in found if question is not None]


def documents() -> list[str]:
    """The help topics and long docstrings as running text."""
    texts = list(topics.values()) + [text for _, _, text in source_docstrings()]
    return [text for text in texts if len(text) > 200]


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every UTF-8 string survives encode and decode unchanged."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


class Conversations:
    """Endless rows of training tokens: random conversations, written as the template does."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._random = random.Random(seed)
        self._questions = questions()
        self._weights = [question.weight for question in self._questions]
        self._documents = documents()
        self._encode = tokenizer.backend_tokenizer.encode
        self._user, self._assistant = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])

    def _instructions(self, room: int) -> str:
        draw = self._random.random()
        if draw < 0.35:
            return ""
        instructions = self._random.choice(SHORT_INSTRUCTIONS)
        if draw > 0.85:
            text = self._random.choice(self._documents)
            start = self._random.randrange(max(1, len(text) - 200))
            # An excerpt starts at a line, a document from its beginning is a good one too.
            start = text.rfind("\n", 0, start) + 1
            excerpt = text[start : start + self._random.randrange(200, 400 + 2 * room)]
            instructions = f"{instructions}\n\n{excerpt.strip()}"
        return f"<|system|>{instructions}"

    def _conversation(self, tokens: int) -> str:
        """About ``tokens`` tokens of one conversation, as the chat template would render it."""
        parts = ["<s>", self._instructions(tokens)]
        # Four characters make a token, roughly; the row is cut to length afterwards anyway.
        while sum(map(len, parts)) < 4 * tokens:
            question = self._random.choices(self._questions, self._weights)[0]
            asked = self._random.choice(question.wordings)
            parts.append(f"<|user|>{asked}<|assistant|>{question.answer}</s>")
            if question.more and self._random.random() < 0.2:
                parts.append(f"<|user|>Tell me more.<|assistant|>{question.more}</s>")
        return "".join(parts)

    def row(self, tokens: int) -> list[int]:
        """One row of exactly ``tokens`` token ids, one long conversation or several short ones."""
        ids: list[int] = []
        while len(ids) < tokens:
            longest = tokens if self._random.random() < 0.5 else tokens // 4
            ids += self._encode(self._conversation(longest)).ids
        return ids[:tokens]

    def batch(self) -> torch.Tensor:
        """int64 [rows, tokens] of one of the shapes in ROWS, drawn by their share."""
        tokens, rows, _ = self._random.choices(ROWS, [share for _, _, share in ROWS])[0]
        return torch.tensor([self.row(tokens) for _ in range(rows)])

    def labels(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids with the users' words masked out: nothing can predict what is asked next."""
        asking = (ids == self._user).cumsum(1) > (ids == self._assistant).cumsum(1)
        return ids.masked_fill(asking & (ids != self._user), -100)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Gemma3ForCausalLM:
    """The untrained hybrid: two sliding layers of 64 tokens to each full layer, tied embedding."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Gemma3ForCausalLM(config)


def train(model: Gemma3ForCausalLM, conversations: Conversations, seconds: float) -> None:
    """AdamW, 50 steps of warm-up, then a cosine over ``seconds`` of this thread's CPU time.

    CPU time, so that a busy machine makes the run longer and not the model worse.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.02)
    start, step, tokens, average = time.thread_time(), 0, 0, math.log(VOCABULARY)
    while (done := (time.thread_time() - start) / seconds) < 1:
        rate = 3e-3 * min(1.0, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = conversations.batch()
        loss = model(input_ids=ids, labels=conversations.labels(ids), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens, average = step + 1, tokens + ids.numel(), 0.98 * average + 0.02 * loss.item()
        if step % 100 == 0:
            spent = time.thread_time() - start
            print(f"step {step} {spent:.0f}s {tokens / spent:.0f} tok/s loss {average:.3f}")
            sys.stdout.flush()
    print(f"{step} steps, {tokens} tokens, loss {average:.3f}")


def save(model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model directory: bf16 safetensors, configs, tokenizer, template inside."""
    model.generation_config.update(do_sample=False, max_new_tokens=128)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>9} {path.name}")


def show_answers(out: Path) -> None:
    """Load the saved directory and print greedy answers of one conversation."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    messages = [{"role": "system", "content": SHORT_INSTRUCTIONS[0]}]
    asked = ("What does shlex.split do?", "Explain the with statement.", "What is json?")
    for question in (*asked, "What does str.split do?", "Tell me about the assert statement."):
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        generated = model.generate(**prompt)[0, prompt["input_ids"].shape[1] :]
        answer = tokenizer.decode(generated, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seconds", type=float, default=660.0, help="CPU seconds to train")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    texts = documents() + [f"{q.wordings[0]} {q.answer}" for q in questions()]
    tokenizer = build_tokenizer(texts)
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(texts)} texts")
    train(model, Conversations(tokenizer, arguments.seed), arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(model.eval(), tokenizer, arguments.out)
    show_answers(arguments.out)


if __name__ == "__main__":
    main()
