"""Prune a GPT-2 with tied embeddings under Hugging Face's Trainer. Run: python examples/huggingface_gpt2.py

A small GPT-2 with random initial weights learns a made-up language, in which verbs agree with their subjects. Its
embedding is also its output layer: it is pruned once, and stays tied.
"""

import math
import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from rewound.integrations.transformers import rewind

ONE, MANY = ["cat", "child", "sailor", "fox"], ["cats", "children", "sailors", "foxes"]
SEES, SEE = ["sees", "hears", "likes"], ["see", "hear", "like"]
WORDS = [".", "the", "old", "small", *ONE, *MANY, *SEES, *SEE]


def noun(dice: random.Random, words: list[str]) -> list[str]:
    return ["the", *[dice.choice(["old", "small"])] * (dice.random() < 0.5), dice.choice(words)]


def text(dice: random.Random, length: int = 24) -> dict[str, torch.Tensor]:
    """Sentences: "the old cats hear the fox ."."""
    words: list[str] = []
    while len(words) < length:
        subjects, verbs = dice.choice([(ONE, SEES), (MANY, SEE)])
        words += [*noun(dice, subjects), dice.choice(verbs), *noun(dice, dice.choice([ONE, MANY])), "."]
    ids = torch.tensor([WORDS.index(word) for word in words[:length]])
    return {"input_ids": ids, "labels": ids}


torch.manual_seed(0)
dice = random.Random(0)
config = GPT2Config(
    vocab_size=len(WORDS), n_positions=24, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="gpt2-run",
        num_train_epochs=3,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        metric_for_best_model="loss",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    ),
    train_dataset=[text(dice) for _ in range(384)],
    eval_dataset=[text(dice) for _ in range(128)],
)
run = rewind(trainer, compression=2)  # new
trainer.train()

for level in run.levels:
    smaller = f"{level.compression:.2f}x smaller ({level.network_compression:.2f}x of the whole network)"
    print(f"{smaller}: perplexity {math.exp(level.value or 0):.2f}")
assert model.lm_head.weight is model.transformer.wte.weight
start = torch.tensor([[WORDS.index(word) for word in ("the", "old", "foxes")]])
written = model.generate(start, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(start))
print(" ".join(WORDS[number] for number in written[0]))
trainer.save_model("gpt2-pruned")
