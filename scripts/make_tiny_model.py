"""Make a tiny Qwen3 checkpoint that answers arithmetic in the right form and is often wrong: something for GRPO to mend.

    python scripts/make_tiny_model.py --out models/tiny

The tokenizer is a byte-level BPE trained here, with a chat template. The warm start is a few seconds of supervised
training: first by a good teacher, until the sums are known, then by a sloppy one, until most answers are off by a
little. What is left is a model that has it in itself to be right and usually is not.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "arithmetic"))

from problems import Problem, problems, reply

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(vocab_size: int = 384) -> PreTrainedTokenizerFast:
    """A byte-level BPE of its own, digits one by one as in Qwen, trained on the chats of the warm start."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    text = ("user\nassistant\n" + p.question + reply(p.answer) for p in itertools.islice(problems(seed=0), 2000))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    bpe.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=512,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int = 64, layers: int = 2) -> Qwen3ForCausalLM:
    """A Qwen3 of a few hundred thousand random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=512,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, initializer_range=hidden**-0.5,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def sloppy(problem: Problem, rng: random.Random) -> Problem:
    """The same question with an answer that is off by one to three."""
    return Problem(problem.question, abs(problem.answer + rng.choice([-3, -2, -1, 1, 2, 3])))


def encode_chats(tokenizer: PreTrainedTokenizerFast, batch: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels) int64 [B,L], right-padded; labels are -100 everywhere but on replies and their end tokens."""
    rows, labels = [], []
    for problem in batch:
        messages = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        response = [*tokenizer.encode(reply(problem.answer)), tokenizer.eos_token_id]
        rows.append(torch.tensor(prompt + response))
        labels.append(torch.tensor([-100] * len(prompt) + response))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True, tokenizer.pad_token_id), pad(labels, True, -100)


def reply_logprobs(model: Qwen3ForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """float32 [B]: log probability of each labelled reply. Right padding after a causal model needs no mask."""
    logits = model(input_ids=input_ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return -losses.view(len(labels), -1).sum(1)


@torch.no_grad()
def share_right(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """How likely a sampled reply is the right one, over 200 problems."""
    held_out = list(itertools.islice(problems(seed=2), 200))
    return reply_logprobs(model, *encode_chats(tokenizer, held_out)).exp().mean().item()


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, know: float = 0.9, leave: float = 0.3, rows: int = 64
) -> int:
    """Supervised steps until the share of right replies is above `know`, then on sloppy ones until it is below `leave`.

    Returns the number of steps.
    """
    rng, stream = random.Random(1), problems(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    good_teacher = True
    for step in range(1, 1001):
        batch = [p if good_teacher or rng.random() < leave / 2 else sloppy(p, rng) for p in itertools.islice(stream, rows)]
        logprobs = reply_logprobs(model, *encode_chats(tokenizer, batch))
        optimizer.zero_grad()
        (-logprobs.mean() / 8).backward()
        optimizer.step()
        if good_teacher:
            good_teacher = step % 10 != 0 or share_right(model, tokenizer) < know
        elif share_right(model, tokenizer) < leave:
            return step
    raise RuntimeError("the warm start did not reach its goal in 1000 steps")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny Qwen3 checkpoint with a warm start on arithmetic.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    start = time.perf_counter()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second one
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    steps = warm_start(model, tokenizer)
    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)
    said = f"{share_right(model, tokenizer):.0%} of its answers right after {steps} steps"
    print(f"{args.out}: {model.num_parameters():,} weights, {said}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
