"""Prune a BERT classifier under Hugging Face's Trainer: one line more. Run: python examples/huggingface_bert.py

A small BERT with random initial weights learns whether a made-up review is kind. Every checkpoint is sparse; add
`resume_from_checkpoint=True` to `trainer.train()` and the script goes on from the last one, under the same mask.
"""

import random

import torch
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments

from rewound.integrations.transformers import rewind

THINGS = ["plot", "cast", "music", "ending", "camera", "story"]
KIND, UNKIND = ["lovely", "moving", "clever", "warm"], ["dull", "clumsy", "cold", "noisy"]
WORDS = ["[pad]", "the", "is", "not", "and", *THINGS, *KIND, *UNKIND]


def review(dice: random.Random) -> dict[str, object]:
    """Two remarks, each perhaps denied; kind if neither of them hurts."""
    words, kind = [], True
    for joint in ("the", "and"):
        good, denied = dice.random() < 0.7, dice.random() < 0.3
        words += [joint, dice.choice(THINGS), "is", *["not"] * denied, dice.choice(KIND if good else UNKIND)]
        kind &= good != denied
    ids = [WORDS.index(word) for word in words]
    return {
        "input_ids": torch.tensor(ids + [0] * (10 - len(ids))),
        "attention_mask": torch.tensor([1] * len(ids) + [0] * (10 - len(ids))),
        "labels": int(kind),
    }


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


torch.manual_seed(0)
dice = random.Random(0)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
trainer = Trainer(
    model=BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), max_position_embeddings=10, **size)),
    args=TrainingArguments(
        output_dir="bert-run",
        num_train_epochs=4,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=256,
        learning_rate=1e-2,
        warmup_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        metric_for_best_model="accuracy",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    ),
    train_dataset=[review(dice) for _ in range(768)],
    eval_dataset=[review(dice) for _ in range(256)],
    compute_metrics=accuracy,
)
run = rewind(trainer, compression=2)  # new
trainer.train()

for level in run.levels:
    smaller = f"{level.compression:.2f}x smaller ({level.network_compression:.2f}x of the whole network)"
    print(f"{smaller}: {level.value:.1%} of the reviews understood")
trainer.save_model("bert-pruned")
