"""Hugging Face's Trainer, rewound: BERT and GPT-2 in miniature, under the real trainer."""

import copy
import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from optimizers_around import timm_lookahead
from rewound import Diverged, Epochs, InputError, Mask, Steps, densities
from rewound.integrations.transformers import rewind

pytestmark = pytest.mark.usefixtures("one_thread")

T, BATCHES = 2, 5  # epochs, and batches in each
WORDS, LENGTH = 24, 8


class Sentences(Dataset[dict[str, Tensor]]):
    """Made-up sentences; the first word tells the label, or the sentence itself is what is to be told."""

    def __init__(self, count: int, labelled: bool = True) -> None:
        self.words = torch.randint(1, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(count))
        self.labels = (self.words[:, 0] > WORDS // 2).long() if labelled else self.words

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **size))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **ends))


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def trainer(folder: Path, model: nn.Module | None = None, **options: object) -> Trainer:
    given: dict[str, object] = {
        "num_train_epochs": T,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    words = not isinstance(model, GPT2LMHeadModel)
    return Trainer(
        model or bert(),
        TrainingArguments(str(folder), **given),  # type: ignore[arg-type]
        train_dataset=Sentences(4 * BATCHES, words),
        eval_dataset=Sentences(8, words),
        compute_metrics=accuracy if words else None,
        callbacks=[Rates()],
    )


def rewound_by(trainer: Trainer, **options: object) -> Epochs | Steps:
    return rewind(trainer, **{"compression": 1.5, "say": lambda line: None, **options})  # type: ignore[arg-type]


class Rates(TrainerCallback):
    """Notes the learning rate of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.seen.append(kwargs["optimizer"].param_groups[0]["lr"])


def rates(trainer: Trainer) -> list[float]:
    return next(callback.seen for callback in trainer.callback_handler.callbacks if isinstance(callback, Rates))


def pieces(values: list[float], length: int) -> list[list[float]]:
    return [values[start : start + length] for start in range(0, len(values), length)]


def hooks(trainer: Trainer) -> list[object]:
    optimizer = trainer.optimizer.optimizer  # type: ignore[union-attr]
    held = [hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")]
    parameters = [parameter._post_accumulate_grad_hooks for parameter in trainer.model.parameters()]  # type: ignore[union-attr]
    return [hook for hook in (*held, *parameters, _global_optimizer_pre_hooks) if hook]


def assert_sparse(state: dict[str, Tensor], mask: Mask) -> None:
    for name, kept in mask.items():
        assert not state[name][~kept].any(), name
    assert sum(int(state[name].count_nonzero()) for name in mask) == pytest.approx(mask.kept, abs=5)


def mask_in(checkpoint: Path) -> Mask | None:
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)["rewound"]["mask"]
    return saved and Mask.unpacked(saved["bits"], saved["shapes"])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_bert_is_pruned_level_by_level_along_its_own_schedule(accumulation: int, tmp_path: Path) -> None:
    mine = trainer(
        tmp_path,
        gradient_accumulation_steps=accumulation,
        save_strategy="epoch",
        eval_strategy="epoch",
        metric_for_best_model="accuracy",
    )
    run = rewound_by(mine)
    mine.train()
    assert [reached.density for reached in run.levels] == [1.0, *densities(1.5)]
    assert all(reached.value is not None for reached in run.levels)
    assert mine.state.epoch == len(run) == 3 * T
    dense, *levels = pieces(rates(mine), T * -(-BATCHES // accumulation))
    assert dense[0] == 0.0
    assert max(dense) == 0.01
    assert levels == [dense, dense]
    assert run.mask is not None
    assert run.mask.density == pytest.approx(1 / 1.5, abs=1e-3)
    assert_sparse(mine.model.state_dict(), run.mask)  # type: ignore[union-attr]

    checkpoints = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert len(checkpoints) == 3 * T
    assert [mask_in(checkpoint) for checkpoint in checkpoints[:T]] == [None] * T
    for checkpoint in checkpoints[T:]:
        mask = mask_in(checkpoint)
        assert mask is not None
        assert_sparse(load_file(checkpoint / "model.safetensors"), mask)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    mine = trainer(tmp_path)
    run = rewound_by(mine)
    mine.train()
    assert not hooks(mine)
    assert run.mask is not None
    assert_sparse(copy.deepcopy(mine.model).state_dict(), run.mask)  # type: ignore[union-attr]
    assert_sparse(pickle.loads(pickle.dumps(mine.model)).state_dict(), run.mask)
    # And it is not trained dense again by mistake.
    with pytest.raises(InputError, match=r"trained its run; for another, make a new one and call rewind\(trainer\)"):
        mine.train()


def test_gpt2_stays_tied_and_is_pruned_once(tmp_path: Path) -> None:
    mine = trainer(tmp_path, gpt2(), save_strategy="epoch", eval_strategy="epoch", metric_for_best_model="loss")
    run = rewound_by(mine, compression=2)
    mine.train()
    model = mine.model
    assert isinstance(model, GPT2LMHeadModel)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert run.mask is not None
    assert "transformer.wte.weight" in run.mask
    assert "lm_head.weight" not in run.mask
    assert_sparse(model.state_dict(), run.mask)
    dense, *levels = pieces(rates(mine), T * BATCHES)
    assert levels == [dense] * 4
    assert run.levels[-1].value == pytest.approx(mine.evaluate()["eval_loss"])

    mine.save_model(str(tmp_path / "pruned"))
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "pruned")
    assert again.lm_head.weight is again.transformer.wte.weight
    assert_sparse(again.state_dict(), run.mask)


# Resuming


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding", "gradual"])
def test_a_resumed_run_ends_as_if_it_had_never_stopped(technique: str, tmp_path: Path) -> None:
    options = {"technique": technique, "retrain_epochs": 1}
    whole = trainer(tmp_path, save_strategy="steps", save_steps=1)
    run = rewound_by(whole, **options)
    whole.train()
    # In both epochs of the dense run and at its end, in the first level and at its end, and when all is over.
    for step in (3, BATCHES + 2, 2 * BATCHES, 2 * BATCHES + 3, *range(3 * BATCHES, len(run) * BATCHES + 1, BATCHES)):
        mine = trainer(tmp_path)
        again = rewound_by(mine, **options)
        mine.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert again.levels == run.levels
        assert rates(mine) == rates(whole)[step:]
        for name, value in whole.model.state_dict().items():  # type: ignore[union-attr]
            assert torch.equal(mine.model.state_dict()[name], value), (step, name)  # type: ignore[union-attr]


def test_a_run_with_an_optimizer_around_another_is_resumed(tmp_path: Path) -> None:
    def lookahead(**options: object) -> tuple[Trainer, Epochs]:
        mine = trainer(tmp_path, **options)
        assert mine.model is not None
        around = timm_lookahead()
        mine.optimizer = around(torch.optim.AdamW(mine.model.parameters(), lr=0.01))  # type: ignore[arg-type, call-arg]
        return mine, rewound_by(mine, retrain_epochs=1)

    whole, run = lookahead(save_strategy="steps", save_steps=1)
    whole.train()
    for step in (BATCHES + 2, 2 * BATCHES + 3):
        mine, again = lookahead()
        mine.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert again.levels == run.levels
        assert rates(mine) == rates(whole)[step:]
        for name, value in whole.model.state_dict().items():  # type: ignore[union-attr]
            assert torch.equal(mine.model.state_dict()[name], value), (step, name)  # type: ignore[union-attr]


class Stop(TrainerCallback):
    """Ends the training after some steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        control.should_training_stop = state.global_step == self.step


def test_a_training_stopped_by_somebody_else_is_left_where_it_is(tmp_path: Path) -> None:
    mine = trainer(tmp_path, save_strategy="steps", save_steps=1)
    mine.add_callback(Stop(3 * T * BATCHES - 1))
    run = rewound_by(mine)
    mine.train()
    assert not hooks(mine)
    assert len(run.levels) == 2  # the second level is not at its end
    assert run.mask is not None
    assert_sparse(mine.model.state_dict(), run.mask)  # type: ignore[union-attr]
    later = trainer(tmp_path)
    run = rewound_by(later)
    later.train(resume_from_checkpoint=True)
    assert len(run.levels) == 3


def test_a_sparsity_is_answered_with_the_compression() -> None:
    with pytest.raises(InputError, match=r"^rewind has no sparsity; for 90% sparsity give compression=10$"):
        rewind(None, sparsity=0.9)  # type: ignore[arg-type, call-arg]


def test_a_checkpoint_without_the_run_is_refused(tmp_path: Path) -> None:
    dense = trainer(tmp_path, save_strategy="steps", save_steps=3)
    dense.train()
    mine = trainer(tmp_path)
    rewound_by(mine)
    with pytest.raises(InputError, match="this checkpoint has no mask"):
        mine.train(resume_from_checkpoint=True)


def test_a_checkpoint_of_other_batches_is_refused(tmp_path: Path) -> None:
    first = trainer(tmp_path, save_strategy="epoch")
    rewound_by(first)
    first.train()
    other = trainer(tmp_path, per_device_train_batch_size=2)
    rewound_by(other)
    with pytest.raises(InputError, match="in epoch 3, but at 10 steps per epoch its 15 steps end in epoch 1"):
        other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{3 * BATCHES}"))
    assert not _global_optimizer_pre_hooks


# Counted in steps


N = 7  # of which an epoch has 5


class Stream(IterableDataset[dict[str, Tensor]]):
    """Sentences that nobody has counted."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        sentences = Sentences(4 * BATCHES)
        yield from (sentences[index] for index in range(len(sentences)))


@pytest.mark.parametrize("streams", [False, True])
def test_a_trainer_that_counts_steps_is_pruned_level_by_level(streams: bool, tmp_path: Path) -> None:
    mine = trainer(tmp_path, max_steps=N, gradient_accumulation_steps=1 if streams else 2)
    if streams:
        mine.train_dataset = Stream()
    run = rewound_by(mine, technique="weight-rewinding", retrain_steps=4)
    mine.train()
    assert isinstance(run, Steps)
    assert mine.state.global_step == len(run) == N + 2 * 4
    assert [reached.done for reached in run.levels] == [N, N + 4, N + 8]
    assert rates(mine)[N:] == 2 * rates(mine)[N - 4 : N]
    assert run.mask is not None
    assert_sparse(mine.model.state_dict(), run.mask)  # type: ignore[union-attr]
    assert not hooks(mine)


def test_a_resumed_run_of_steps_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    options = {"technique": "weight-rewinding", "retrain_steps": 4}
    whole = trainer(tmp_path, max_steps=N, save_strategy="steps", save_steps=1)
    run = rewound_by(whole, **options)
    whole.train()
    for step in (2, 4, N, N + 1, N + 8):  # before and after what is rewound to, and at and after the end of a level
        mine = trainer(tmp_path, max_steps=N)
        again = rewound_by(mine, **options)
        mine.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert again.levels == run.levels
        assert rates(mine) == rates(whole)[step:]
        for name, value in whole.model.state_dict().items():  # type: ignore[union-attr]
            assert torch.equal(mine.model.state_dict()[name], value), (step, name)  # type: ignore[union-attr]


def test_a_checkpoint_of_the_last_step_is_said_to_be_that(tmp_path: Path) -> None:
    for resumed in (False, True):  # in the middle of an epoch, where the trainer goes on, whatever its last step is
        mine = trainer(tmp_path, max_steps=BATCHES + 1, save_strategy="steps", save_steps=1)
        rewound_by(mine, one_shot=True, retrain_steps=BATCHES)
        if resumed:
            with pytest.raises(InputError, match="a run that had come to its end: there is nothing left to train"):
                mine.train(resume_from_checkpoint=True)
        else:
            mine.train()


def test_max_drop_ends_a_training_that_counts_steps(tmp_path: Path) -> None:
    mine = trainer(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2, metric_for_best_model="accuracy")
    run = rewound_by(mine, compression=10, max_drop=0.1)
    mine.compute_metrics = lambda prediction: {"accuracy": 0.9 - 0.15 * max(0, run.level - 1)}
    mine.train()
    assert [reached.value for reached in run.levels] == pytest.approx([0.9, 0.9, 0.75, 0.6])
    assert mine.state.global_step == 4 * 4
    assert run.mask is not None
    assert run.mask.density == pytest.approx(0.8, abs=1e-3)


# How far to go


def test_max_drop_ends_the_training_and_returns_the_last_good_level(tmp_path: Path) -> None:
    strategy = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "accuracy"}
    mine = trainer(tmp_path, **strategy)
    run = rewound_by(mine, compression=10, max_drop=0.1)
    mine.compute_metrics = lambda prediction: {"accuracy": 0.9 - 0.15 * max(0, run.level - 1)}
    mine.train()
    assert [reached.value for reached in run.levels] == pytest.approx([0.9, 0.9, 0.75, 0.6])
    assert mine.state.global_step == 4 * T * BATCHES
    assert run.mask is not None
    assert run.mask.density == pytest.approx(0.8, abs=1e-3)
    assert_sparse(mine.model.state_dict(), run.mask)  # type: ignore[union-attr]
    again = trainer(tmp_path, **strategy)
    rewound_by(again, compression=10, max_drop=0.1)
    with pytest.raises(InputError, match="max_drop had ended"):
        again.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("level", [1, 2])
def test_a_level_that_is_not_finite_ends_the_training(level: int, tmp_path: Path) -> None:
    def exploding(folder: Path, **options: object) -> tuple[Trainer, Epochs | Steps]:
        mine = trainer(folder, eval_strategy="epoch", metric_for_best_model="accuracy")
        run = rewound_by(mine, **options)

        def metrics(prediction: EvalPrediction) -> dict[str, float]:
            if run.level == level:
                nn.init.constant_(mine.model.classifier.weight, torch.inf)  # type: ignore[union-attr, arg-type]
            return {"accuracy": 0.9}

        mine.compute_metrics = metrics
        return mine, run

    mine, run = exploding(tmp_path / "returned", max_drop=0.1)
    mine.train()
    assert mine.state.global_step == T * BATCHES * (level + 1)
    assert [reached.level for reached in run.levels] == list(range(level))
    assert all(bool(p.isfinite().all()) for p in mine.model.parameters())  # type: ignore[union-attr]
    mine, _ = exploding(tmp_path / "raised")
    with pytest.raises(Diverged, match=f"level {level} of 2 diverged"):
        mine.train()


def test_an_accuracy_in_percent_is_refused_at_the_first_evaluation(tmp_path: Path) -> None:
    mine = trainer(tmp_path, eval_strategy="epoch", metric_for_best_model="accuracy")
    rewound_by(mine, max_drop=0.01)
    mine.compute_metrics = lambda prediction: {"accuracy": 97.28}
    with pytest.raises(InputError, match=r"accuracy 97\.28 is above 1, so max_drop=0\.01"):
        mine.train()
    assert mine.state.global_step == BATCHES


def test_a_trained_network_is_adopted(tmp_path: Path) -> None:
    mine = trainer(tmp_path, eval_strategy="epoch", metric_for_best_model="accuracy")
    mine.train()
    dense = list(rates(mine))
    rates(mine).clear()
    run = rewound_by(mine, adopt=True, max_drop=0.99)
    mine.evaluate()
    mine.train()
    assert len(run) == 2 * T
    assert pieces(rates(mine), len(dense)) == [dense] * 2
    assert len(run.levels) == 3
    assert run.mask is not None
    assert_sparse(mine.model.state_dict(), run.mask)  # type: ignore[union-attr]


def test_a_schedule_that_ends_at_zero_needs_a_final_rate_to_be_fine_tuned_at(tmp_path: Path) -> None:
    schedule = {"lr_scheduler_type": "cosine", "num_train_epochs": 20, "learning_rate": 1e-3}
    mine = trainer(tmp_path, save_strategy="epoch", save_total_limit=1, **schedule)
    rewound_by(mine, technique="fine-tuning", retrain_epochs=1)
    with pytest.raises(InputError, match=r"too low to retrain at .* for example final=1e-05"):
        mine.train()
    later = trainer(tmp_path, **schedule)
    rewound_by(later, technique="fine-tuning", retrain_epochs=1, final=1e-5)
    later.train(resume_from_checkpoint=True)
    assert rates(later)[-2 * BATCHES :] == [1e-5] * 2 * BATCHES


# Bad input


@pytest.mark.parametrize(
    ("options", "mine", "said"),
    [
        ({"max_steps": 7}, {"retrain_epochs": 1}, "counts in max_steps, so a level's time is given as retrain_steps="),
        ({}, {"retrain_steps": 1}, "counts in num_train_epochs, so a level's time is given as retrain_epochs="),
        ({"max_steps": 7}, {"retrain_steps": 8}, "cannot rewind 8 steps: the original run trains for 7"),
        (
            {"max_steps": 7, "eval_strategy": "epoch", "metric_for_best_model": "accuracy"},
            {"max_drop": 0.1},
            "give metric_for_best_model=, eval_strategy='steps' and .* not 'accuracy', 'epoch' and 'no'",
        ),
        (
            {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "accuracy"},
            {"max_drop": 0.1, "retrain_steps": 5},
            "eval_steps=3 has none after step 11, where one ends; give a divisor of 11",
        ),
        ({"num_train_epochs": 2.5}, {}, "num_train_epochs must be a whole number, not 2.5"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
            {},
            "load_best_model_at_end would bring back a denser network; leave it out, and give max_drop=",
        ),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size may restart the training"),
        ({}, {"max_drop": 0.1}, "max_drop needs the accuracy of every level: .* not None, 'no' and 'no'"),
        (
            {"eval_strategy": "epoch", "save_strategy": "steps", "metric_for_best_model": "accuracy"},
            {"max_drop": 0.1},
            "not 'accuracy', 'epoch' and 'steps'",
        ),
        ({}, {"retrain_epochs": 3}, "cannot rewind 3 epochs: the original run trains for 2"),
        ({}, {"compression": 1}, "compression must be above 1, not 1"),
    ],
)
def test_what_cannot_be_done_is_told_before_training(
    options: dict[str, object], mine: dict[str, object], said: str, tmp_path: Path
) -> None:
    given = trainer(tmp_path, **options)
    with pytest.raises(InputError, match=said):
        rewound_by(given, **mine)


def test_early_stopping_is_refused(tmp_path: Path) -> None:
    given = trainer(tmp_path)
    given.add_callback(EarlyStoppingCallback())
    with pytest.raises(InputError, match="EarlyStoppingCallback would end the run in the middle of a level"):
        rewound_by(given)


def test_a_model_is_no_trainer() -> None:
    with pytest.raises(InputError, match=r"trainer must be of type Trainer, not Bert.*; give the trainer itself"):
        rewind(bert())  # type: ignore[arg-type]


def test_a_model_that_is_made_later_is_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    given = Trainer(args=args, model_init=bert, train_dataset=Sentences(8))
    with pytest.raises(InputError, match="model_init makes its model only when it trains; give it model="):
        rewound_by(given)


def test_data_without_an_end_are_refused(tmp_path: Path) -> None:
    class Endless(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            yield from ()

    given = trainer(tmp_path)
    given.train_dataset = Endless()
    with pytest.raises(InputError, match="the training data have no length"):
        rewound_by(given)


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    given = trainer(tmp_path)
    given.is_fsdp_enabled = True  # what the trainer finds in its Accelerator
    with pytest.raises(InputError, match="cannot prune parameters sharded by FSDP or DeepSpeed"):
        rewound_by(given)


def test_a_trainer_is_rewound_once(tmp_path: Path) -> None:
    given = trainer(tmp_path)
    rewound_by(given)
    with pytest.raises(InputError, match="being rewound already"):
        rewound_by(given)


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "rewound.integrations.transformers")
    with pytest.raises(
        ImportError, match=r"^Hugging Face's Trainer is missing: pip install 'rewound\[transformers\]'$"
    ):
        importlib.import_module("rewound.integrations.transformers")
