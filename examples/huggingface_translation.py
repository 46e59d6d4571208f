"""Prune a translator under Hugging Face's Seq2SeqTrainer. Run: python examples/huggingface_translation.py

A small Marian network with random initial weights learns to translate made-up sentences: in German the verb comes last
after "weil", and "der" becomes "den" in an object. After each epoch the trainer translates held-out sentences by
`generate`, with the weights that are left, and `sacrebleu` compares them with the text. Where that BLEU may fall by 1,
`max_drop=1` ends the run in time.
"""

import random

import numpy as np
import sacrebleu
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from rewound.integrations.transformers import rewind

NOUNS = [("man", "der Mann"), ("dog", "der Hund"), ("woman", "die Frau"), ("cat", "die Katze"), ("child", "das Kind")]
VERBS = [("sees", "sieht"), ("hears", "hört"), ("finds", "findet"), ("needs", "braucht"), ("likes", "mag")]


def phrase(dice: random.Random, is_object: bool = False) -> tuple[str, str]:
    noun, german = dice.choice(NOUNS)
    return f"the {noun}", german.replace("der", "den") if is_object else german


def sentence(dice: random.Random) -> tuple[str, str]:
    """As "the dog sees the man because ..." and "der Hund sieht den Mann weil ..."."""
    english, german = [], []
    for because, weil in [("", ""), ("because", "weil")][: dice.choice([1, 2])]:
        (who, wer), (sees, sieht), (whom, wen) = phrase(dice), dice.choice(VERBS), phrase(dice, is_object=True)
        english += [because, who, sees, whom]
        german += [weil, wer, wen, sieht] if weil else [wer, sieht, wen]
    return " ".join(english).strip(), " ".join(german).strip()


torch.manual_seed(0)
dice = random.Random(0)
text = list(dict.fromkeys(sentence(dice) for _ in range(1000)))

words = Tokenizer(models.WordLevel(unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(
    [side for pair in text for side in pair], trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"])
)
words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
)
pairs = [dict(tokenizer(source, text_target=target)) for source, target in text]


def bleu(prediction: EvalPrediction) -> dict[str, float]:
    written, wanted = (
        tokenizer.batch_decode(np.where(ids < 0, 0, ids), skip_special_tokens=True)  # -100 marks what is no word
        for ids in (prediction.predictions, prediction.label_ids)
    )
    return {"bleu": sacrebleu.corpus_bleu(written, [wanted]).score}


size = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
size |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "max_position_embeddings": 24}
special = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}
config = MarianConfig(vocab_size=len(tokenizer), dropout=0.0, init_std=0.1, scale_embedding=True, **size, **special)
model = MarianMTModel(config)
trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        output_dir="marian-run",
        num_train_epochs=6,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=256,
        learning_rate=1e-2,
        warmup_steps=10,
        max_grad_norm=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        predict_with_generate=True,
        generation_max_length=24,
        metric_for_best_model="bleu",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    ),
    train_dataset=pairs[:-100],
    eval_dataset=pairs[-100:],
    data_collator=DataCollatorForSeq2Seq(tokenizer, model),
    processing_class=tokenizer,
    compute_metrics=bleu,
)
run = rewind(trainer, compression=4, rate=0.5)  # new
trainer.train()

for level in run.levels:
    smaller = f"{level.compression:.2f}x smaller ({level.network_compression:.2f}x of the whole network)"
    print(f"{smaller}: BLEU {level.value:.1f}")
trainer.save_model("marian-pruned")
