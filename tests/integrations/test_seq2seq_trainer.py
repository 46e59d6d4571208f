"""Hugging Face's Seq2SeqTrainer, rewound: sentences of different lengths, judged by the BLEU of what is generated."""

from pathlib import Path

import pytest
import sacrebleu
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    EvalPrediction,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from rewound import Epochs, Pruner, Steps
from rewound.integrations.transformers import rewind

pytestmark = pytest.mark.usefixtures("one_thread")

T, BATCHES, WORDS = 2, 5, 16
PAD, END = 0, 1
SPECIAL = {"vocab_size": WORDS, "pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": END}


def marian() -> MarianMTModel:
    torch.manual_seed(0)
    sides = {f"{side}_{size}": 2 for side in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    feed_forward = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 16}
    return MarianMTModel(MarianConfig(**SPECIAL, d_model=16, forced_eos_token_id=END, **sides, **feed_forward))


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**SPECIAL, **size))


def sentences(count: int) -> list[dict[str, list[int]]]:
    """Sentences of 3 to 8 words; their translation has the words in reverse."""
    dice = torch.Generator().manual_seed(count)
    found = []
    for _ in range(count):
        length = int(torch.randint(3, 9, (), generator=dice))
        words = torch.randint(2, WORDS, (length,), generator=dice).tolist()
        found.append({"input_ids": [*words, END], "labels": [*words[::-1], END]})
    return found


def batch(sentences: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    def padded(name: str, value: int) -> Tensor:
        return pad_sequence([torch.tensor(each[name]) for each in sentences], batch_first=True, padding_value=value)

    source = padded("input_ids", PAD)
    return {"input_ids": source, "attention_mask": (source != PAD).long(), "labels": padded("labels", -100)}


def text(numbers: Tensor) -> list[str]:
    return [" ".join(f"w{number}" for number in row if number > END) for row in numbers.tolist()]


def bleu(prediction: EvalPrediction) -> dict[str, float]:
    written, wanted = (text(torch.as_tensor(each)) for each in (prediction.predictions, prediction.label_ids))
    return {"bleu": sacrebleu.corpus_bleu(written, [wanted]).score}


def trainer(folder: Path, model: PreTrainedModel | None = None, **options: object) -> Seq2SeqTrainer:
    given: dict[str, object] = {
        "num_train_epochs": T,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "max_grad_norm": 0.5,
        "train_sampling_strategy": "group_by_length",
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "predict_with_generate": True,
        "generation_max_length": 12,
        "metric_for_best_model": "bleu",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    return Seq2SeqTrainer(
        model or marian(),
        Seq2SeqTrainingArguments(str(folder), **given),  # type: ignore[arg-type]
        train_dataset=sentences(8 * BATCHES),  # type: ignore[arg-type]
        eval_dataset=sentences(6),  # type: ignore[arg-type]
        data_collator=batch,
        compute_metrics=bleu,
    )


def rewound_by(trainer: Seq2SeqTrainer, **options: object) -> Epochs | Steps:
    given = {"compression": 4, "rate": 0.5, "pruner": Pruner(scope="layer"), "say": lambda line: None, **options}
    return rewind(trainer, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("network", [marian, t5])
def test_a_level_is_judged_by_the_bleu_of_what_its_pruned_network_generates(network: object, tmp_path: Path) -> None:
    assert callable(network)
    mine = trainer(tmp_path, network())
    model = mine.model
    assert model is not None
    said: list[str] = []
    run = rewound_by(mine, say=said.append)
    seen: list[tuple[int, float, list[str]]] = []

    def judged(prediction: EvalPrediction) -> dict[str, float]:
        for name, kept in (run.mask or {}).items():
            assert not model.get_parameter(name)[~kept].any(), "pruned weights are zero while it generates"
        found = bleu(prediction)
        seen.append((run.level, found["bleu"], text(torch.as_tensor(prediction.predictions))))
        return found

    mine.compute_metrics = judged
    mine.train()
    last = {level: value for level, value, _ in seen}  # of each level's two evaluations
    assert [(each.value, each.metric, each.higher_is_better) for each in run.levels] == [
        (last[level], "bleu", True) for level in (0, 1, 2)
    ]
    assert f"bleu {last[0]:g}" in next(line for line in said if line.startswith("dense"))
    assert run.mask is not None
    assert run.mask.density == pytest.approx(0.25, abs=1e-3)
    model.eval()
    held_out = batch(sentences(6))
    written = model.generate(held_out["input_ids"], attention_mask=held_out["attention_mask"], max_length=12)
    assert sorted(text(written)) == sorted(seen[-1][2])  # the trainer evaluates by length, too
    tied = [name for name in run.mask if "shared" in name or "embed_tokens" in name or "lm_head" in name]
    assert len(tied) == 1, "source, target and output words are one weight, which is pruned once"


def test_a_resumed_run_with_batches_by_length_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    # From within an epoch, the trainer itself resumes with other batches of similar length.
    whole = trainer(tmp_path, save_strategy="epoch")
    run = rewound_by(whole, compression=2)
    whole.train()
    mine = trainer(tmp_path)
    again = rewound_by(mine, compression=2)
    mine.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{(T + 1) * BATCHES}"))  # in the middle of level 1
    assert again.levels == run.levels
    assert whole.model is not None
    assert mine.model is not None
    for name, value in whole.model.state_dict().items():
        assert torch.equal(mine.model.state_dict()[name], value), name


@pytest.mark.parametrize("max_drop", [0.5, 2])
def test_max_drop_is_in_bleu(max_drop: float, tmp_path: Path) -> None:
    mine = trainer(tmp_path, num_train_epochs=1)
    run = rewound_by(mine, compression=32, max_drop=max_drop)
    mine.compute_metrics = lambda prediction: {"bleu": 30 - 1.0 * run.level}
    mine.train()
    assert [reached.value for reached in run.levels] == ([30, 29, 28] if max_drop == 0.5 else [30, 29, 28, 27, 26])
    assert (run.mask.density if run.mask else 1) == pytest.approx(1 if max_drop == 0.5 else 0.25, abs=1e-3)


def test_more_bleu_is_better_also_where_the_metric_was_named_after_the_arguments_were_made(tmp_path: Path) -> None:
    mine = trainer(tmp_path, num_train_epochs=1, metric_for_best_model=None)
    mine.args.metric_for_best_model = "bleu"
    run = rewound_by(mine, compression=2)
    mine.train()
    assert all(level.higher_is_better for level in run.levels)
